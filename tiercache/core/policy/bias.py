"""Classes beside the order: some go first, some are spared a few times. Never a lock."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final, Generic, TypeVar

from tiercache.core.policy.base import Eviction

T = TypeVar("T")

SPARES_PER_VICTIM_MAX: Final = 16
"""Items that are spared before one goes whatever its class: the cost of a victim stays bounded."""


class Biased(Generic[T]):
    """Wraps an eviction policy. `bias` gives an item's class as it is now.

    Below 0: it goes before all others, the lowest class first, within a class what was let go of
    longest ago. Above 0: it is spared so many times, each time as if it had been used, until somebody
    really uses it.
    """

    def __init__(self, inner: Eviction[T], bias: Callable[[T], int]) -> None:
        self._inner = inner
        self._bias = bias
        self._first: dict[int, OrderedDict[T, None]] = {}
        self._spent: dict[T, int] = {}

    def add(self, item: T) -> None:
        """See `Eviction`."""
        self._inner.add(item)
        bias = self._bias(item)
        if bias < 0:
            self._first.setdefault(bias, OrderedDict())[item] = None

    def remove(self, item: T) -> None:
        """See `Eviction`."""
        self._inner.remove(item)
        if self._spent:
            self._spent.pop(item, None)
        for items in self._first.values():
            items.pop(item, None)

    def victims(self) -> Iterator[T]:
        """See `Eviction`."""
        for bias in sorted(self._first):
            items = self._first[bias]
            while items:
                item = next(iter(items))
                if self._bias(item) < 0:
                    yield item
                else:
                    del items[item]  # Somebody thought better of it.
        for _ in range(SPARES_PER_VICTIM_MAX):
            offered = next(self._inner.victims(), None)
            if offered is None or self._spent.get(offered, 0) >= self._bias(offered):
                break
            self._spent[offered] = self._spent.get(offered, 0) + 1
            self._inner.remove(offered)
            self._inner.add(offered)
        yield from self._inner.victims()

    def __iter__(self) -> Iterator[T]:
        first = [item for bias in sorted(self._first) for item in self._first[bias]]
        known = set(first)
        return chain(first, (item for item in self._inner if item not in known))

    def __contains__(self, item: object) -> bool:
        return item in self._inner

    def __len__(self) -> int:
        return len(self._inner)
