"""A node and a pool: what comes from there, and what a clear is there."""

import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.core.limits import Limits
from tiercache.errors import Fault
from tiercache.state import Record
from tiercache.testing.sim.asking import EIGHT, loaded, plan, planned
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.pooling import at, name_of, pooled, resumes, told
from tiercache.testing.sim.rig import TOKENS, Client, Rig, boundary, hybrid, saved, spans


@pytest.fixture
def client() -> Client:
    """An engine at a node with a pool."""
    return at(pooled())


def given(limits: Limits | None = None) -> list[Record]:
    """Return the records of a set that some node has put there."""
    giver = at(limits or pooled())
    saved(giver, 8)
    (deposit,) = resumes(giver)
    return [record for record, _ in deposit.objects]


def located(client: Client, records: list[Record], boundary: int = 8) -> None:
    """The pool says where a plan that waits could be resumed."""
    (asked,) = client.rig.take(ccm.Locate)
    assert (asked.peer, asked.boot) == (POOL, "")
    client.rig.tell(cev.LocateEnded(asked.job, boundary, records, None))


def test_what_the_pool_holds_is_planned_fetched_and_loaded(client: Client) -> None:
    told(client, 8)
    asked = plan(client)
    located(client, given())
    assert planned(client, asked).boundary == 8
    loading = client.loading("r")
    assert client.rig.later(loading) is None
    (pull,) = client.rig.take(ccm.Pull)
    assert (pull.peer, len(pull.objects), pull.flush) == (POOL, 4, 0)
    client.rig.tell(cev.Pulled(pull.job, [None] * 4))
    came = client.rig.answers[client.session, loading.call]
    assert isinstance(came, cm.Loaded)
    assert (came.boundary, spans(came.pieces)) == (8, EIGHT)
    assert client.rig.count("pool_asked", "found") == 1
    assert client.rig.count("pool_read_bytes") > 0
    assert client.rig.count("peer_asked", "found") == client.rig.count("peer_read_bytes") == 0
    client.release("r")
    assert resumes(client) == [], "it is there already"


def test_what_nobody_put_there_costs_no_question(client: Client) -> None:
    assert boundary(client) == 0
    told(client, 8)
    assert boundary(client, [each + 1 for each in TOKENS]) == 0
    assert client.rig.take(ccm.Locate) == []


def test_what_it_holds_no_more_is_not_asked_for(client: Client) -> None:
    told(client, 8)
    removed = cev.PeerTold(POOL, "", 1, False, [], [name_of(client)], 0)
    client.rig.tell(removed)
    assert boundary(client) == 0
    assert client.rig.machine.cluster.version_of(POOL) == 1
    client.rig.tell(cev.MembersSeen({}))
    assert client.rig.machine.cluster.version_of(POOL) == 1, "it neither joins nor leaves"


def test_what_the_fetch_asks_for_is_of_this_epoch(client: Client) -> None:
    client.rig.tell(cev.FlushesKnown({client.namespace.digest: 7}))
    assert client.rig.machine.cluster.flush_of(client.namespace.digest) == 7
    told(client, 8)
    plan(client)
    located(client, given())
    (pull,) = client.rig.take(ccm.Pull)
    assert pull.flush == 7


def test_a_plan_waits_for_the_pool_as_long_as_it_may() -> None:
    client = at(pooled(pool_answer_s_max=0.5, peer_answer_s_max=0.01))
    told(client, 8)
    asked = plan(client)
    client.rig.wait(0.4)
    assert (client.session, asked.call) not in client.rig.answers
    client.rig.wait(0.2)
    assert planned(client, asked).boundary == 0
    assert client.rig.count("pool_asked", "late") == 1


def test_what_does_not_come_is_a_miss(client: Client) -> None:
    told(client, 8)
    asked = plan(client)
    located(client, given())
    assert planned(client, asked).boundary == 8
    (pull,) = client.rig.take(ccm.Pull)
    faults = [None, Fault.DAMAGED, Fault.MISSING, Fault.IO]
    client.rig.tell(cev.Pulled(pull.job, faults))
    assert loaded(client).boundary == 0
    counts = client.rig.machine.counters["pool_faults"]
    assert (counts["damaged"], counts["missing"], counts["io"]) == (1, 1, 1)


