"""Shelter for what many requests share, so that a flood of one-off prompts does not wipe it out."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from tiercache.core.policy.base import Eviction
from tiercache.core.policy.bias import SPARES_PER_VICTIM_MAX

T = TypeVar("T")


class Sheltered(Generic[T]):
    """Wraps an eviction policy. An item that `is_shared` when its turn has come is set aside instead,
    as long as all that is aside takes at most `bytes_max()`.

    What is aside goes, longest aside first, when more is shared than there is shelter for, when it was
    not used for `age_s_max`, and when there is nothing else to drop. `size` gives bytes, `now` seconds.
    """

    def __init__(
        self,
        inner: Eviction[T],
        is_shared: Callable[[T], bool],
        size: Callable[[T], int],
        now: Callable[[], float],
        bytes_max: Callable[[], int],
        age_s_max: float,
    ) -> None:
        self._inner = inner
        self._is_shared = is_shared
        self._size = size
        self._now = now
        self._bytes_max = bytes_max
        self._age_s_max = age_s_max
        self._aside: OrderedDict[T, float] = OrderedDict()
        self.aside_bytes = 0

    def add(self, item: T) -> None:
        """See `Eviction`."""
        self._inner.add(item)

    def remove(self, item: T) -> None:
        """See `Eviction`."""
        if item in self._aside:
            del self._aside[item]
            self.aside_bytes -= self._size(item)
        else:
            self._inner.remove(item)

    def victims(self) -> Iterator[T]:
        """See `Eviction`."""
        while self._aside:
            item, since = next(iter(self._aside.items()))
            fits = self.aside_bytes <= self._bytes_max()
            if fits and since > self._now() - self._age_s_max:
                break
            yield item
        for _ in range(SPARES_PER_VICTIM_MAX):
            offered = next(self._inner.victims(), None)
            if offered is None or not self._is_shared(offered):
                break
            size, most = self._size(offered), self._bytes_max()
            if size > most:
                break
            while self.aside_bytes + size > most:
                yield next(iter(self._aside))
            self._inner.remove(offered)
            self._aside[offered] = self._now()
            self.aside_bytes += size
        yield from self._inner.victims()
        while self._aside:
            yield next(iter(self._aside))

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong."""
        assert self.aside_bytes == sum(map(self._size, self._aside))

    def __iter__(self) -> Iterator[T]:
        return chain(self._inner, self._aside)

    def __contains__(self, item: object) -> bool:
        return item in self._aside or item in self._inner

    def __len__(self) -> int:
        return len(self._inner) + len(self._aside)
