"""Where a prompt could be resumed, and what it would take: asked without a trace."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.commands import Place
from tiercache.core.cluster.whereabouts import BYTES_MAX
from tiercache.core.limits import Limits, Retaining
from tiercache.state import Kind, Layout, Part, Tensor
from tiercache.state.names import short
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import (
    ADMIN,
    BLOCK,
    PAGE,
    TOKENS,
    Client,
    Rig,
    evict,
    hybrid,
    on_disk,
    part,
    saved,
    small,
)

AT_8 = 8 * 8 + 2 * 8
"""Bytes that a boundary at 8 tokens rests on: rows of 8 tokens and two states."""


def asking(client: Client, **changes: object) -> cev.WhereAsked:
    chain = client.chain(TOKENS)
    asked = cev.WhereAsked(
        client.session,
        client.rig.number(),
        b"",
        client.lora,
        client.salt,
        list(chain.digests[1:]),
        BLOCK,
        len(chain) - 1,
        client.codecs,
        client.reshard,
    )
    return msgspec.structs.replace(asked, **changes)


def where(client: Client, **changes: object) -> ccm.Places:
    """Ask, and check that nothing is other than before."""
    machine = client.rig.machine
    before = msgspec.json.encode((machine.counters, machine.gauges()))
    places = client.rig.ask(asking(client, **changes), ccm.Places)
    machine.check()
    assert msgspec.json.encode((machine.counters, machine.gauges())) == before
    return places


def refused(client: Client, **changes: object) -> cm.Refused:
    return client.rig.ask(asking(client, **changes), cm.Refused)


@pytest.fixture
def client() -> Client:
    return Client(Rig(msgspec.structs.replace(small(nvme_pages=64), eager=True)), hybrid()).attach()


# --- here


def test_what_is_in_memory_costs_nothing(client: Client) -> None:
    saved(client, 4, 8)
    assert where(client) == ccm.Places([Place("", 8, "host", AT_8)], "", BLOCK)
    assert where(client, limit=7).places == [Place("", 4, "host", 32 + 16)]
    assert where(client, limit=3) == ccm.Places([Place("", 0)], "beyond_limit", BLOCK)
    assert where(client, limit=1 << 40).places[0].boundary == 8
    # An operator names the namespace, and leaves the rest to the node.
    digest = client.namespace.digest
    told = where(client, session=ADMIN, namespace=digest, block_tokens=0)
    assert told == ccm.Places([Place("", 8, "host", AT_8)], "", BLOCK)


def test_why_there_is_nothing(client: Client) -> None:
    nothing = [Place("", 0)]
    assert where(client) == ccm.Places(nothing, "unknown_prefix", BLOCK)
    assert where(client, digests=[]).reason == "unknown_prefix"
    assert where(client, salt="other") == ccm.Places(nothing, "unknown_prefix", BLOCK)
    assert client.rig.gauge("namespaces") == 1, "asking opens none"
    chain = client.chain(TOKENS)
    client.save("rows", client.offers(chain, 8, parts=("kv",)))
    assert where(client).reason == "no_state"
    client.save("states", client.offers(chain, 12, parts=("recurrent", "conv")))
    assert where(client).reason == "incomplete"


def test_adapters_and_tenants_have_namespaces_of_their_own(client: Client) -> None:
    client.salt = "s"
    saved(client, 8)
    assert where(client).places[0].boundary == 8
    assert where(client, salt="").places[0].boundary == 0
    assert where(client, salt="", lora="l").places[0].boundary == 0
    # The same by another session, which has not asked for anything in it yet.
    other = Client(client.rig, hybrid()).attach()
    assert where(other, salt="s").places[0].boundary == 8


def test_all_ranks_must_have_it() -> None:
    rig = Rig()
    zero, one = (Client(rig, hybrid(units=2), ranks=2, rank=rank).attach() for rank in (0, 1))
    saved(zero, 8)
    assert where(zero).reason == "no_state"
    saved(one, 8)
    # Rows are not split: both ranks use the same.
    assert where(one).places == [Place("", 8, "host", 8 * 8 + 2 * 16)]
    digest, admin = zero.namespace.digest, {"session": ADMIN}
    assert where(zero, namespace=digest, **admin).reason == "no_state"
    assert where(zero, namespace=digest, reshard=True, **admin).places[0].boundary == 8


def test_the_disk_takes_as_long_as_it_took(client: Client) -> None:
    on_disk(client, 8)
    assert where(client).places == [Place("", 8, "nvme", AT_8, AT_8, -1)]
    planned = client.plan("r", client.chain(TOKENS))
    assert (planned.boundary, planned.ready) == (8, False)
    # On its way: nothing more has to begin, but it is not known how long that takes.
    assert where(client).places == [Place("", 8, "nvme", AT_8, AT_8, -1)]
    client.rig.now += 0.25
    client.rig.run()
    assert where(client).places == [Place("", 8, "host", AT_8)]
    client.release("r")
    evict(client.rig)
    assert where(client).places == [Place("", 8, "nvme", AT_8, AT_8, 0.25)]


def test_how_long_computing_takes_is_told_beside() -> None:
    limits = msgspec.structs.replace(small(), retaining=Retaining("dense", prefill_tokens_per_s=80))
    client = Client(Rig(limits), hybrid()).attach()
    saved(client, 8)
    assert where(client).places[0].compute_s == pytest.approx(0.1)


def test_asking_does_not_make_it_recent() -> None:
    """The one used least recently goes, whoever asked about it meanwhile."""
    client = Client(Rig(small(pages=8)), hybrid()).attach()
    others = [list(range(100 * at, 100 * at + 4)) for at in (1, 2, 3)]
    for tokens in others[:2]:
        saved(client, 4, tokens=tokens)
    first = list(client.chain(others[0]).digests[1:])
    for _ in range(100):
        assert where(client, digests=first, limit=4).places[0].boundary == 4
    saved(client, 4, tokens=others[2])
    assert where(client, digests=first, limit=4).places[0].boundary == 0


# --- what an earlier start left, and nobody has attached for


def restarted(client: Client, limits: Limits) -> Rig:
    """A node that found the same on its disk, and nothing of what it is called."""
    records = [(item.record, item.nvme) for item in client.rig.machine.items() if item.nvme]
    later = Rig(limits, opened=False)
    later.tell(ev.NvmeOpened({extent.segment: 4 * PAGE for _, extent in records}, []))
    later.tell(ev.Found(records))
    later.tell(ev.ScanEnded())
    assert later.gauge("objects", "nvme") == len(records) > 0
    return later


# --- questions that make no sense


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"namespace": b"short"}, "32 bytes"),
        ({"block_tokens": BLOCK + 1}, "here a block has 4"),
        ({"block_tokens": -1}, "say it"),
        ({"limit": -1}, "below 0"),
        ({"codecs": ()}, "0 codecs"),
        ({"codecs": ("native",) * 17}, "17 codecs"),
        ({"namespace": bytes(32), "block_tokens": 0}, "not known here"),
        ({"namespace": bytes(32), "block_tokens": 1 << 62}, "1048576 at most"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    client: Client, changes: dict[str, object], text: str
) -> None:
    answer = refused(client, **changes)
    assert answer.kind == "invalid"
    assert text in answer.text


def test_more_blocks_than_a_message_may_name_are_refused() -> None:
    client = Client(Rig(msgspec.structs.replace(small(), batch_max=4)), hybrid()).attach()
    assert "4 at most" in refused(client).text


def test_who_has_not_attached_must_name_the_namespace(client: Client) -> None:
    assert refused(client, session=ADMIN).kind == "refused"


def test_a_namespace_whose_layout_is_not_known_can_hold_nothing(client: Client) -> None:
    asked = {"session": ADMIN, "namespace": bytes(32)}
    assert where(client, **asked) == ccm.Places([Place("", 0)], "unknown_prefix", BLOCK)
    # Found on the disk; nobody has attached since.
    on_disk(client, 8)
    again = restarted(client, client.rig.limits)
    late = Client(again, hybrid())
    named = {"session": ADMIN, "namespace": client.namespace.digest}
    assert where(late, **named).reason == "unknown_prefix"
    assert "not known here" in refused(late, block_tokens=0, **named).text


# --- elsewhere


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(a=Rig(clustered()), b=Rig(clustered()), c=Rig(clustered()))


def of(nodes: Nodes, name: str) -> Client:
    return Client(nodes.rigs[name], hybrid()).attach()


def test_other_nodes_are_known_by_what_they_told(nodes: Nodes) -> None:
    here, b, c = (of(nodes, name) for name in "abc")
    saved(here, 4)
    saved(b, 4, 8)
    saved(c, 4, 8, 12)
    assert [place.node for place in where(here).places] == [""]
    nodes.gossip("b")
    nodes.gossip("c")
    at_12 = 12 * 8 + 2 * 8
    assert where(here).places == [
        Place("", 4, "host", 32 + 16),
        Place("c", 12, "peer", at_12, at_12 - 32, -1, -1, "well"),
        Place("b", 8, "peer", AT_8, AT_8 - 32, -1, -1, "well"),
    ]
    # Two at the same depth come by name; within the limit only.
    assert [(p.node, p.boundary) for p in where(here, limit=8).places[1:]] == [("b", 8), ("c", 8)]
    assert [p.node for p in where(here, limit=3).places] == [""]
    here.rig.tell(cev.MembersSeen({"b": "1"}))
    assert [place.node for place in where(here).places] == ["", "b"]


def test_what_is_in_memory_here_need_not_come_from_another_node(nodes: Nodes) -> None:
    here, b = of(nodes, "a"), of(nodes, "b")
    saved(here, 4, 8)
    saved(b, 4, 8)
    nodes.gossip("b")
    assert where(here).places[1] == Place("b", 8, "peer", AT_8, 0, 0.0, -1, "well")
    assert where(here, limit=4).places[1].absent_bytes == 0


def test_how_fast_another_node_gives_is_measured(nodes: Nodes) -> None:
    here, b = of(nodes, "a"), of(nodes, "b")
    saved(b, 4, 8)
    nodes.gossip("b")
    asked = here.planning("r", here.chain(TOKENS), limit=4)
    assert here.rig.later(asked) is None
    nodes.locate("a")
    place = where(here).places[0]
    assert (place.boundary, place.tier, place.seconds) == (4, "coming", -1)
    here.rig.now += 0.5
    nodes.pull("a")
    first, second = where(here).places
    assert (first.tier, first.absent_bytes) == ("host", 0)
    assert (second.boundary, second.seconds, second.health) == (8, 0.5, "well")


def test_a_node_that_is_left_alone_is_told_as_sick(nodes: Nodes) -> None:
    here, b = of(nodes, "a"), of(nodes, "b")
    saved(b, 8)
    nodes.gossip("b")
    for number in range(3):
        here.rig.later(here.planning(f"r{number}", here.chain(TOKENS)))
        here.rig.wait(1.0)
    assert where(here).places[1].health == "sick"


def test_nodes_hold_what_is_not_known_here(nodes: Nodes) -> None:
    here, b = Client(nodes.rigs["a"], hybrid()), of(nodes, "b")
    saved(b, 8)
    nodes.gossip("b")
    named = {"session": ADMIN, "namespace": b.namespace.digest}
    assert where(here, **named).places[1] == Place("b", 8, "peer", -1, -1, -1, -1, "well")


def test_absurd_layouts_are_told_as_far_as_a_message_goes(nodes: Nodes) -> None:
    tensor = Tensor("values", "int64", (1 << 40, 1 << 40), ("a", "b"))
    state = Part("s", Kind.RECURRENT, 1, 0, 1, (tensor,))
    layout = Layout((part("kv", Kind.KV, None, BLOCK), state), BLOCK)
    here = Client(nodes.rigs["a"], layout).attach()
    chain = here.chain(TOKENS)
    names = [short(here.namespace.digest, chain.digest_at(8))]
    here.rig.tell(cev.PeerTold("b", "1", 1, True, names, []))
    place = where(here).places[1]
    assert (place.boundary, place.nbytes, place.absent_bytes) == (8, BYTES_MAX, BYTES_MAX)
    assert msgspec.msgpack.encode(place)
    wide = Layout((part("kv", Kind.KV, None, 1 << 21),), 1 << 21)
    large = Client(nodes.rigs["a"], wide).attach()
    assert "at most" in refused(large, block_tokens=1 << 21, digests=[bytes(32)]).text


def test_an_isolated_node_has_nothing_to_give(nodes: Nodes) -> None:
    here = of(nodes, "a")
    saved(here, 8)
    here.rig.tell(cev.StandingHeld(0.0))
    assert where(here) == ccm.Places([Place("", 0)], "isolated", BLOCK)


def test_of_very_many_nodes_the_deepest_are_told() -> None:
    limits = clustered()
    clustering = msgspec.structs.replace(limits.clustering, places_max=2)
    limits = msgspec.structs.replace(limits, clustering=clustering)
    nodes = Nodes(a=Rig(limits), b=Rig(clustered()), c=Rig(clustered()), d=Rig(clustered()))
    for at, name in enumerate("bcd", 1):
        saved(of(nodes, name), 4 * at)
        nodes.gossip(name)
    assert [place.node for place in where(of(nodes, "a")).places] == ["", "d", "c"]


# --- what is told of tiers


def test_a_boundary_that_leaves_memory_is_told_anew() -> None:
    limits = small(pages=64, nvme_pages=64)
    clustering = msgspec.structs.replace(limits.clustering, tells_routers=True)
    rig = Rig(msgspec.structs.replace(limits, clustering=clustering, eager=True))
    client = Client(rig, hybrid()).attach()
    own = rig.machine.cluster.own
    assert own is not None
    saved(client, 4, 8)
    rig.run()
    (added,) = {tuple(own.since(-1).added)}
    assert len(added) == 2
    assert not own.slower(added)
    version = own.version
    evict(rig)
    told = own.since(version)
    assert (sorted(told.added), told.removed) == (sorted(added), [])
    assert own.slower(added) == set(added)
    version = own.version
    client.plan("r", client.chain(TOKENS))
    rig.run()
    back = own.since(version).added
    assert back
    assert set(back) <= set(added)
    assert not own.slower(back)
    client.release("r")
    assert rig.later(ev.ClearAsked(ADMIN, rig.number(), "")) is None  # The disk is wiped first.
    assert len(own) == 0
    assert own.since(-1).added == []


def test_what_was_found_without_a_layout_is_told_once_there_is_one(client: Client) -> None:
    on_disk(client, 4, 8)
    limits = client.rig.limits
    clustering = msgspec.structs.replace(limits.clustering, tells_routers=True)
    later = restarted(client, msgspec.structs.replace(limits, clustering=clustering))
    own = later.machine.cluster.own
    assert own is not None
    assert len(own) == 0
    Client(later, hybrid()).attach()
    assert len(own) == 2
    assert len(own.slower(own.since(-1).added)) == 2
    Client(later, hybrid()).attach()
    assert own.version == 2


def test_a_node_alone_keeps_no_account_unless_told_to() -> None:
    assert Rig(small()).machine.cluster.own is None
