"""How many different requests have reached a boundary."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

Request: TypeAlias = tuple[bytes, str, str]
"""A request by its namespace, its engine's name and its own: the ranks of one engine share it."""

BEYOND_MAX = 16
"""Boundaries inside blocks that are remembered of one request."""


class Sights:
    """Counts by namespace and digest, the last `sights_max` of them, kept beyond eviction.

    One request is one sight, however often it asks: the last `requests_max` requests are remembered.
    A restart forgets all of it: then a prefix must earn its place on NVMe anew.
    """

    def __init__(self, sights_max: int, requests_max: int) -> None:
        self._sights_max = sights_max
        self._requests_max = requests_max
        self._counts: dict[bytes, OrderedDict[bytes, int]] = {}
        self._total = 0
        self._requests: OrderedDict[Request, None] = OrderedDict()
        self._beyond: OrderedDict[Request, tuple[bytes, ...]] = OrderedDict()

    def __len__(self) -> int:
        return self._total

    def first_time(self, request: Request) -> bool:
        """Return whether this request is new, and remember it."""
        if request in self._requests:
            return False
        self._requests[request] = None
        if len(self._requests) > self._requests_max:
            self._requests.popitem(last=False)
        return True

    def see(self, namespace: bytes, digests: Iterable[bytes]) -> None:
        """Count one sight of each digest."""
        counts = self._counts.setdefault(namespace, OrderedDict())
        before = len(counts)
        for digest in digests:
            counts[digest] = counts.get(digest, 0) + 1
            counts.move_to_end(digest)
        self._total += len(counts) - before
        while self._total > self._sights_max:
            # The namespace that takes most gives: a busy one does not make the others forget.
            fullest = max(self._counts.values(), key=len)
            count = min(self._total - self._sights_max, len(fullest))
            self._total -= count
            for _ in range(count):
                fullest.popitem(last=False)

    def see_beyond(self, request: Request, digests: Iterable[bytes]) -> None:
        """Count one sight of boundaries inside blocks, unless this request has been counted there."""
        known = self._beyond.get(request, ())
        new = tuple(digest for digest in dict.fromkeys(digests) if digest not in known)
        if not new:
            return
        self.see(request[0], new)
        self._beyond[request] = (known + new)[-BEYOND_MAX:]
        if len(self._beyond) > self._requests_max:
            self._beyond.popitem(last=False)

    def count(self, namespace: bytes, digest: bytes) -> int:
        """Return how many requests have reached this digest, as far as it is remembered."""
        counts = self._counts.get(namespace)
        return 0 if counts is None else counts.get(digest, 0)

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong or a limit is passed."""
        assert self._total == sum(map(len, self._counts.values())) <= self._sights_max
        assert max(len(self._requests), len(self._beyond)) <= self._requests_max

    def forget(self, namespace: bytes) -> None:
        """Forget a namespace."""
        self._total -= len(self._counts.pop(namespace, ()))
