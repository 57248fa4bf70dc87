"""One request on the scheduler's side: what is known of it, and the phases it goes through.

asking     the node was asked; vLLM is told to ask again
answered   the boundary is known and leased; vLLM may ask as often as it likes
loading    blocks are allocated and a load was handed to the workers
running    it computes; asked again, it was preempted, or its load failed
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from tiercache.state import Chain
from tiercache_vllm.planning import Answer, Question

Blocks = Sequence[Sequence[int]]
Offer = tuple[int, int, int]
"""A recurrent state on offer: group, block, token count."""


class Asker(Protocol):
    """What answers questions; see `tiercache_vllm.planning.Planner`."""

    def ask(self, question: Question) -> "Future[Answer]":
        """Return the answer to come."""
        ...


class Sequenced(Protocol):
    """What is asked of a request of vLLM."""

    @property
    def request_id(self) -> str:
        """Its id."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Those tokens."""
        ...

    @property
    def shared_prefix_boundary(self) -> int:
        """Where another request was seen to leave the same prefix; 0 for nowhere."""
        ...


class Watcher(Protocol):
    """What wants to know of objects that come and go."""

    def stored(self, request: Sequenced, part: int, end: int, key: bytes) -> None:
        """An object was handed over."""
        ...

    def lost(self, keys: Iterable[bytes]) -> None:
        """Objects are not with the node."""
        ...


class Phase(Enum):
    """See the module's docstring."""

    ASKING = auto()
    ANSWERED = auto()
    LOADING = auto()
    RUNNING = auto()


@dataclass(slots=True)
class Entry:
    """One request."""

    request: Sequenced
    question: Callable[[], Question]
    phase: Phase
    future: "Future[Answer] | None" = None
    answer: Answer | None = None
    answered_at: float = 0.0
    chain: Chain | None = None
    computed: int = 0
    resumed: int = 0
    failed: bool = False
    refused: bool = False
    offered: set[int] = field(default_factory=set)
    saved: dict[int, int] = field(default_factory=dict)
    due: int = 0
    sources: tuple[int, int] = (0, 0)

    def release(self) -> None:
        """Let go of what is leased, now or when the answer comes."""
        if self.future is not None:
            self.future.add_done_callback(_release)
            self.future = None
        if self.answer is not None:
            self.answer.release()


def _release(future: "Future[Answer]") -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a step: how many tokens were computed before it, and how many are in it."""

    request: str
    start: int
    count: int
