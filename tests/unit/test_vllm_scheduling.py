"""What the scheduler's side answers, loads and saves in every phase; the node is played by hand."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from tests.unit.test_vllm_geometry import kimi
from tiercache.client import Scope
from tiercache.state import Chain
from tiercache_vllm.geometry import Group, Pages, geometry_of
from tiercache_vllm.planning import Answer, Question
from tiercache_vllm.requests import Scheduled
from tiercache_vllm.scheduling import AHEAD_MAX, ANSWER_S, Scheduling
from tiercache_vllm.settings import Settings

BLOCK = 128
TABLES = ([0, 0, 0, 11, 0], [0, 0, 0, 12, 0], [1, 2, 3, 4, 5])
"""Block tables of four blocks of prefix: two groups of states, and one of pages."""

OFFERS = [(0, 11, 512), (1, 12, 512)]


@dataclass
class Asked:
    """A request of vLLM."""

    request_id: str
    all_token_ids: Sequence[int]
    shared_prefix_boundary: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Oracle:
    """Answers when told to."""

    def __init__(self) -> None:
        self.questions: list[Question] = []
        self.futures: list[Future[Answer]] = []

    def ask(self, question: Question) -> "Future[Answer]":
        self.questions.append(question)
        self.futures.append(Future())
        return self.futures[-1]


@dataclass
class Plan:
    """Counts releases."""

    released: int = 0

    def release(self) -> None:
        self.released += 1


@dataclass
class Watched:
    """Notes what comes and goes."""

    kept: list[tuple[int, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)

    def stored(self, request: object, part: int, end: int, key: bytes) -> None:
        self.kept.append((part, end))

    def lost(self, keys: Iterable[bytes]) -> None:
        self.gone += keys


class Bench:
    """A scheduler's side on a small Kimi Linear, with its node and its clock."""

    def __init__(self, groups: Sequence[Group] = (), settings: Settings | None = None) -> None:
        self.now = 100.0
        self.oracle = Oracle()
        self.watched = Watched()
        self.geometry = geometry_of(groups or kimi(1), 1)
        self.side = Scheduling(
            self.geometry,
            settings or Settings("/s"),
            self.oracle,
            watcher=self.watched,
            clock=lambda: self.now,
        )

    def question(self, request: Asked) -> Callable[[], Question]:
        return lambda: Question(
            request.request_id, list(request.all_token_ids), request.num_tokens - 1
        )

    def matched(self, request: Asked, computed: int = 0) -> int | None:
        return self.side.matched(request, self.question(request), computed)

    def answer(
        self, request: Asked, boundary: int = 0, *, ready: int | None = None, salt: str = ""
    ) -> Plan:
        """Answer the last question as a node that has `boundary` tokens."""
        plan = Plan()
        chain = Chain(self.oracle.questions[-1].tokens, BLOCK)
        self.oracle.futures[-1].set_result(
            Answer(
                "",
                chain,
                Scope(salt=salt),
                boundary,
                boundary if ready is None else ready,
                frozenset({(request.num_tokens - 1) // BLOCK * BLOCK}),
                plan,  # type: ignore[arg-type]
            )
        )
        return plan

    def saves(
        self,
        request: Asked,
        start: int,
        count: int,
        offers: Sequence[tuple[int, int, int]] = (),
        tables: Sequence[Sequence[int]] | None = TABLES,
    ) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return what a step saves: part, end and blocks."""
        name = request.request_id
        jobs = self.side.saves([Scheduled(name, start, count)], {name: offers}, lambda _: tables)
        parts = self.geometry.layout.parts
        return [(parts[i.part].name, i.end, i.blocks) for job in jobs for i in job.items]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def request_() -> Asked:
    return Asked("r", list(range(600)))


def test_nothing_is_answered_before_the_node_has(bench: Bench, request_: Asked) -> None:
    assert [bench.matched(request_) for _ in range(5)] == [None] * 5
    assert len(bench.oracle.questions) == 1
    bench.answer(request_, 512)
    assert [bench.matched(request_) for _ in range(5)] == [512] * 5
    assert len(bench.oracle.questions) == 1, "vLLM may ask as often as it likes"


@pytest.mark.parametrize(
    ("boundary", "computed", "expected"),
    [(512, 0, 512), (512, 128, 384), (512, 512, 0), (384, 512, 0), (0, 0, 0), (512, 130, 0)],
)
def test_what_is_beyond_the_local_hit_counts(
    bench: Bench, request_: Asked, boundary: int, computed: int, expected: int
) -> None:
    bench.matched(request_)
    bench.answer(request_, boundary)
    assert bench.matched(request_, computed) == expected


def test_a_load_names_every_page_and_one_state(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 512, ready=256)
    assert bench.matched(request_, 128) == 384
    bench.side.allocated(request_, TABLES, 384)
    ((job,), doomed) = bench.side.take_loads()
    chain = Chain(request_.all_token_ids, BLOCK)
    parts = bench.geometry.layout.parts
    assert not doomed
    assert [(parts[i.part].name, i.end, i.blocks) for i in job.items] == [
        ("conv", 512, (11, 12)),
        ("latent128", 256, (2,)),
        ("latent128", 384, (3,)),
        ("latent128", 512, (4,)),
        ("recurrent", 512, (11, 12)),
    ]
    assert all(item.digest == chain.digest_at(item.end) for item in job.items)
    assert job.chain == b"".join(chain.digests[1:5])
    assert bench.side.sources("r", 384) == (128, 256)
    assert bench.side.sources("r", 100) == (100, 0), "another count is not ours to explain"
    assert bench.side.take_loads() == ((), frozenset())


@pytest.mark.parametrize("table", [[0, 0, 0, 0], [0, 0, 0]])
def test_a_load_without_a_place_is_given_up(
    bench: Bench, request_: Asked, table: list[int]
) -> None:
    bench.matched(request_)
    bench.answer(request_, 512)
    bench.matched(request_)
    bench.side.allocated(request_, (table, TABLES[1], TABLES[2]), 512)
    assert bench.side.take_loads() == ((), frozenset({"r"}))


def test_a_load_of_less_than_planned_is_given_up(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 512)
    bench.matched(request_)
    bench.side.allocated(request_, TABLES, 384)
    assert bench.side.take_loads()[1] == {"r"}


def test_only_a_window_is_loaded() -> None:
    near = Pages("1", "bfloat16", 2, 8, 2)
    full = Pages("0", "bfloat16", 2, 8, 2)
    bench = Bench([Group(0, 128, pages=(full,)), Group(1, 128, pages=(near,), window=200)])
    request = Asked("r", list(range(600)))
    bench.matched(request)
    bench.answer(request, 512)
    bench.matched(request)
    bench.side.allocated(request, ([1, 2, 3, 4], [0, 0, 7, 8]), 512)
    ((job,), _) = bench.side.take_loads()
    assert [(i.part, i.end, i.blocks) for i in job.items if i.part == 1] == [
        (1, 384, (7,)),
        (1, 512, (8,)),
    ]


def test_what_vllm_does_not_load_is_let_go(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    plan = bench.answer(request_, 512)
    bench.matched(request_)
    bench.side.allocated(request_, TABLES, 0)
    assert plan.released
    assert bench.side.take_loads() == ((), frozenset())


def test_a_load_that_failed_is_not_offered_again(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    plan = bench.answer(request_, 512)
    bench.matched(request_)
    bench.side.allocated(request_, TABLES, 512)
    bench.side.ended({"r"}, {"r"})
    assert plan.released
    for _ in range(3):
        assert bench.matched(request_) == 0
    bench.side.allocated(request_, TABLES, 0)
    assert bench.matched(request_) == 0, "preempted, too"
    assert bench.saves(request_, 0, 600, OFFERS) == [
        ("conv", 512, (11, 12)),
        ("recurrent", 512, (11, 12)),
        *[("latent128", 128 * n, (n,)) for n in (1, 2, 3, 4)],
    ], "what it computes is offered again"


def test_a_boundary_that_failed_is_left_alone_for_a_while(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 512)
    bench.matched(request_)
    bench.side.allocated(request_, TABLES, 512)
    bench.side.ended({"r"}, {"r"})
    other = Asked("other", request_.all_token_ids)
    bench.matched(other)
    bench.answer(other, 512)
    assert bench.matched(other) == 0
    assert bench.side.counts["hits_left_alone"] == 1
    tenant = Asked("tenant", request_.all_token_ids)
    bench.matched(tenant)
    bench.answer(tenant, 512, salt="x")
    assert bench.matched(tenant) == 512, "another tenant's objects did not fail"
    bench.now += Settings("/s").failure_s
    later = Asked("later", request_.all_token_ids)
    bench.matched(later)
    bench.answer(later, 512)
    assert bench.matched(later) == 512


def test_a_load_that_ended_well_counts(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    plan = bench.answer(request_, 512, ready=128)
    bench.matched(request_)
    bench.side.allocated(request_, TABLES, 512)
    bench.side.ended({"r", "unknown"}, ())
    assert plan.released
    counts = bench.side.counts
    assert (counts["hit_tokens"], counts["host_tokens"], counts["nvme_tokens"]) == (512, 128, 384)
    bench.side.allocated(request_, TABLES, 0)
    assert bench.saves(request_, 512, 88) == [], "what was loaded is there"


def test_a_preempted_request_asks_anew(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    bench.answer(request_, 0)
    assert bench.matched(request_) == 0
    bench.side.allocated(request_, TABLES, 0)
    request_.all_token_ids = [*request_.all_token_ids, *range(100)]
    assert bench.matched(request_) is None
    assert bench.oracle.questions[-1].limit == 699
    bench.answer(request_, 640)
    assert bench.matched(request_) == 640


def test_an_old_answer_is_asked_for_again(bench: Bench, request_: Asked) -> None:
    bench.matched(request_)
    plan = bench.answer(request_, 512)
    assert bench.matched(request_) == 512
    bench.now += ANSWER_S + 1
    assert bench.matched(request_) is None
    assert plan.released
    bench.answer(request_, 256)
    assert bench.matched(request_) == 256


def test_requests_are_asked_ahead_within_limits(bench: Bench) -> None:
    for at in range(AHEAD_MAX + 10):
        request = Asked(str(at), list(range(300)))
        bench.side.arrived(request, bench.question(request))
    assert len(bench.oracle.questions) == AHEAD_MAX


def test_a_finished_request_lets_go_of_an_answer_that_comes_later(
    bench: Bench, request_: Asked
) -> None:
    bench.matched(request_)
    bench.side.finished("r")
    plan = bench.answer(request_, 512)
    assert plan.released
    assert "r" not in bench.side
    bench.side.finished("r")


def test_a_request_without_an_identity_is_neither_restored_nor_saved(
    bench: Bench, request_: Asked
) -> None:
    bench.matched(request_)
    bench.oracle.futures[-1].set_result(Answer("refused: an input without an identity"))
    assert bench.matched(request_) == 0
    assert bench.saves(request_, 0, 600, OFFERS) == []
    assert bench.side.counts["refused"] == 1


@pytest.mark.parametrize("settings", [Settings("/s", reads=False), Settings("/s", writes=False)])
def test_an_engine_may_only_read_or_only_write(settings: Settings, request_: Asked) -> None:
    bench = Bench(settings=settings)
    bench.matched(request_)
    bench.answer(request_, 256)
    assert bench.matched(request_) == (256 if settings.reads else 0)
    assert bool(bench.saves(request_, 256, 300)) == settings.writes


def test_after_a_reset_everything_is_asked_and_offered_again(bench: Bench, request_: Asked) -> None:
    old = Asked("old", request_.all_token_ids)
    bench.matched(old)
    bench.answer(old, 0)
    bench.matched(old)
    bench.side.allocated(old, TABLES, 0)
    bench.saves(old, 0, 300)
    bench.matched(request_)
    plan = bench.answer(request_, 512)
    assert bench.matched(request_) == 512
    bench.side.reset()
    assert plan.released
    assert bench.matched(request_) is None
    bench.answer(request_, 0)
    assert bench.matched(request_) == 0
    assert len(bench.saves(request_, 0, 300)) == 2
    assert bench.saves(old, 300, 300, OFFERS) == [], "it began under what was reset"


def test_blocks_of_an_unknown_request_are_nobodys(bench: Bench, request_: Asked) -> None:
    bench.side.allocated(request_, TABLES, 512)
    assert bench.side.take_loads() == ((), frozenset())
    assert bench.side.sources("r", 12) == (12, 0)
