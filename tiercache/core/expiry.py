"""When objects end: a time to live for each that has one. Monotonic seconds, never the wall clock."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from tiercache.core.catalog import Item

STALE_MAX = 1024
"""Times that count no more are swept out once there are more of them than others, and this."""


class Expiry:
    """The ends of objects. An object without one is not known here."""

    def __init__(self) -> None:
        self._until: dict[Item, float] = {}
        self._own: set[Item] = set()
        self._due: list[tuple[float, int, Item]] = []

    def __len__(self) -> int:
        return len(self._until)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._until)

    def begin(self, item: Item, until: float, *, own: bool) -> None:
        """A new object ends then. `own`: its request said so, not its namespace."""
        self._until[item] = until
        if own:
            self._own.add(item)
        heappush(self._due, (until, item.id, item))

    def prolong(self, item: Item, until: float | None) -> None:
        """Somebody stored the object again: it lasts until the later time. None: for ever."""
        before = self._until.get(item)
        if before is None or (until is not None and until <= before):
            return
        if until is None:
            self.forget(item)
            return
        self._until[item] = until
        heappush(self._due, (until, item.id, item))
        if len(self._due) > 2 * len(self._until) + STALE_MAX:
            self._due = [(until, item.id, item) for item, until in self._until.items()]
            heapify(self._due)

    def left_s(self, item: Item, now: float) -> float | None:
        """Return how long an object lasts from now on; None when it has no end."""
        until = self._until.get(item)
        return None if until is None else until - now

    def is_own(self, item: Item) -> bool:
        """Return whether the object's request said when it ends. The disk cannot keep that promise."""
        return item in self._own

    def forget(self, item: Item) -> None:
        """The object is gone, or does not end any more."""
        self._until.pop(item, None)
        self._own.discard(item)

    def take_due(self, now: float) -> list[Item]:
        """Return the objects whose end has come, and forget them."""
        found: list[Item] = []
        due = self._due
        while due and due[0][0] <= now:
            until, _, item = heappop(due)
            if self._until.get(item) == until:
                self.forget(item)
                found.append(item)
        return found

    def wakeup(self) -> float | None:
        """Return when the next object ends, or a time before."""
        return self._due[0][0] if self._due else None

    def check(self, now: float) -> None:
        """Raise AssertionError if some object is beyond its end, or would never come to it."""
        assert min(self._until.values(), default=now + 1) > now, "an object beyond its end"
        times = {(until, item) for until, _, item in self._due}
        assert {(until, item) for item, until in self._until.items()} <= times
        assert self._own <= self._until.keys()
