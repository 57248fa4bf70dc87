"""An engine of four ranks, two on node a and two on node b: one boundary, or none."""

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.agreeing import ENDS_MAX
from tiercache.errors import Fault
from tiercache.state.care import Care
from tiercache.state.seats import RanksOf
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import ANSWER_S, Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, evict, hybrid, saved, spans
from tiercache.testing.sim.seated import RANKS, Engine, seated


@pytest.fixture
def engine() -> Engine:
    """Nothing saved yet."""
    return seated()


# --- the whole way


def test_the_deepest_boundary_of_both_nodes_is_given(engine: Engine) -> None:
    engine.save(8, 16)
    found = engine.plan()
    assert (found.boundary, found.ready, found.reason) == (16, True, "")
    assert spans(found.pieces) == [
        (0, 0, 4), (0, 4, 8), (0, 8, 12), (0, 12, 16), (1, 0, 16), (2, 0, 16)
    ]  # fmt: skip
    assert engine.head.rig.count("agreements", "found") == 1


def test_one_that_only_some_ranks_elsewhere_have_is_not_given(engine: Engine) -> None:
    engine.save(8)
    engine.save(16, ranks=range(3))
    found = engine.plan()
    assert (found.boundary, found.ready) == (8, True)
    assert engine.head.rig.count("lost_tokens", "elsewhere") == 8


def test_what_only_the_other_node_has_is_not_given(engine: Engine) -> None:
    engine.save(8)
    engine.save(16, ranks=range(1, 4))
    assert engine.plan().boundary == 8


def test_nothing_in_common_is_a_miss_with_its_reason(engine: Engine) -> None:
    engine.save(16, ranks=range(2))
    engine.save(8, ranks=range(2, 4))
    found = engine.plan()
    assert (found.boundary, found.reason) == (0, "elsewhere")
    assert engine.head.rig.count("misses", "elsewhere") == 1
    assert engine.head.rig.count("agreements", "not_found") == 1


def test_what_nobody_has_costs_no_wait_and_is_told_all_the_same(engine: Engine) -> None:
    found = engine.head.plan("r", engine.head.chain(TOKENS))
    assert (found.boundary, found.reason) == (0, "unknown_prefix")
    (command,) = engine.head.rig.take(ccm.Agree)
    assert command.ends == []
    assert engine.nodes.assent("a", command) == []
    engine.head.rig.tell(cev.AgreeEnded(command.job, [], None))
    assert engine.head.plan("r2", engine.head.chain(TOKENS)).reason == "unknown_prefix"
    engine.nodes.agree("a")
    # Both nodes have seen the prompt twice by now.
    digest = engine.head.chain(TOKENS).digests[5]
    namespace = engine.head.namespace.digest
    for rig in engine.nodes.rigs.values():
        assert rig.machine._books.sights.count(namespace, digest) == 2


def test_what_another_node_fetches_next_is_kept_there(engine: Engine) -> None:
    engine.save(16)
    engine.plan()
    other = engine.nodes.rigs["b"]
    other.run()
    held = other.gauge("objects", "host")
    evict(other)
    assert other.gauge("objects", "host") == held
    other.tell(cev.PeerLeft(-1))
    evict(other)
    assert other.gauge("objects", "host") == 0


def test_what_is_on_disk_over_there_is_sent_for(engine: Engine) -> None:
    engine.save(16)
    other = engine.nodes.rigs["b"]
    engine.plan("first")
    engine.plan("second")
    other.run()
    other.tell(cev.PeerLeft(-1))
    evict(other)
    assert other.gauge("objects", "host") == 0 < other.gauge("objects", "nvme")
    assert engine.plan("third").boundary == 16
    assert other.take(cm.Fill)


def test_ranks_elsewhere_are_not_leased_here(engine: Engine) -> None:
    engine.save(16)
    engine.plan()
    leases = engine.head.rig.machine._books.leases
    assert leases.held(engine.head.session) == 4 + 2 * 2, (
        "four blocks for all, two states of each rank"
    )


def test_a_load_never_falls_back_on_what_was_not_agreed_on(engine: Engine) -> None:
    rig = engine.head.rig
    engine.save(16)
    engine.save(8, ranks=range(2))
    engine.plan("first")
    engine.plan("second")
    rig.run()
    engine.head.release("first", "second")
    evict(rig)
    assert rig.gauge("objects", "host") == 0
    found = engine.plan()
    assert (found.boundary, found.ready) == (16, False)
    loading = engine.head.loading("r")
    assert rig.later(loading) is None
    for fill in rig.take(cm.Fill):
        deep = [
            record.key.part == "recurrent" and record.end == 16 for record, _, _ in fill.objects
        ]
        rig.tell(ev.Filled(fill.job, [Fault.DAMAGED if each else None for each in deep]))
    loaded = rig.answers[engine.head.session, loading.call]
    assert isinstance(loaded, cm.Loaded)
    assert (loaded.boundary, loaded.reason) == (0, "lost_or_late")
    assert engine.ranks[1].plan("own", engine.head.chain(TOKENS)).boundary == 0, "needs all ranks"


