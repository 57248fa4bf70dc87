"""What an agreement is of: one prompt, for these seats, as it was stored then. And what comes of it."""

from dataclasses import dataclass, field

import msgspec
import pytest

from tiercache.core import commands as cm
from tiercache.core import events as ev
from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.agreeing import AGREED_S_MAX, ENDS_MAX
from tiercache.core.limits import MIB
from tiercache.core.passage import Passage
from tiercache.errors import Fault
from tiercache.runtime.cluster import messages as said
from tiercache.state import Kind, Layout
from tiercache.state.care import Care, Hint
from tiercache.state.seats import RanksOf
from tiercache.testing.sim.asking import plan, planned
from tiercache.testing.sim.pair import ANSWER_S, Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, evict, hybrid, part, saved
from tiercache.testing.sim.seated import Engine, seated

OTHER = [*TOKENS[:4], *range(900, 916)]


@pytest.fixture
def engine() -> Engine:
    """A boundary at 16 is saved."""
    found = seated()
    found.save(16)
    return found


def kv_only() -> Layout:
    """Return a layout of two KV heads and nothing else: every block ends at a boundary."""
    return Layout((part("kv", Kind.KV, None, 4, 2),), 4)


def of_blocks(pages: int = 64) -> tuple[Nodes, list[Client]]:
    """Return two nodes with a rank each, whose state is blocks alone; the first one plans."""
    nodes = Nodes(a=Rig(clustered(pages)), b=Rig(clustered(pages)))
    ranks = [
        Client(nodes.rigs[name], kv_only(), ranks=2, rank=rank).attach()
        for rank, name in enumerate("ab")
    ]
    ranks[0].all_ranks, ranks[0].seats = True, [RanksOf("", 0, 1), RanksOf("b", 1, 2)]
    return nodes, ranks


def flush(engine: Engine, name: str, number: int) -> None:
    """Have a node carry out a flush of the engine's namespace."""
    rig, space = engine.nodes.rigs[name], engine.head.namespace.digest
    rig.later(ev.ClearAsked(900, rig.number(), space.hex(), number))
    rig.run()


def asked_now(client: Client, asked: ev.PlanAsked) -> cm.Planned | None:
    """Return a plan's answer if it came at once."""
    found = client.rig.later(asked)
    assert found is None or isinstance(found, cm.Planned)
    return found


# --- what it is of


@pytest.mark.parametrize("tokens", range(16, 25))
def test_a_prompt_of_any_length_resumes(engine: Engine, tokens: int) -> None:
    """Where it ends, and how deep the request may go, need not be the end of a block."""
    prompt = list(range(tokens))
    for limit in {tokens, max(16, tokens - 1)}:
        asked = engine.head.planning(f"r{limit}", engine.head.chain(prompt), limit=limit)
        assert asked_now(engine.head, asked) is None
        engine.nodes.agree("a")
        assert planned(engine.head, asked).boundary == 16


def test_all_seats_on_one_node_ask_nobody() -> None:
    head = Client(Rig(), hybrid(4), ranks=2).attach()
    second = Client(head.rig, hybrid(4), ranks=2, rank=1).attach()
    for rank in (head, second):
        saved(rank, 16)
    head.all_ranks, head.seats = True, [RanksOf("", 0, 2)]
    assert head.plan("r", head.chain(TOKENS)).boundary == 16
    assert head.rig.take(ccm.Agree) == []


def test_another_prompt_of_the_request_is_asked_about_anew(engine: Engine) -> None:
    for rank in engine.ranks[:2]:
        rank.save("other", rank.offers(rank.chain(OTHER), 16))
    assert engine.plan().boundary == 16
    asked = plan(engine.head, tokens=OTHER)
    assert engine.nodes.agree("a") == [[]]
    assert planned(engine.head, asked).boundary == 0


def test_answers_to_two_prompts_of_a_request_are_kept_apart(engine: Engine) -> None:
    for rank in engine.ranks[:2]:
        rank.save("other", rank.offers(rank.chain(OTHER), 16))
    first, second = plan(engine.head), plan(engine.head, tokens=OTHER)
    about_first, about_second = engine.head.rig.take(ccm.Agree)
    for question in (about_second, about_first):
        ends = engine.nodes.assent("a", question)
        engine.head.rig.tell(cev.AgreeEnded(question.job, ends, None))
    assert planned(engine.head, second).boundary == 0
    assert planned(engine.head, first).boundary == 16
    assert asked_now(engine.head, engine.head.planning("r", engine.head.chain(OTHER))) is None


