"""Calls that wait for objects to come from NVMe, each with a deadline."""

from tiercache.core.catalog import Item
from tiercache.core.cluster.events import LocateAsked
from tiercache.core.events import FetchAsked, LoadAsked


class Wait:
    """A call that waits for objects to come from NVMe."""

    __slots__ = ("asked", "deadline", "items", "missing")

    def __init__(
        self,
        asked: LoadAsked | FetchAsked | LocateAsked,
        items: list[Item | None],
        missing: set[Item],
    ) -> None:
        self.asked = asked
        self.deadline = asked.deadline
        self.items = items
        self.missing = missing


class Waits:
    """At most `limit` calls, found by what they wait for and by when their time is up."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waits: dict[int, Wait] = {}
        self._for: dict[Item, list[int]] = {}
        self._next = 0
        self._due: float | None = None  # No call's time is up before.

    def __len__(self) -> int:
        return len(self._waits)

    @property
    def is_full(self) -> bool:
        """Whether as many calls wait as may."""
        return len(self._waits) >= self._limit

    def add(self, wait: Wait) -> None:
        """Have a call wait for what is missing."""
        self._next += 1
        self._waits[self._next] = wait
        for item in wait.missing:
            self._for.setdefault(item, []).append(self._next)
        self._due = wait.deadline if self._due is None else min(self._due, wait.deadline)

    def arrived(self, items: list[Item]) -> list[Wait]:
        """These objects came, or will not come: return the calls that wait for nothing else."""
        ready: list[Wait] = []
        for item in items:
            for number in self._for.pop(item, ()):
                wait = self._waits.get(number)
                if wait is not None:
                    wait.missing.discard(item)
                    if not wait.missing:
                        ready.append(self._waits.pop(number))
        return ready

    def late(self, now: float) -> list[Wait]:
        """Return the calls whose time is up; they wait no more."""
        if self._due is None or self._due > now:
            return []
        late = [number for number, wait in self._waits.items() if wait.deadline <= now]
        waits = [self._waits.pop(number) for number in late]
        self._due = min((wait.deadline for wait in self._waits.values()), default=None)
        return waits

    def close(self, session: int) -> None:
        """Forget a session's calls."""
        gone = [number for number, wait in self._waits.items() if wait.asked.session == session]
        for number in gone:
            del self._waits[number]

    def wakeup(self) -> float | None:
        """Return when the next call's time is up, or a time before."""
        return self._due if self._waits else None

    def check(self) -> None:
        """Raise AssertionError if a call waits for nothing."""
        assert all(wait.missing for wait in self._waits.values()), "a wait for nothing"