# --- what else may come


def test_one_question_for_a_request_however_often_it_asks(engine: Engine) -> None:
    engine.save(16)
    first = plan(engine.head)
    again = engine.head.plan("r", engine.head.chain(TOKENS))
    assert (again.boundary, again.reason) == (0, "elsewhere")
    engine.nodes.agree("a")
    assert planned(engine.head, first).boundary == 16
    assert engine.head.plan("r", engine.head.chain(TOKENS)).boundary == 16
    assert engine.head.rig.take(ccm.Agree) == []


def test_a_rank_that_plans_for_itself_asks_nobody(engine: Engine) -> None:
    engine.save(16)
    engine.head.all_ranks = False
    assert engine.head.plan("r", engine.head.chain(TOKENS)).boundary == 16
    assert engine.head.rig.take(ccm.Agree) == []


def test_a_prompt_shorter_than_a_block_asks_nobody(engine: Engine) -> None:
    assert engine.head.plan("r", engine.head.chain(TOKENS[:3])).boundary == 0
    assert engine.head.rig.take(ccm.Agree) == []


def test_a_boundary_inside_a_block_is_not_given(engine: Engine) -> None:
    chain = engine.head.chain(TOKENS[:18])
    for rank in engine.ranks:
        rank.save("save", rank.offers(chain, 18))
    tail = ev.Tail(18, chain.digest_at(18), chain.digests[4])
    asked = engine.head.planning("r", engine.head.chain(TOKENS), tails=[tail])
    assert engine.head.rig.ask(asked, cm.Planned).boundary == 0


def test_all_of_three_nodes_must_agree() -> None:
    nodes = Nodes(a=Rig(clustered()), b=Rig(clustered()), c=Rig(clustered()))
    places = ["a", "a", "b", "c"]
    ranks = [
        Client(nodes.rigs[place], hybrid(4), ranks=RANKS, rank=rank).attach()
        for rank, place in enumerate(places)
    ]
    head = ranks[0]
    head.all_ranks, head.seats = True, [RanksOf("c", 3, 4), RanksOf("", 0, 2), RanksOf("b", 2, 3)]
    for rank in ranks:
        saved(rank, 8)
    saved(ranks[3], 16)
    saved(head, 16)
    asked = plan(head)
    first, second = head.rig.take(ccm.Agree)
    head.rig.tell(cev.AgreeEnded(first.job, nodes.assent("a", first), None))
    assert (head.session, asked.call) not in head.rig.answers
    head.rig.tell(cev.AgreeEnded(second.job, nodes.assent("a", second), None))
    assert planned(head, asked).boundary == 8
    # One that has nothing settles it; what the other says then changes nothing.
    asked = plan(head, "other")
    first, second = head.rig.take(ccm.Agree)
    head.rig.tell(cev.AgreeEnded(first.job, [], None))
    assert planned(head, asked).boundary == 0
    head.rig.tell(cev.AgreeEnded(second.job, [8], None))
    assert planned(head, asked).boundary == 0


# --- faults


def test_a_node_that_does_not_answer_is_a_miss_in_time(engine: Engine) -> None:
    engine.save(16)
    asked = plan(engine.head)
    (command,) = engine.head.rig.take(ccm.Agree)
    engine.head.rig.wait(ANSWER_S)
    found = planned(engine.head, asked)
    assert (found.boundary, found.reason) == (0, "elsewhere")
    assert engine.head.rig.count("agreements", "late") == 1
    engine.head.rig.tell(cev.AgreeEnded(command.job, [16], None))
    assert planned(engine.head, asked).boundary == 0


def test_a_late_question_that_nobody_waits_for_answers_nobody(engine: Engine) -> None:
    engine.head.plan("r", engine.head.chain(TOKENS))
    engine.head.rig.wait(ANSWER_S)
    assert engine.head.rig.count("agreements", "late") == 1


def test_a_node_that_fails_is_a_miss_and_left_alone_after_three(engine: Engine) -> None:
    engine.save(16)
    for number in range(3):
        asked = plan(engine.head, f"r{number}")
        engine.nodes.agree("a", Fault.IO)
        assert planned(engine.head, asked).boundary == 0
    assert engine.head.rig.count("agreements", "failed") == 3
    found = engine.head.plan("r4", engine.head.chain(TOKENS))
    assert (found.boundary, found.reason) == (0, "elsewhere")
    assert engine.head.rig.take(ccm.Agree) == []


def test_a_node_that_is_not_there_is_a_miss(engine: Engine) -> None:
    engine.save(16)
    engine.head.seats = [RanksOf("", 0, 2), RanksOf("nobody", 2, 4)]
    assert engine.head.plan("r", engine.head.chain(TOKENS)).reason == "elsewhere"


def test_boundaries_that_were_not_asked_about_do_not_count(engine: Engine) -> None:
    engine.save(8)
    asked = plan(engine.head)
    (command,) = engine.head.rig.take(ccm.Agree)
    engine.head.rig.tell(cev.AgreeEnded(command.job, [16, -1, 1 << 60], None))
    assert planned(engine.head, asked).boundary == 0