def test_a_shorter_prompt_of_a_rank_goes_by_the_same_agreement(engine: Engine) -> None:
    """As ranks here ask, for just what they were promised."""
    assert engine.plan().boundary == 16
    rank = engine.ranks[1]
    rank.seats = engine.head.seats
    asked = rank.planning("r", rank.chain(TOKENS[:16]), limit=16)
    found = asked_now(rank, asked)
    assert found is not None
    assert found.boundary == 16


@pytest.mark.parametrize(
    "seats",
    [[RanksOf("", 0, 2), RanksOf("c", 2, 4)], [RanksOf("", 0, 1), RanksOf("b", 1, 4)]],
    ids=str,
)
def test_other_seats_are_asked_anew(engine: Engine, seats: list[RanksOf]) -> None:
    """Node b has no shard of rank 1, and nobody has seen node c."""
    assert engine.plan().boundary == 16
    engine.head.seats = seats
    asked = engine.head.planning("r", engine.head.chain(TOKENS))
    if asked_now(engine.head, asked) is None:
        engine.nodes.agree("a")
    assert planned(engine.head, asked).boundary == 0


@pytest.mark.parametrize("seats", [[], [RanksOf("", 0, 4)]], ids=str)
def test_without_other_nodes_all_ranks_must_be_here(engine: Engine, seats: list[RanksOf]) -> None:
    assert engine.plan().boundary == 16
    engine.head.seats = seats
    assert engine.head.plan("r", engine.head.chain(TOKENS)).boundary == 0


def test_a_deeper_limit_is_asked_about_anew(engine: Engine) -> None:
    chain = engine.head.chain(TOKENS)
    assert asked_now(engine.head, engine.head.planning("r", chain, limit=8)) is not None
    engine.nodes.agree("a")
    assert engine.plan().boundary == 16


def test_what_was_agreed_on_is_not_believed_for_ever(engine: Engine) -> None:
    assert engine.plan().boundary == 16
    engine.head.rig.wait(ANSWER_S + AGREED_S_MAX)
    flush(engine, "b", 0)
    asked = plan(engine.head)
    assert engine.nodes.agree("a") == [[]]
    assert planned(engine.head, asked).boundary == 0


def test_a_rank_that_planned_for_itself_first_promises_nothing_for_others(engine: Engine) -> None:
    engine.save(8, ranks=range(2))
    rank = engine.ranks[1]
    rank.seats = engine.head.seats
    assert rank.plan("r", rank.chain(TOKENS)).boundary == 16
    asked = plan(engine.head)
    (question,) = engine.head.rig.take(ccm.Agree)
    engine.head.rig.tell(cev.AgreeEnded(question.job, [8], None))
    assert planned(engine.head, asked).boundary == 8


def test_what_a_node_says_with_a_fault_does_not_count(engine: Engine) -> None:
    asked = plan(engine.head)
    (question,) = engine.head.rig.take(ccm.Agree)
    engine.head.rig.tell(cev.AgreeEnded(question.job, [16], Fault.IO))
    assert planned(engine.head, asked).boundary == 0


# --- flushes


def test_what_was_cleared_and_stored_anew_meanwhile_is_not_given(engine: Engine) -> None:
    asked = plan(engine.head)
    (question,) = engine.head.rig.take(ccm.Agree)
    ends = engine.nodes.assent("a", question)
    for name in engine.nodes.rigs:
        flush(engine, name, 1)
    engine.save(16, ranks=range(2))
    engine.head.rig.tell(cev.AgreeEnded(question.job, ends, None))
    assert planned(engine.head, asked).boundary == 0


def test_a_namespace_that_was_gone_meanwhile_is_another_one(engine: Engine) -> None:
    asked = plan(engine.head)
    (question,) = engine.head.rig.take(ccm.Agree)
    shelves = engine.head.rig.machine._books.catalog.shelves
    shelf = shelves.pop(engine.head.namespace.digest)
    try:
        ends = engine.head.rig.machine.cluster._reach.agreeing.ended(
            cev.AgreeEnded(question.job, [16], None), engine.head.rig.now
        )
    finally:
        shelves[shelf.digest] = shelf
    assert [(each.asked, each.ends) for each in ends] == [(asked, frozenset())]


