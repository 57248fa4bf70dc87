"""Two nodes: one asks where a prompt could be resumed, and brings what it lacks."""

import pytest

from tiercache.core import commands as cm
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.pulling import fits
from tiercache.errors import Fault
from tiercache.state import Key, Layout, Record, Shard
from tiercache.testing.sim.asking import EIGHT, loaded, plan, planned
from tiercache.testing.sim.pair import Nodes
from tiercache.testing.sim.rig import (
    TOKENS,
    Client,
    boundary,
    evict,
    hybrid,
    saved,
    spans,
)

# --- the whole way


def test_what_another_node_holds_is_planned_fetched_and_loaded(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    (answer,) = nodes.locate("a")
    assert (answer.boundary, len(answer.records)) == (8, 4)
    found = planned(here, asked)
    assert (found.boundary, found.ready, found.ready_boundary, found.reason) == (8, False, 0, "")
    loading = here.loading("r")
    assert here.rig.later(loading) is None
    assert nodes.pull("a") == 4
    came = here.rig.answers[here.session, loading.call]
    assert isinstance(came, cm.Loaded)
    assert (came.boundary, spans(came.pieces), came.reason) == (8, EIGHT, "")
    here.release("r")
    assert boundary(here) == 8
    assert here.rig.take(ccm.Locate) == [], "it is here now"
    assert here.rig.count("peer_asked", "found") == there.rig.count("peer_answered", "found") == 1
    assert here.rig.count("peer_read_bytes") == there.rig.count("peer_lent_bytes") > 0


def test_what_was_fetched_can_be_lent_on(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a")
    nodes.pull("a")
    there.rig.tell(cev.PeerLeft(-1))
    evict(there.rig)
    assert there.rig.gauge("objects", "host") == 0
    nodes.gossip("a")
    plan(there)
    nodes.locate("b")
    assert nodes.pull("b") == 4
    there.release("r")
    assert boundary(there) == 8


def test_what_is_here_is_not_fetched_again(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8, 16)
    saved(here, 8)
    nodes.gossip("b")
    asked = plan(here)
    (answer,) = nodes.locate("a")
    assert sorted((r.key.part, r.end) for r in answer.records) == [
        ("conv", 16), ("kv", 12), ("kv", 16), ("recurrent", 16)
    ]  # fmt: skip
    assert nodes.pull("a") == 4
    assert planned(here, asked).boundary == 16
    assert loaded(here).boundary == 16


def test_nobody_is_asked_for_what_nobody_told(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    other = here.chain([7] * 20)
    assert here.plan("other", other).boundary == 0
    saved(here, 8)
    assert boundary(here) == 8, "and not for what is no deeper"
    assert here.rig.work == []


def test_kv_alone_is_not_told_where_a_state_is_needed(
    nodes: Nodes, here: Client, there: Client
) -> None:
    there.save("s", there.offers(there.chain(TOKENS), 8, parts=["kv", "conv"]))
    nodes.gossip("b")
    assert boundary(here) == 0
    there.save("s", there.offers(there.chain(TOKENS), 8, parts=["recurrent"]))
    nodes.gossip("b", whole=False)
    plan(here)


def test_a_layout_without_states_tells_every_block(nodes: Nodes) -> None:
    layout = Layout(hybrid().parts[:1], 4)
    here = Client(nodes.rigs["a"], layout).attach()
    there = Client(nodes.rigs["b"], layout).attach()
    saved(there, 12)
    nodes.gossip("b")
    plan(here)
    (answer,) = nodes.locate("a")
    assert (answer.boundary, len(answer.records)) == (12, 3)
    assert nodes.pull("a") == 3
    here.release("r")
    assert boundary(here) == 12


def test_a_boundary_inside_a_block_is_told_to_nobody(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 10)
    nodes.gossip("b")
    assert boundary(here) == 0
    assert here.rig.work == []


def test_objects_of_another_namespace_never_come(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    here.salt = "another tenant"
    assert boundary(here) == 0
    here.salt, here.lora = "", "another adapter"
    assert boundary(here) == 0
    assert here.rig.work == []


# --- one that says nothing, or something else


def test_a_plan_waits_no_longer_than_it_may(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    saved(here, 4)
    nodes.gossip("b")
    asked = plan(here)
    (question,) = here.rig.take(ccm.Locate)
    here.rig.wait(0.04)
    assert (here.session, asked.call) not in here.rig.answers
    here.rig.wait(0.02)
    assert planned(here, asked).boundary == 4
    answer = nodes.ask("a", question)
    assert answer is not None
    nodes.answer("a", question.job, answer)
    assert here.rig.work == [], "nobody waits for it any more"
    assert here.rig.count("peer_asked", "late") == 1


@pytest.mark.parametrize("fault", [Fault.IO, Fault.MISSING])
def test_one_that_cannot_answer_costs_nothing_else(
    nodes: Nodes, here: Client, there: Client, fault: Fault
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    nodes.locate("a", fault)
    assert planned(here, asked).boundary == 0
    assert here.rig.take(ccm.Pull) == []
    assert here.rig.count("peer_asked", "failed") == 1


def test_one_that_fails_again_and_again_is_not_asked_for_a_while(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    for request in "123":
        plan(here, request)
        nodes.locate("a", Fault.IO)
    assert here.plan("4", here.chain(TOKENS)).boundary == 0
    here.rig.wait(1.5)
    plan(here, "5")
    nodes.locate("a")
    assert nodes.pull("a") == 4


def test_one_request_asks_once(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a", Fault.IO)
    assert here.plan("r", here.chain(TOKENS)).boundary == 0
    assert here.rig.work == []


def test_what_was_told_and_is_gone_is_no_hit(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    evict(there.rig)
    asked = plan(here)
    assert nodes.locate("a") == [ccm.Located(0, [])]
    assert planned(here, asked).boundary == 0
    assert here.rig.count("peer_asked", "not_found") == 1
    nodes.gossip("b", whole=False)
    assert boundary(here) == 0, "and is not asked for again"


def test_what_goes_between_the_answer_and_the_fetch_is_a_miss(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    nodes.locate("a")
    there.rig.wait(31)  # The hold is over.
    evict(there.rig)
    assert nodes.pull("a") == 0
    assert planned(here, asked).boundary == 8
    assert (loaded(here).boundary, here.rig.gauge("objects", "host")) == (0, 0)
    here.release("r")
    nodes.gossip("b", whole=False)
    assert boundary(here) == 0
    assert here.rig.count("peer_faults", "missing") == 4


def test_what_was_located_is_kept_for_a_while(nodes: Nodes, here: Client, there: Client) -> None:
    saved(there, 8)
    nodes.gossip("b")
    plan(here)
    nodes.locate("a")
    assert evict(there.rig).objects == 0
    there.rig.tell(cev.PeerLeft(-1))
    assert evict(there.rig).objects == 4


def test_what_arrives_damaged_is_a_miss_and_held_against_the_sender(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    for request in "123":
        plan(here, request)
        nodes.locate("a")
        assert nodes.pull("a", Fault.DAMAGED) == 0
        assert loaded_boundary(here, request) == 0
        here.release(request)
        here.rig.wait(10)
    assert here.rig.count("peer_faults", "damaged") == 12


def loaded_boundary(client: Client, request: str) -> int:
    """Load as if a boundary at 8 had been planned."""
    client.planned[request] = (8, client.chain(TOKENS).digest_at(8))
    return loaded(client, request).boundary


def test_a_node_that_lies_about_objects_is_not_believed(
    nodes: Nodes, here: Client, there: Client
) -> None:
    saved(there, 8)
    nodes.gossip("b")
    asked = plan(here)
    (question,) = here.rig.take(ccm.Locate)
    answer = nodes.ask("a", question)
    assert answer is not None
    wrong = _with(answer.records[0], end=12)
    nodes.answer("a", question.job, ccm.Located(8, [wrong, *answer.records[1:]]))
    (pull,) = here.rig.take(ccm.Pull)
    assert wrong not in [record for record, _ in pull.objects]
    assert planned(here, asked).boundary == 0, "a piece is missing"
    assert here.rig.count("peer_asked", "failed") == 1
    here.rig.tell(cev.Pulled(pull.job, [None] * len(pull.objects)))


def _with(record: Record, **changes: object) -> Record:
    fields = {name: getattr(record, name) for name in record.__slots__}
    return Record(**{**fields, **changes})


# --- what fits


def _record(client: Client, part: str, end: int, **changes: object) -> Record:
    index = [each.name for each in client.layout.parts].index(part)
    offer = client.offer(client.chain(TOKENS), index, end)
    key = Key(client.namespace.digest, part, offer.shard, offer.codec, offer.digest)
    whole = Record(key, offer.start, end, offer.nbytes, bytes(16), "w", 0.0)
    return _with(whole, **changes)


def test_only_what_lies_on_the_way_and_has_the_right_size_fits(here: Client) -> None:
    layout, digests = here.layout, here.chain(TOKENS).digests[1:]
    kv, state = _record(here, "kv", 8), _record(here, "recurrent", 8)
    assert fits(kv, layout, digests)
    assert fits(state, layout, digests)
    space = here.namespace.digest
    wrong = [
        _with(kv, end=4),
        _with(kv, end=7),
        _with(kv, end=0),
        _with(kv, end=24),
        _with(kv, start=0),
        _with(kv, nbytes=kv.nbytes + 1),
        _with(kv, nbytes=0),
        _with(kv, base=bytes(32)),
        _with(kv, key=Key(space, "nothing", kv.key.shard, "native", kv.key.digest)),
        _with(kv, key=Key(space, "kv", Shard(0, 9), "native", kv.key.digest)),
        _with(kv, key=Key(space, "kv", kv.key.shard, "no codec", kv.key.digest)),
        _with(kv, key=Key(space, "kv", kv.key.shard, "native", digests[2])),
        _with(state, start=4),
    ]
    assert [record for record in wrong if fits(record, layout, digests)] == []
    int8 = _with(state, nbytes=3, key=Key(space, "recurrent", Shard(0, 1), "int8", digests[1]))
    assert fits(int8, layout, digests)