def test_a_node_that_holds_as_much_is_asked_first() -> None:
    nodes = Nodes(a=Rig(clustered(pool=True)), b=Rig(clustered(pool=True)))
    here, there = (Client(nodes.rigs[name], hybrid()).attach() for name in "ab")
    told(here, 8)
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    (asked,) = here.rig.take(ccm.Locate)
    assert asked.peer == "b"
    assert here.rig.gauge("peers") == 1
    told(here, 12, since=0, version=1)
    plan(here, "s")
    (asked,) = here.rig.take(ccm.Locate)
    assert asked.peer == POOL, "it holds more"


def test_a_node_cannot_be_told_to_hand_over_to_it(client: Client) -> None:
    digests = list(client.chain(TOKENS).digests[1:])
    asked = ev.PushAsked(
        client.session, client.rig.number(), "r", "", "", digests, 20, ("native",), False, POOL,
        client.rig.now + 1,
    )  # fmt: skip
    answer = client.rig.ask(asked, cm.Pushed)
    assert answer.reason == "unknown_node"


def test_routers_are_told_of_it(client: Client) -> None:
    told(client, 8)
    asked = cev.WhereAsked(
        client.session, client.rig.number(), b"", "", "", list(client.chain(TOKENS).digests[1:]),
        4, 20, ("native",), False,
    )  # fmt: skip
    here, there = client.rig.ask(asked, ccm.Places).places
    assert (here.boundary, there.node, there.tier, there.boundary) == (0, POOL, "pool", 8)


# --- clears


def cleared(client: Client, namespace: str = "", flush: int = 0) -> ev.ClearAsked:
    asked = ev.ClearAsked(900, client.rig.number(), namespace, flush)
    client.rig.tell(asked)
    return asked


def answer(client: Client, asked: ev.ClearAsked) -> cm.Evicted | None:
    found = client.rig.answers.get((900, asked.call))
    assert found is None or isinstance(found, cm.Evicted)
    return found


def test_a_clear_reaches_the_pool_where_nobody_else_numbers_it(client: Client) -> None:
    saved(client, 8)
    asked = cleared(client)
    assert answer(client, asked) is None, "it is not true yet"
    (flush,) = client.rig.take(ccm.FlushPool)
    assert flush.flushes == {client.namespace.digest: 1}
    assert client.rig.machine.cluster.flush_of(client.namespace.digest) == 1
    client.rig.tell(cev.PoolFlushed(flush.job, None))
    assert answer(client, asked) == cm.Evicted(4, 80, 0)


def test_a_pool_that_was_not_told_is_named(client: Client) -> None:
    asked = cleared(client)
    (flush,) = client.rig.take(ccm.FlushPool)
    client.rig.tell(cev.PoolFlushed(flush.job, Fault.IO))
    found = answer(client, asked)
    assert found is not None
    assert found.failed == "pool"
    assert client.rig.count("pool_faults", "io") == 1


def test_an_answer_waits_for_the_disk_and_for_the_pool() -> None:
    for disk_first in (True, False):
        client = at(pooled(nvme_pages=64))
        asked = cleared(client)
        (flush,) = client.rig.take(ccm.FlushPool)
        (wipe,) = client.rig.take(cm.Wipe)
        outcomes: list[ev.Event] = [ev.Wiped(wipe.job, Fault.IO), cev.PoolFlushed(flush.job, None)]
        for outcome in outcomes if disk_first else outcomes[::-1]:
            assert answer(client, asked) is None
            client.rig.tell(outcome)
        found = answer(client, asked)
        assert found is not None
        assert found.failed == "nvme"


def test_what_nobody_attached_with_here_can_be_cleared_by_its_whole_name(client: Client) -> None:
    elsewhere = bytes(range(32))
    cleared(client, elsewhere.hex())
    (flush,) = client.rig.take(ccm.FlushPool)
    assert flush.flushes == {elsewhere: 1}
    for namespace in ("abc", "z" * 64, elsewhere.hex().upper()):
        asked = cleared(client, namespace)
        assert answer(client, asked) is not None
    assert client.rig.take(ccm.FlushPool) == []


def test_in_a_cluster_flushes_have_numbers_already() -> None:
    client = at(clustered(pool=True))
    for flush in (0, 3):
        asked = cleared(client, client.namespace.digest.hex(), flush)
        assert answer(client, asked) is not None
    assert client.rig.take(ccm.FlushPool) == []
    alone = at(pooled())
    asked = cleared(alone, alone.namespace.digest.hex(), 3)
    assert answer(alone, asked) is not None, "it comes from the pool"
    assert alone.rig.take(ccm.FlushPool) == []


def test_what_engines_serve_is_known(client: Client) -> None:
    assert client.rig.machine.cluster.served() == {client.namespace.digest: client.layout}
    assert Rig(pooled()).machine.cluster.served() == {}
