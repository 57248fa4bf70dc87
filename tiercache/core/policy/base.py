"""The interfaces of the policies."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from tiercache.core.events import Capture

T = TypeVar("T")


class Eviction(Protocol[T]):
    """Orders what may be dropped. Knows only what nobody uses: leased objects are not in it.

    The caller guarantees that each item is added once, is there when it is removed, and is hashable by
    identity.
    """

    def add(self, item: T) -> None:
        """An item became droppable: new, or its last user let go of it."""
        ...

    def remove(self, item: T) -> None:
        """An item is in use again, or gone."""
        ...

    def victims(self) -> Iterator[T]:
        """Yield items, the least valuable first. The caller removes what it drops while iterating, and
        asks anew afterwards."""
        ...

    def __iter__(self) -> Iterator[T]: ...

    def __contains__(self, item: object) -> bool: ...

    def __len__(self) -> int: ...


class Admission(Protocol):
    """Says what has earned a place on NVMe."""

    def earned(self, sights: int) -> bool:
        """True when an object whose boundary was reached by `sights` different requests may be
        written."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a checkpoint policy sees it.

    `resumed`: tokens that need not be computed. `reached`: tokens of whole blocks that an earlier request
    had in common with it. `fork`: the deepest boundary beyond which an earlier request went another way
    (0: none). `met`: boundaries inside blocks that an earlier request reached. `held`: checkpoints that
    are held along its way.
    """

    tokens: int
    resumed: int
    block_tokens: int
    reached: int = 0
    fork: int = 0
    met: frozenset[int] = frozenset()
    held: int = 0


class Sort(Enum):
    """What a boundary is to the request that offers its checkpoint."""

    PROMPT = "prompt"  # The deepest one that serves the identical prompt.
    END = "end"  # The prompt's end, which serves its continuation.
    OUTPUT = "output"  # Beyond the prompt: where decoding ended, or has come to.
    FORK = "fork"  # Where an earlier request went another way, or as near as this engine gets.
    INSIDE = "inside"  # Any other in the prompt.


@dataclass(frozen=True, slots=True)
class Stop:
    """A boundary whose checkpoint an engine offers, unasked. `sights`: requests that reached it, this one
    included. `last`: it offers none deeper in the same call."""

    tokens: int
    sort: Sort
    sights: int
    last: bool


class Checkpoints(Protocol):
    """Says where a request should capture its recurrent state while it runs, and which of those that it
    was not told to capture are kept all the same."""

    def place(self, prompt: Prompt, capture: Capture) -> list[int]:
        """Return token counts, ascending, in (`resumed`, `tokens`]; all within `capture`'s means."""
        ...

    def keeps(self, stop: Stop) -> bool:
        """Return whether a checkpoint that nobody asked for is stored."""
        ...
