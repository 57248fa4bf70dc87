"""Which point is worth least: one heap for each way to score them.

Scores change with time and with what is held around a point, and nobody looks at all points: a score is
reckoned again when the point is used, when something near it makes it worth less, when its age has grown
by a part, and when it is about to be chosen. A score on record may therefore be too low, which choosing
finds out, and too high only by what a part of its age changes. Every call is O(log n).
"""

import heapq
from dataclasses import dataclass
from typing import Protocol

from tiercache.core.policy.forest import Point
from tiercache.core.policy.reuse import Reuse

STALE_MAX = 4
"""A heap is made anew when it has this many times more entries than points, and `STALE_SPARE`."""

STALE_SPARE = 256

RECKONED_S_MIN = 2.0
"""A learned score is not reckoned again sooner because of time."""


@dataclass(slots=True)
class Clock:
    """The time of the last request, in seconds, and how many there were: its tick."""

    now: float = 0.0
    tick: int = 0


class Scorer(Protocol):
    """How much a point is worth for each byte."""

    def score(self, point: Point, clock: Clock) -> float:
        """Return the point's worth now; the lowest goes first."""
        ...

    def reckoned(self, point: Point, clock: Clock) -> float | None:
        """Return when to reckon again, by `time`; None when time alone does not lower the score."""
        ...

    def time(self, clock: Clock) -> float:
        """Return the time that the scores depend on."""
        ...


class Ranking(Protocol):
    """An order of points by worth."""

    def put(self, point: Point, clock: Clock) -> None:
        """A point is new, or its score may have fallen."""
        ...

    def drop(self, point: Point) -> None:
        """A point is gone. The caller guarantees that it is here."""
        ...

    def lowest(self, clock: Clock) -> Point | None:
        """Return the point that is worth least; it stays. None when there is none."""
        ...

    def __len__(self) -> int: ...


class Heap:
    """A `Ranking` by a `Scorer`."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._stamps: dict[Point, int] = {}
        self._heap: list[tuple[float, int, Point]] = []
        self._due: list[tuple[float, int, Point]] = []
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._stamps)

    def put(self, point: Point, clock: Clock) -> None:
        """See `Ranking`."""
        self._push(point, self._scorer.score(point, clock))
        due = self._scorer.reckoned(point, clock)
        if due is not None:
            heapq.heappush(self._due, (due, self._stamp, point))
        if len(self._heap) > STALE_MAX * len(self._stamps) + STALE_SPARE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        if len(self._due) > STALE_MAX * len(self._stamps) + STALE_SPARE:
            self._due = [entry for entry in self._due if self._is_current(entry)]
            heapq.heapify(self._due)

    def drop(self, point: Point) -> None:
        """See `Ranking`."""
        del self._stamps[point]

    def lowest(self, clock: Clock) -> Point | None:
        """See `Ranking`."""
        self._reckon(clock)
        while self._heap:
            entry = self._heap[0]
            if not self._is_current(entry):
                heapq.heappop(self._heap)
                continue
            score, stamp, point = entry
            real = self._scorer.score(point, clock)
            if real <= score:
                return point
            # The same stamp: it is still to be reckoned again when it was due.
            heapq.heapreplace(self._heap, (real, stamp, point))
        return None

    def _reckon(self, clock: Clock) -> None:
        time = self._scorer.time(clock)
        while self._due and self._due[0][0] <= time:
            entry = heapq.heappop(self._due)
            if self._is_current(entry):
                self.put(entry[2], clock)

    def _push(self, point: Point, score: float) -> None:
        self._stamp += 1
        self._stamps[point] = self._stamp
        heapq.heappush(self._heap, (score, self._stamp, point))

    def _is_current(self, entry: tuple[float, int, Point]) -> bool:
        return self._stamps.get(entry[2]) == entry[1]


class Recent:
    """Least recently used first; of those used at once, the deepest, and those that others rest on last."""

    def score(self, point: Point, clock: Clock) -> float:
        """See `Scorer`."""
        node = point.node
        return point.used + (0.5 if node.children else 0.0) + 0.25 / (1 + node.end)

    def reckoned(self, point: Point, clock: Clock) -> float | None:
        """See `Scorer`."""
        return None

    def time(self, clock: Clock) -> float:
        """See `Scorer`."""
        return 0.0


class Hyperbolic:
    """Uses so far over the age, times the FLOPs saved for each byte freed.

    As if the chance of reuse fell with one over the age (hyperbolic caching, Blankstein et al., 2017):
    nothing to learn, and hard to beat when memory is ample. Age is counted in requests.
    """

    def __init__(self, part: float = 0.25) -> None:
        self._part = part

    def score(self, point: Point, clock: Clock) -> float:
        """See `Scorer`."""
        node = point.node
        age = clock.tick + 1 - point.used
        return (point.hits + 1) / age * node.density()

    def reckoned(self, point: Point, clock: Clock) -> float | None:
        """See `Scorer`."""
        return clock.tick + max(1.0, (clock.tick - point.used) * self._part)

    def time(self, clock: Clock) -> float:
        """See `Scorer`."""
        return clock.tick


class Indexed:
    """The learned rate of reuse, heirs included, times the FLOPs saved for each byte freed."""

    def __init__(self, reuse: Reuse, part: float = 0.25) -> None:
        self._reuse = reuse
        self._part = part

    def score(self, point: Point, clock: Clock) -> float:
        """See `Scorer`."""
        reuse, node, now = self._reuse, point.node, clock.now
        rate = reuse.rate(point.ghost, now)
        for heir in point.heirs:
            rate += reuse.rate(heir, now)
        return rate * node.density()

    def reckoned(self, point: Point, clock: Clock) -> float | None:
        """See `Scorer`."""
        return clock.now + max(RECKONED_S_MIN, (clock.now - point.ghost.last) * self._part)

    def time(self, clock: Clock) -> float:
        """See `Scorer`."""
        return clock.now
