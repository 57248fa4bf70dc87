"""Two nodes: what one answers the other, and lends."""

import msgspec
import pytest

from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.state import Key, Layout, Shard
from tiercache.testing.sim.asking import ask
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import (
    TOKENS,
    Client,
    Rig,
    boundary,
    evict,
    hybrid,
    on_disk,
    saved,
    small,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": bytes(32)},
        {"digests": []},
        {"digests": [bytes(31)] * 5},
        {"limit": 21},
        {"limit": -1},
        {"ranks": 0},
        {"ranks": 1 << 20},
        {"codecs": ()},
        {"codecs": ("native",) * 17},
        {"request": "r" * 257},
        {"digests": [bytes(32)] * 70_000, "limit": 1},
    ],
)
def test_nonsense_is_answered_with_nothing(
    nodes: Nodes, there: Client, changes: dict[str, object]
) -> None:
    saved(there, 8)
    assert ask(nodes, there, **changes) == ccm.Located(0, [])
    found = ask(nodes, there)
    assert found is not None
    assert found.boundary == 8


def test_ranks_that_no_part_can_be_split_over_find_nothing(nodes: Nodes) -> None:
    there = Client(nodes.rigs["b"], hybrid(4), ranks=4).attach()
    assert ask(nodes, there, ranks=3) == ccm.Located(0, [])


def test_the_asker_gets_no_more_than_it_can_use(nodes: Nodes, there: Client) -> None:
    saved(there, 8, 16)
    found = ask(nodes, there, limit=15)
    assert found is not None
    assert found.boundary == 8


def test_all_ranks_must_be_there(nodes: Nodes) -> None:
    ranks = [Client(nodes.rigs["b"], hybrid(2), ranks=2, rank=rank).attach() for rank in (0, 1)]
    saved(ranks[0], 8)
    assert ask(nodes, ranks[0], ranks=2) == ccm.Located(0, [])
    ranks[1].save("s", ranks[1].offers(ranks[1].chain(TOKENS), 8, parts=["recurrent", "conv"]))
    found = ask(nodes, ranks[0], ranks=2)
    assert found is not None
    assert (found.boundary, len(found.records)) == (8, 6)
    assert ask(nodes, ranks[0], ranks=1) == ccm.Located(0, [])
    assert ask(nodes, ranks[0], ranks=1, reshard=True) == found


def test_what_is_on_nvme_only_is_waited_for(nodes: Nodes, there: Client) -> None:
    eager = msgspec.structs.replace(clustered(nvme_pages=64), eager=True)
    nodes.rigs["b"] = rig = Rig(eager)
    nodes.meet("b")
    there = Client(rig, hybrid()).attach()
    on_disk(there, 8)
    assert ask(nodes, there) is None
    rig.run()
    (located,) = [body for body in rig.answers.values() if isinstance(body, ccm.Located)]
    assert (located.boundary, len(located.records)) == (8, 4)


def test_what_does_not_come_from_nvme_in_time_is_not_there(nodes: Nodes) -> None:
    nodes.rigs["b"] = rig = Rig(msgspec.structs.replace(clustered(nvme_pages=64), eager=True))
    nodes.meet("b")
    there = Client(rig, hybrid()).attach()
    on_disk(there, 8)
    assert ask(nodes, there) is None
    rig.wait(2)
    (located,) = [body for body in rig.answers.values() if isinstance(body, ccm.Located)]
    assert located == ccm.Located(0, [])


def test_a_namespace_cleared_while_it_is_waited_for_has_nothing(nodes: Nodes) -> None:
    limits = msgspec.structs.replace(clustered(nvme_pages=64), eager=True, namespaces_max=1)
    nodes.rigs["b"] = rig = Rig(limits)
    nodes.meet("b")
    there = Client(rig, hybrid()).attach()
    on_disk(there, 8)
    assert ask(nodes, there) is None
    rig.tell(ev.ClearAsked(900, rig.number(), there.namespace.digest.hex()))
    there.close()
    other = Client(rig, Layout(hybrid().parts[:1], 4)).attach()
    rig.run()
    rig.wait(31)
    assert boundary(other) == 0
    (located,) = [body for body in rig.answers.values() if isinstance(body, ccm.Located)]
    assert located == ccm.Located(0, [])


def test_a_sight_from_elsewhere_is_a_sight(nodes: Nodes) -> None:
    nodes.rigs["b"] = rig = Rig(clustered(nvme_pages=64))
    nodes.meet("b")
    there = Client(rig, hybrid()).attach()
    saved(there, 8)
    rig.run()
    assert rig.gauge("objects", "nvme") == 0
    ask(nodes, there)
    rig.run()
    assert rig.gauge("objects", "nvme") == 4


def test_what_is_lent_stays_until_the_loan_is_over(nodes: Nodes, there: Client) -> None:
    saved(there, 8)
    found = ask(nodes, there)
    assert found is not None
    there.rig.tell(cev.PeerLeft(-1))
    wanted = [(record.key, record.nbytes) for record in found.records]
    there.rig.tell(cev.LendAsked(-1, 77, wanted))
    lent = there.rig.answers[-1, 77]
    assert isinstance(lent, ccm.Lent)
    assert None not in lent.objects
    assert evict(there.rig).objects == 0
    there.rig.tell(cev.LoanOver(-1, 77))
    there.rig.tell(cev.LoanOver(-1, 78))
    assert evict(there.rig).objects == 4


def test_what_is_not_there_or_has_another_size_is_not_lent(nodes: Nodes, there: Client) -> None:
    saved(there, 8)
    found = ask(nodes, there)
    assert found is not None
    key, nbytes = found.records[0].key, found.records[0].nbytes
    writing = there.reserve("w", there.offers(there.chain(TOKENS), 16, parts=["conv"]))
    assert writing[0].outcome == "granted"
    unsealed = Key(key.namespace, "conv", Shard(0, 1), "native", there.chain(TOKENS).digest_at(16))
    wanted = [
        (key, nbytes + 1),
        (Key(bytes(32), key.part, key.shard, key.codec, key.digest), nbytes),
        (Key(key.namespace, "other", key.shard, key.codec, key.digest), nbytes),
        (Key(key.namespace, key.part, key.shard, key.codec, bytes(32)), nbytes),
        (unsealed, 8),
    ]
    there.rig.tell(cev.LendAsked(-1, 77, wanted))
    assert there.rig.answers[-1, 77] == ccm.Lent([None] * len(wanted))


def test_a_node_without_others_tells_nothing() -> None:
    rig = Rig(small())
    saved(Client(rig, hybrid()).attach(), 8)
    rig.tell(cev.SummaryAsked(-1, 1, 0))
    assert rig.answers[-1, 1] == ccm.Summarised(0, True, [], [])
