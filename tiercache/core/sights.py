"""Who has been where: how many different requests reached a boundary, and where requests part.

This is the ghost table of the policies: digests only, bounded, and kept beyond the eviction of what they
name.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

Request: TypeAlias = tuple[bytes, str, str]
"""A request by its namespace, its engine's name and its own: the ranks of one engine share it."""

# What is remembered of a digest is one number: flags, the request that came last, how many came.
_PASSED: Final = 1  # A prompt went on beyond it.
_FORKED: Final = 2  # Prompts went on beyond it in more than one direction.
_BY: Final = 1 << 2
_ONE: Final = 1 << 42
_FLAGS: Final = _BY - 1
_KEPT: Final = ~(_ONE - 1) | _FLAGS
"""All but the request."""


class Trail(NamedTuple):
    """What earlier prompts have in common with one, in whole blocks from its start.

    `reached`: the deepest that an earlier one reached. `forked`: the deepest beyond which an earlier one
    went another way than this one or than a third. 0: none, as far as it is remembered.
    """

    reached: int
    forked: int


class Sights:
    """Counts by namespace and digest, the last `sights_max` of them.

    One request is one sight, however often it asks: the last `requests_max` requests are remembered. A
    restart forgets all of it: then a prefix must earn its place on NVMe anew.
    """

    def __init__(self, sights_max: int, requests_max: int) -> None:
        self._sights_max = sights_max
        self._requests_max = requests_max
        self._seen: dict[bytes, OrderedDict[bytes, int]] = {}
        self._total = 0
        self._requests: OrderedDict[Request, int] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return self._total

    def first_time(self, request: Request) -> bool:
        """Return whether this request is new, and remember it."""
        known = request in self._requests
        self._number(request)
        return not known

    def see(self, request: Request, digests: Sequence[bytes], *, goes_on: bool = False) -> Trail:
        """Count a prompt's sight of all its blocks, and return what earlier ones have in common with it.

        `goes_on`: the prompt can be captured deeper than its last whole block. To be called once for each
        request.
        """
        seen = self._seen.setdefault(request[0], OrderedDict())
        before = len(seen)
        # Every block of every prompt comes through here: what is new costs two look-ups, the rest three.
        get, move = seen.get, seen.move_to_end
        passed = self._number(request) * _BY | _PASSED
        new = passed + _ONE
        reached = forked = last = 0
        for index, digest in enumerate(digests, 1):
            known = get(digest)
            if known is None:
                seen[digest] = new
                continue
            reached, last = index, known
            if known & _FORKED:
                forked = index
            seen[digest] = (known & _KEPT | passed) + _ONE
            move(digest)
        if digests and not goes_on and not (reached == len(digests) and last & _PASSED):
            seen[digests[-1]] ^= _PASSED
        if last & _PASSED and (reached < len(digests) or goes_on):
            forked = reached
            seen[digests[reached - 1]] |= _FORKED
        self._bound(len(seen) - before)
        return Trail(reached, forked)

    def see_beyond(self, request: Request, digests: Iterable[bytes]) -> None:
        """Count a sight of boundaries that are no whole blocks of a prompt, unless this request was the
        last one there."""
        seen = self._seen.setdefault(request[0], OrderedDict())
        before = len(seen)
        number = self._number(request)
        for digest in digests:
            known = seen.get(digest, 0)
            if not known or known // _BY % (_ONE // _BY) != number:
                seen[digest] = (known & _KEPT | number * _BY) + _ONE
                seen.move_to_end(digest)
        self._bound(len(seen) - before)

    def count(self, namespace: bytes, digest: bytes) -> int:
        """Return how many requests have reached this digest, as far as it is remembered."""
        seen = self._seen.get(namespace)
        return 0 if seen is None else seen.get(digest, 0) // _ONE

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong or a limit is passed."""
        assert self._total == sum(map(len, self._seen.values())) <= self._sights_max
        assert len(self._requests) <= self._requests_max

    def forget(self, namespace: bytes) -> None:
        """Forget a namespace."""
        self._total -= len(self._seen.pop(namespace, ()))

    def _number(self, request: Request) -> int:
        number = self._requests.get(request)
        if number is None:
            self._numbers += 1
            number = self._requests[request] = self._numbers
            if len(self._requests) > self._requests_max:
                self._requests.popitem(last=False)
        return number

    def _bound(self, added: int) -> None:
        self._total += added
        while self._total > self._sights_max:
            # The namespace that takes most gives: a busy one does not make the others forget.
            fullest = max(self._seen.values(), key=len)
            count = min(self._total - self._sights_max, len(fullest))
            self._total -= count
            for _ in range(count):
                fullest.popitem(last=False)