@pytest.mark.parametrize("ahead", ["a", "b"])
def test_nodes_agree_on_nothing_between_their_flushes(engine: Engine, ahead: str) -> None:
    """What one has stored since is not of a piece with what the other has from before."""
    flush(engine, ahead, 7)
    engine.save(16)
    assert engine.plan().boundary == 0
    flush(engine, "a" if ahead == "b" else "b", 7)
    engine.save(16)
    assert engine.plan("again").boundary == 16


def test_a_node_that_became_isolated_meanwhile_gives_nothing_out(engine: Engine) -> None:
    """It may have missed a flush since it asked."""
    first, second = plan(engine.head), plan(engine.head, "other")
    engine.head.rig.tell(cev.StandingHeld(engine.head.rig.now))
    (question, _) = engine.head.rig.take(ccm.Agree)
    engine.head.rig.tell(cev.AgreeEnded(question.job, [16], None))
    engine.head.rig.wait(ANSWER_S)
    for asked in (first, second):
        refused = engine.head.rig.answers[engine.head.session, asked.call]
        assert isinstance(refused, cm.Refused)
        assert refused.text.startswith("isolated")
    assert engine.head.rig.count("isolated") == 2


# --- the other node


def test_a_request_that_stores_nothing_resumes_and_is_refused_elsewhere_too(
    engine: Engine,
) -> None:
    asked = engine.head.planning("r", engine.head.chain(TOKENS))
    quiet = msgspec.structs.replace(asked, care=Care(store=False))
    assert asked_now(engine.head, quiet) is None
    engine.nodes.agree("a")
    assert planned(engine.head, quiet).boundary == 16
    digest = engine.head.chain(TOKENS).digests[5]
    sights = engine.other.machine._books.sights
    assert sights.count(engine.head.namespace.digest, digest) == 0
    rank = engine.ranks[2]
    grants = rank.reserve("r", rank.offers(rank.chain(OTHER), 16))
    assert {grant.outcome for grant in grants} == {"do_not_store"}


def test_what_a_request_wishes_is_known_elsewhere(engine: Engine) -> None:
    asked = engine.head.planning("r", engine.head.chain(TOKENS))
    last = msgspec.structs.replace(asked, care=Care(hint=Hint.END_OF_SESSION, priority=1))
    assert asked_now(engine.head, last) is None
    engine.nodes.agree("a")
    shelf = engine.other.machine._books.catalog.shelves[engine.head.namespace.digest]
    entry = shelf.entries[engine.head.chain(TOKENS).digests[4]]
    assert (entry.hint, entry.priority) == (Hint.END_OF_SESSION, 1)


def test_requests_of_one_name_and_two_engines_are_kept_apart(engine: Engine) -> None:
    twin = Client(engine.head.rig, hybrid(4), ranks=4)
    twin.writer, twin.all_ranks, twin.seats = "twin", True, engine.head.seats
    twin.attach()
    for rank in engine.ranks:
        rank.save("other", rank.offers(rank.chain(OTHER), 16))
    engine.other.run()
    held = engine.other.gauge("objects", "host")
    plan(engine.head)
    plan(twin, tokens=OTHER)
    assert engine.nodes.agree("a") == [[16], [16]]
    evict(engine.other)
    assert engine.other.gauge("objects", "host") == held


def test_the_state_of_a_boundary_that_may_be_the_deepest_of_all_is_kept() -> None:
    """Two others are asked: what one has deepest need not be what all have."""
    engine = seated()
    engine.save(8, 16)
    assert engine.plan().boundary == 16
    engine.other.run()
    held = engine.other.gauge("objects", "host")
    evict(engine.other)
    assert engine.other.gauge("objects", "host") == held


def test_blocks_alone_are_kept_once() -> None:
    nodes, ranks = of_blocks()
    for rank in ranks:
        saved(rank, 16)
    plan(ranks[0])
    assert nodes.agree("a") == [[16, 12, 8, 4]]


