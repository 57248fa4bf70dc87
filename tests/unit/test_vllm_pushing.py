"""Prompts that another node takes while they are computed here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from tiercache.client import Pushed, Scope
from tiercache.errors import ProtocolError
from tiercache.state import Chain
from tiercache.testing.nodes import eventually
from tiercache_vllm.handover import DESTINATION, destination_of
from tiercache_vllm.pushing import PUSHES_MAX, Pusher

CHAIN = Chain(tuple(range(600)), 128)


@dataclass
class Node:
    """A client whose node's neighbour takes what it is told."""

    answers: list[Pushed | Exception]
    asked: list[tuple[str, str]] = field(default_factory=list)

    def push(self, request: str, chain: Chain, to: str, *, scope: Scope, wait_s: float) -> Pushed:
        assert chain is CHAIN
        assert wait_s > 0
        self.asked.append((request, to))
        answer = self.answers.pop(0) if self.answers else Pushed(0, "not_taken")
        if isinstance(answer, Exception):
            raise answer
        return answer


NewPusher = Callable[..., Pusher]


@pytest.fixture
def new_pusher() -> Iterator[NewPusher]:
    made: list[Pusher] = []

    def make(node: Node, patience_s: float = 30.0) -> Pusher:
        made.append(Pusher(node, patience_s))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for pusher in made:
        pusher.close()


def saving(pusher: Pusher, request: str = "r", goal: int = 512) -> None:
    pusher.saving(request, CHAIN, Scope(), "b", goal)


def test_it_is_pushed_until_all_was_taken(new_pusher: NewPusher) -> None:
    node = Node([Pushed(0, "not_taken"), Pushed(256), Pushed(512)])
    pusher = new_pusher(node)
    saving(pusher)
    pusher.over("r")
    counts = pusher.take_counts()

    def ended() -> bool:
        counts.update(pusher.take_counts())
        return bool(counts)

    assert eventually(ended)
    assert counts == {"pushed": 1}
    assert node.asked == [("r", "b")] * 3
    assert pusher.take_counts() == {}


@pytest.mark.parametrize(
    "answer", [Pushed(0, "unknown_node"), ProtocolError("odd"), ValueError("odd")]
)
def test_what_cannot_be_pushed_is_given_up(
    new_pusher: NewPusher, answer: Pushed | Exception
) -> None:
    node = Node([answer])
    pusher = new_pusher(node)
    saving(pusher)
    assert eventually(lambda: pusher.take_counts() == {"pushed_short": 1})
    assert len(node.asked) == 1


def test_a_request_that_is_over_is_given_up_after_a_while(new_pusher: NewPusher) -> None:
    node = Node([])
    pusher = new_pusher(node, 0.05)
    saving(pusher)
    assert eventually(lambda: len(node.asked) > 2)
    assert pusher.take_counts() == {}
    pusher.over("r")
    pusher.over("another")
    assert eventually(lambda: pusher.take_counts() == {"pushed_short": 1})
    asked = len(node.asked)
    saving(pusher)
    assert eventually(lambda: len(node.asked) > asked), "it may begin again"


def test_only_so_many_are_pushed(new_pusher: NewPusher) -> None:
    pusher = new_pusher(Node([]))
    saving(pusher, goal=0)
    for number in range(PUSHES_MAX + 2):
        saving(pusher, f"r{number}")
    assert pusher.take_counts() == {"pushes_dropped": 2}


@pytest.mark.parametrize(
    ("params", "destination"),
    [
        ({DESTINATION: "b"}, "b"),
        ({}, ""),
        (None, ""),
        ({DESTINATION: "../b"}, None),
        ({DESTINATION: 3}, None),
    ],
)
def test_a_destination_is_the_name_of_a_node(params: object, destination: str | None) -> None:
    assert destination_of(params) == destination
