"""The interfaces of the policies."""

from collections.abc import Iterator
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


class Checkpoints(Protocol):
    """Says where a request should capture its recurrent state while it runs."""

    def place(self, tokens: int, resumed: int, capture: Capture) -> list[int]:
        """Return token counts, ascending, in (`resumed`, `tokens`]; all within `capture`'s means."""
        ...