def test_of_very_many_boundaries_some_are_asked_about() -> None:
    """The other node may have only the first part of them."""
    blocks = 3 * ENDS_MAX
    nodes, ranks = of_blocks(2 * blocks)
    tokens = list(range(4 * blocks))
    saved(ranks[0], 4 * blocks, tokens=tokens)
    saved(ranks[1], 400, tokens=tokens)
    asked = plan(ranks[0], tokens=tokens)
    (question,) = ranks[0].rig.take(ccm.Agree)
    assert ENDS_MAX // 2 < len(question.ends) <= ENDS_MAX
    assert question.ends[-ENDS_MAX // 2 :] == list(range(4 * blocks - 2 * ENDS_MAX, 4 * blocks, 4))
    ranks[0].rig.tell(cev.AgreeEnded(question.job, nodes.assent("a", question), None))
    found = ranks[0].rig.answers[ranks[0].session, asked.call]
    assert isinstance(found, cm.Planned)
    assert 350 < found.boundary <= 400


@dataclass
class Visits:
    """Stands in for what tells the eviction policies of requests."""

    boundaries: list[int] = field(default_factory=list)

    def visited(self, *told: object) -> None:
        """A request went its way."""
        boundary = told[3]
        assert isinstance(boundary, int)
        self.boundaries.append(boundary)


def test_one_request_is_one_visit_elsewhere(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked about, and whatever its ranks there plan."""
    passage, visits = engine.other.machine._books.passage, Visits()
    assert isinstance(passage, Passage)
    monkeypatch.setattr(passage, "visited", visits.visited)
    plan(engine.head)
    (question,) = engine.head.rig.take(ccm.Agree)
    for _ in range(2):
        assert engine.nodes.assent("a", question) == [16]
    for rank in engine.ranks[2:]:
        rank.seats = [RanksOf("a", 0, 2), RanksOf("", 2, 4)]
        assert rank.plan("r", rank.chain(TOKENS[:16]), limit=16).boundary == 16
    assert visits.boundaries == [16]


# --- what is slower than computing


def on_a_slow_disk(engine: Engine, prefill_tokens_per_s: float) -> None:
    """Have node b hold a boundary on a disk that takes a million seconds for 64 MiB."""
    for request in ("first", "second"):
        engine.plan(request)
    engine.other.run()
    engine.other.tell(cev.PeerLeft(-1))
    evict(engine.other)
    books = engine.other.machine._books
    books.nvme_pace.started(64 * MIB, engine.other.now)
    books.nvme_pace.ended(64 * MIB, 64 * MIB, engine.other.now + 1e6)
    shelf = books.catalog.shelves[engine.head.namespace.digest]
    shelf.prefill_tokens_per_s = prefill_tokens_per_s


@pytest.mark.parametrize(("prefill", "boundary"), [(1e6, 0), (1e-9, 16)])
def test_what_takes_longer_elsewhere_than_computing_is_not_agreed_on(
    engine: Engine, prefill: float, boundary: int
) -> None:
    on_a_slow_disk(engine, prefill)
    assert engine.plan("third").boundary == boundary
    assert bool(engine.other.take(cm.Fill)) is bool(boundary)


def test_what_was_agreed_on_is_not_judged_again_by_the_ranks(engine: Engine) -> None:
    """The first rank elsewhere to ask gets what was promised, as slow as it may have become."""
    on_a_slow_disk(engine, 1e6)
    rank = engine.ranks[2]
    rank.seats = [RanksOf("a", 0, 2), RanksOf("", 2, 4)]
    assert rank.plan("third", rank.chain(TOKENS[:16]), limit=16).boundary == 16


# --- what other nodes take


@pytest.mark.parametrize("said_by_client", [-1, 0, 1, 7, 1 << 60], ids=str)
def test_what_a_client_can_capture_is_told_so_that_others_take_it(
    engine: Engine, said_by_client: int
) -> None:
    """Its own node takes any number. Another one that finds nonsense would seem to be ill."""
    capture = ev.Capture(said_by_client, said_by_client)
    asked = engine.head.planning("r", engine.head.chain(TOKENS), capture=capture)
    assert asked_now(engine.head, asked) is None
    (question,) = engine.head.rig.take(ccm.Agree)
    assert said.decoded_question(said.encode(said.agree_of(question, 0.1))) is not None
    assert engine.nodes.assent("a", question) == [16]
    assert min(said_by_client, 21) in {question.grain, -1}


def test_a_codec_with_a_name_that_others_do_not_take_is_not_asked_about(engine: Engine) -> None:
    engine.head.codecs = ("native", "x" * 1025)
    asked = plan(engine.head)
    (question,) = engine.head.rig.take(ccm.Agree)
    assert said.decoded_question(said.encode(said.agree_of(question, 0.1))) is not None
    engine.head.rig.tell(cev.AgreeEnded(question.job, engine.nodes.assent("a", question), None))
    assert planned(engine.head, asked).boundary == 16