def test_no_more_questions_than_there_is_room_for() -> None:
    nodes = Nodes(a=Rig(clustered(pulls_max=1)), b=Rig(clustered()))
    head = Client(nodes.rigs["a"], hybrid(4), ranks=2).attach()
    head.all_ranks, head.seats = True, [RanksOf("", 0, 1), RanksOf("b", 1, 2)]
    saved(head, 8)
    plan(head, "first")
    assert head.plan("second", head.chain(TOKENS)).reason == "elsewhere"


def test_a_session_that_ends_meanwhile_is_not_answered(engine: Engine) -> None:
    engine.save(16)
    asked = plan(engine.head)
    (command,) = engine.head.rig.take(ccm.Agree)
    engine.head.close()
    engine.head.rig.tell(cev.AgreeEnded(command.job, [16], None))
    assert (engine.head.session, asked.call) not in engine.head.rig.answers


def test_what_was_cleared_meanwhile_is_not_given(engine: Engine) -> None:
    engine.save(16)
    asked = plan(engine.head)
    (command,) = engine.head.rig.take(ccm.Agree)
    digest = engine.head.namespace.digest
    engine.head.rig.later(ev.ClearAsked(900, engine.head.rig.number(), digest.hex(), 0))
    engine.head.rig.tell(cev.AgreeEnded(command.job, [16], None))
    assert planned(engine.head, asked).boundary == 0


def test_a_node_that_is_behind_a_flush_has_nothing(engine: Engine) -> None:
    engine.save(16)
    asked = plan(engine.head)
    (command,) = engine.head.rig.take(ccm.Agree)
    behind = msgspec.structs.replace(command, flush=7)
    assert engine.nodes.assent("a", behind) == []
    assert engine.nodes.assent("a", command) == [16]
    engine.nodes.rigs["b"].tell(cev.StandingHeld(0.0))
    assert engine.nodes.assent("a", command) == []
    assert (engine.head.session, asked.call) not in engine.head.rig.answers


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": bytes(32)},
        {"digests": []},
        {"digests": [bytes(32)]},
        {"tokens": 7},
        {"tokens": 1 << 50},
        {"limit": 1 << 50},
        {"ranks": 0},
        {"ranks": 3},
        {"first": 3, "stop": 2},
        {"first": -1},
        {"stop": 5},
        {"codecs": ()},
        {"request": ""},
        {"writer": "x" * 2000},
        {"care": Care(priority=9)},
        {"ends": [16] * (ENDS_MAX + 1)},
    ],
    ids=str,
)
def test_a_question_that_makes_no_sense_has_the_answer_nothing(
    engine: Engine, changes: dict[str, object]
) -> None:
    engine.save(16)
    plan(engine.head)
    (command,) = engine.head.rig.take(ccm.Agree)
    wrong = msgspec.structs.replace(command, **changes)
    assert engine.nodes.assent("a", wrong) == []


def test_a_shelf_that_nobody_attached_to_has_nothing() -> None:
    nodes = Nodes(a=Rig(clustered()), b=Rig(clustered()))
    head = Client(nodes.rigs["a"], hybrid(4), ranks=2).attach()
    head.all_ranks, head.seats = True, [RanksOf("", 0, 1), RanksOf("b", 1, 2)]
    saved(head, 8)
    asked = plan(head)
    assert nodes.agree("a") == [[]]
    assert planned(head, asked).reason == "elsewhere"


# --- a load at the wrong time


def test_a_load_before_the_plan_is_answered_finds_nothing_planned(engine: Engine) -> None:
    engine.save(16)
    asked = plan(engine.head)
    loaded = engine.head.rig.ask(engine.head.loading("r"), cm.Loaded)
    assert (loaded.boundary, loaded.reason) == (0, "not_planned")
    engine.nodes.agree("a")
    assert planned(engine.head, asked).boundary == 16
    engine.head.release("r")
    assert engine.head.rig.count("hit_tokens", "host") == 16
    assert engine.head.rig.count("lookup_tokens") == len(TOKENS)


def test_a_load_while_a_request_plans_again_is_counted_as_what_was_planned(engine: Engine) -> None:
    """Every token has one reason: the longer prompt is not counted in place of the one that was."""
    rig = engine.head.rig
    on_disk(engine)
    assert engine.plan().ready is False
    plan(engine.head, tokens=[*TOKENS, *range(500, 520)])
    rig.later(engine.head.loading("r"))
    rig.run()
    assert rig.count("lookup_tokens") >= len(TOKENS)


def on_disk(engine: Engine) -> None:
    """Have a boundary at 16 on node a's disk only."""
    engine.save(16)
    for request in ("first", "second"):
        engine.plan(request)
        engine.head.rig.run()
        engine.head.release(request)
    evict(engine.head.rig)


# --- seats


def test_seats_that_make_no_sense_are_refused(engine: Engine) -> None:
    engine.head.seats = [RanksOf("", 0, 2)]
    asked = engine.head.planning("r", engine.head.chain(TOKENS))
    assert engine.head.rig.ask(asked, cm.Refused).kind == "invalid"
