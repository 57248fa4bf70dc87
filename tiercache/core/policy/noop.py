"""Nothing goes, ever: the smallest eviction policy, and a bounded store for tests."""

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class KeepAll(Generic[T]):
    """Offers no victim: what does not fit is declined."""

    def __init__(self) -> None:
        self._items: set[T] = set()

    def add(self, item: T) -> None:
        """See `Eviction`."""
        self._items.add(item)

    def remove(self, item: T) -> None:
        """See `Eviction`."""
        self._items.remove(item)

    def victims(self) -> Iterator[T]:
        """See `Eviction`."""
        return iter(())

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)
