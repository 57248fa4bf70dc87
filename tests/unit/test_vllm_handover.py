"""Requests that were prefilled elsewhere: who is asked, how long it is waited for, and what is told."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic

import pytest

from tests.unit.test_vllm_planning import QUESTION, Node, Planned, geometry
from tests.unit.test_vllm_scheduling import Asked, Bench
from tiercache.client import Scope
from tiercache.state import Chain
from tiercache_vllm import planning
from tiercache_vllm.handover import SOURCE, source_of
from tiercache_vllm.planning import (
    SOURCE_PAUSE_S_MAX,
    SOURCE_THREADS_MAX,
    Answer,
    Planner,
    Question,
)
from tiercache_vllm.settings import Settings

NewPlanner = Callable[..., Planner]
HANDED = replace(QUESTION, source="a")


class Pauses:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def wait(self, pause_s: float) -> bool:
        self.all.append(pause_s)
        return False

    def set(self) -> None:
        """Nobody waits."""


class Slow(Node):
    """Answers once it may."""

    gate = threading.Event()

    def plan(self, request: str, chain: Chain, *, limit: int, scope: Scope) -> Planned:
        assert self.gate.wait(10.0)
        return super().plan(request, chain, limit=limit, scope=scope)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(planning, "monotonic", lambda: sum(pauses.all))
    return pauses


@pytest.fixture
def new_planner() -> Iterator[NewPlanner]:
    made: list[Planner] = []

    def make(node: Node, wait_s: float = 60.0, pauses: Pauses | None = None) -> Planner:
        settings = Settings("/s", source_wait_s=wait_s)
        planner = Planner(node, geometry(), settings, 0)  # type: ignore[arg-type]
        if pauses is not None:
            planner._closing = pauses  # type: ignore[assignment]
        made.append(planner)
        return planner

    yield make
    for planner in made:
        planner.close()


@pytest.mark.parametrize(
    ("params", "source"),
    [
        (None, ""),
        ({}, ""),
        ({SOURCE: None}, ""),
        ({SOURCE: "prefill-1.rack_2"}, "prefill-1.rack_2"),
        ({SOURCE: "x" * 64}, "x" * 64),
        ({SOURCE: "x" * 65}, None),
        ({SOURCE: ""}, None),
        ({SOURCE: "a b"}, None),
        ({SOURCE: "a\n"}, None),
        ({SOURCE: "\ud800"}, None),
        ({SOURCE: 7}, None),
        ({SOURCE: ["a"]}, None),
        ({SOURCE: b"a"}, None),
        ("a", ""),
        ([SOURCE], ""),
    ],
)
def test_what_names_a_node(params: object, source: str | None) -> None:
    assert source_of(params) == source


def test_the_node_that_is_named_is_asked(new_planner: NewPlanner) -> None:
    node = Node([Planned(256), Planned(256)])
    planner = new_planner(node)
    for question in (HANDED, QUESTION):
        answer = planner.ask(question).result(10.0)
        assert (answer.boundary, answer.short) == (256, False)
    assert [scope.source for _, _, _, scope in node.asked] == ["a", ""]


def test_what_is_still_to_be_saved_is_waited_for(new_planner: NewPlanner) -> None:
    node = Node([Planned(0), Planned(64), Planned(160), Planned(128), Planned(256)])
    answer = new_planner(node).ask(HANDED).result(10.0)
    assert (answer.boundary, answer.short) == (256, False)
    assert [limit for _, _, limit, _ in node.asked] == [256, 256, 256, 128, 256]
    assert [plan.released for plan in node.plans] == [True] * 4 + [False], (
        "else it is not asked anew"
    )


def test_only_what_was_handed_over_is_waited_for(new_planner: NewPlanner) -> None:
    node = Node([Planned(64)])
    answer = new_planner(node).ask(QUESTION).result(10.0)
    assert (answer.boundary, answer.short) == (64, False)
    assert len(node.asked) == 1


@pytest.mark.parametrize("boundary", [0, 64])
def test_the_wait_ends(new_planner: NewPlanner, pauses: Pauses, boundary: int) -> None:
    node = Node([Planned(boundary) for _ in range(5)])
    planner = new_planner(node, 0.125, pauses)
    answer = planner.ask(HANDED).result(10.0)
    assert pauses.all == [0.01, 0.02, 0.04, pytest.approx(0.055)], "less and less often"
    assert (answer.boundary, answer.short) == (boundary, True)
    assert [plan.released for plan in node.plans] == [True] * 4 + [boundary == 0]


def test_pauses_do_not_grow_for_ever(new_planner: NewPlanner, pauses: Pauses) -> None:
    node = Node([Planned(0) for _ in range(100)])
    assert new_planner(node, 3.0, pauses).ask(HANDED).result(10.0).short
    assert max(pauses.all) == SOURCE_PAUSE_S_MAX


def test_without_a_wait_it_is_asked_once(new_planner: NewPlanner) -> None:
    node = Node([Planned(0)])
    assert new_planner(node, 0.0).ask(HANDED).result(10.0).short
    assert len(node.asked) == 1


def test_a_node_that_is_away_is_not_asked_again(new_planner: NewPlanner) -> None:
    node = Node([Planned(0, reason="unavailable")], status="detached: why")
    assert new_planner(node).ask(HANDED).result(10.0).short
    assert len(node.asked) == 1


def test_less_may_come_than_was_planned(new_planner: NewPlanner) -> None:
    node = Node([Planned(256, ready=False)], loaded=Planned(128))
    answer = new_planner(node).ask(HANDED).result(10.0)
    assert (answer.boundary, answer.short) == (128, True)


def test_nobody_else_waits(new_planner: NewPlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait for theirs, others are answered, and the engine can end."""
    monkeypatch.setattr(planning, "SOURCE_PAUSE_S", 60.0)
    node = Node([Planned(0) for _ in range(100)])
    planner = new_planner(node)
    waiting = [planner.ask(HANDED) for _ in range(2 * SOURCE_THREADS_MAX)]
    assert planner.ask(QUESTION).result(10.0).boundary == 0
    assert not any(answer.done() for answer in waiting)
    began = monotonic()
    planner.close()
    assert monotonic() - began < 10.0
    assert all(answer.cancelled() or answer.done() for answer in waiting)


def test_those_who_queue_wait_no_longer_than_the_first(
    new_planner: NewPlanner, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SOURCE_THREADS_MAX", 1)
    node = Slow([Planned(0) for _ in range(100)])
    planner = new_planner(node, 0.125, pauses)
    answers = [planner.ask(replace(HANDED, request=str(number))) for number in range(3)]
    node.gate.set()
    assert all(answer.result(10.0).short for answer in answers)
    assert [request for request, _, _, _ in node.asked] == ["0"] * 5 + ["1", "2"]


@pytest.mark.parametrize(("source", "short"), [("", False), ("a", False), ("a", True)])
def test_what_was_handed_over_is_counted(source: str, *, short: bool) -> None:
    bench, request = Bench(), Asked("r", list(range(600)))
    assert bench.matched(request) is None
    chain = Chain(request.all_token_ids, 128)
    bench.oracle.futures[0].set_result(Answer("", chain, Scope(source=source), short=short))
    assert bench.matched(request) == 0
    assert bench.side.counts["handed_over"] == bool(source)
    assert bench.side.counts["handed_over_short"] == short


def test_a_question_names_nobody_unless_told() -> None:
    assert Question("r", (), 0).source == ""
