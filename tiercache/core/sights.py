"""How many different requests have reached a boundary."""

from collections import OrderedDict


class Sights:
    """Counts by namespace and digest, the last `sights_max` of them, kept beyond eviction.

    One request is one sight, however often it asks: the last `requests_max` request ids are
    remembered. A restart forgets all of it: then a prefix must earn its place on NVMe anew.
    """

    def __init__(self, sights_max: int, requests_max: int) -> None:
        self._sights_max = sights_max
        self._requests_max = requests_max
        self._counts: dict[bytes, OrderedDict[bytes, int]] = {}
        self._total = 0
        self._requests: OrderedDict[tuple[bytes, str], None] = OrderedDict()

    def __len__(self) -> int:
        return self._total

    def first_time(self, namespace: bytes, request: str) -> bool:
        """Return whether this request is new, and remember it."""
        name = (namespace, request)
        if name in self._requests:
            return False
        self._requests[name] = None
        if len(self._requests) > self._requests_max:
            self._requests.popitem(last=False)
        return True

    def see(self, namespace: bytes, digests: list[bytes]) -> None:
        """Count one sight of each digest."""
        counts = self._counts.setdefault(namespace, OrderedDict())
        before = len(counts)
        for digest in digests:
            counts[digest] = counts.get(digest, 0) + 1
        self._total += len(counts) - before
        while self._total > self._sights_max and counts:
            counts.popitem(last=False)
            self._total -= 1

    def count(self, namespace: bytes, digest: bytes) -> int:
        """Return how many requests have reached this digest, as far as it is remembered."""
        counts = self._counts.get(namespace)
        return 0 if counts is None else counts.get(digest, 0)

    def forget(self, namespace: bytes) -> None:
        """Forget a namespace."""
        self._total -= len(self._counts.pop(namespace, ()))
