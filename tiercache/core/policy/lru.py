"""Least recently used goes first."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Lru(Generic[T]):
    """Drops what was let go of longest ago. Every call is O(1)."""

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def add(self, item: T) -> None:
        """See `Eviction`."""
        self._order[item] = None

    def remove(self, item: T) -> None:
        """See `Eviction`."""
        del self._order[item]

    def victims(self) -> Iterator[T]:
        """See `Eviction`."""
        while self._order:
            yield next(iter(self._order))

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)

    def __contains__(self, item: object) -> bool:
        return item in self._order

    def __len__(self) -> int:
        return len(self._order)
