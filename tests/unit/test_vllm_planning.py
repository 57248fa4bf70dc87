"""Questions to a node, and what of its answers is of use to vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from tiercache.client import Scope
from tiercache.state import Chain, Layout
from tiercache_vllm.geometry import Geometry, Group, Pages, geometry_of
from tiercache_vllm.identity import Adapter, Feature
from tiercache_vllm.planning import NAME_BYTES_MAX, Answer, Planner, Question, name_of
from tiercache_vllm.settings import Settings

TOKENS = tuple(range(300))


@dataclass
class Planned:
    """What a node planned."""

    boundary: int
    ready: bool = True
    ready_boundary: int = 0
    checkpoints: tuple[int, ...] = (128,)
    reason: str = ""
    released: bool = False

    def release(self) -> None:
        self.released = True


@dataclass
class Node:
    """Answers from a list."""

    plans: list[Planned]
    loaded: Planned | None = None
    asked: list[tuple[str, int, int, Scope]] = field(default_factory=list)
    status: str = "attached"
    closed: bool = False
    cleared: int = 0

    def plan(self, request: str, chain: Chain, *, limit: int, scope: Scope) -> Planned:
        self.asked.append((request, len(chain), limit, scope))
        return self.plans[len(self.asked) - 1]

    def load(self, plan: Planned, *, wait_s: float) -> Planned:
        assert self.loaded is not None
        return self.loaded

    def clear(self) -> None:
        self.cleared += 1

    def close(self) -> None:
        self.closed = True


def geometry() -> Geometry:
    full = Group(0, 32, pages=(Pages("0", "bfloat16", 2, 8, 2),))
    near = Group(1, 64, pages=(Pages("1", "bfloat16", 2, 8, 2),), window=65)
    return geometry_of([full, near], 1)


@pytest.fixture
def planners() -> Iterator[list[Planner]]:
    made: list[Planner] = []
    yield made
    for planner in made:
        planner.close()


def ask(planners: list[Planner], node: Node, question: Question) -> Answer:
    planner = Planner(node, geometry(), Settings("/s"), 0)  # type: ignore[arg-type]
    planners.append(planner)
    return planner.ask(question).result(10.0)


QUESTION = Question("r", TOKENS, 299)


def test_a_hit(planners: list[Planner]) -> None:
    node = Node([Planned(256, ready_boundary=256)])
    answer = ask(planners, node, QUESTION)
    assert (answer.boundary, answer.ready) == (256, 256)
    assert answer.advice == {128}
    ((request, tokens, limit, scope),) = node.asked
    assert (request, tokens, limit) == ("r", 300, 256)
    assert scope.all_ranks
    assert (scope.capture.grain, scope.capture.chunk_tokens) == (64, 0)
    answer.release()
    assert node.plans[0].released


def test_a_boundary_that_not_every_group_has_is_not_taken(planners: list[Planner]) -> None:
    node = Node([Planned(224), Planned(160), Planned(128, ready_boundary=128)])
    answer = ask(planners, node, QUESTION)
    assert answer.boundary == 128
    assert [limit for _, _, limit, _ in node.asked] == [256, 192, 128]
    assert [plan.released for plan in node.plans] == [True, True, False]


def test_what_is_on_disk_is_waited_for(planners: list[Planner]) -> None:
    node = Node([Planned(256, ready=False, ready_boundary=64)], loaded=Planned(256))
    answer = ask(planners, node, QUESTION)
    assert (answer.boundary, answer.ready) == (256, 64)


def test_less_may_come_than_was_planned(planners: list[Planner]) -> None:
    planned = Planned(256, ready=False, ready_boundary=64)
    for loaded, expected in ((Planned(64), 64), (Planned(0, ready=False), 0), (Planned(96), 0)):
        node = Node([replace(planned)], loaded=loaded)
        assert ask(planners, node, QUESTION).boundary == expected
        assert loaded.released == (expected == 0)


def test_a_prompt_shorter_than_a_block_is_not_asked_about(planners: list[Planner]) -> None:
    node = Node([])
    answer = ask(planners, node, replace(QUESTION, tokens=TOKENS[:64], limit=63))
    assert (answer.boundary, answer.reason) == (0, "shorter than a block")
    assert answer.chain is not None, "its pages may be saved when it grows"
    assert not node.asked


@pytest.mark.parametrize(
    "question",
    [
        replace(QUESTION, features=None),
        replace(QUESTION, adapter=Adapter("x", 1, "/nowhere")),
        replace(QUESTION, tokens=(-1, *TOKENS)),
        replace(QUESTION, features=(Feature("image", "a", 999),)),
        replace(QUESTION, features=(Feature("image", None, 9),)),
        replace(QUESTION, features=(Feature("image", "\ud800", 9),)),
        replace(QUESTION, salt="\ud800"),
    ],
)
def test_what_has_no_identity_is_refused(planners: list[Planner], question: Question) -> None:
    node = Node([])
    answer = ask(planners, node, question)
    assert answer.reason.startswith("refused")
    assert (answer.chain, answer.scope, answer.boundary) == (None, None, 0)
    assert not node.asked


def test_salts_and_epochs_narrow(planners: list[Planner]) -> None:
    node = Node([Planned(0), Planned(0)])
    one = ask(planners, node, replace(QUESTION, salt="a"))
    other = ask(planners, node, replace(QUESTION, salt="a", epoch="1"))
    assert one.scope is not None
    assert other.scope is not None
    assert one.scope.salt == "a"
    assert other.scope.salt not in ("", "a")
    assert node.plans[0].released


def test_clearing_asks_the_node(planners: list[Planner]) -> None:
    node = Node([Planned(0)])
    planner = Planner(node, geometry(), Settings("/s"), 0)  # type: ignore[arg-type]
    planner.clear()
    planner.ask(QUESTION).result(10.0)
    assert planner.status == "attached"
    planner.close()
    assert (node.cleared, node.closed) == (1, True)


def test_long_names_are_hashed() -> None:
    assert name_of("x" * NAME_BYTES_MAX) == "x" * NAME_BYTES_MAX
    long = name_of("x" * (NAME_BYTES_MAX + 1))
    assert len(long) == 64
    assert long != name_of("x" * (NAME_BYTES_MAX + 2))
    assert len(name_of("ü" * NAME_BYTES_MAX)) == 64


def test_the_layout_is_one_that_a_client_takes() -> None:
    assert isinstance(geometry().layout, Layout)
