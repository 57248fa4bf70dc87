"""Marconi's order of eviction, after the paper (Pan et al., "Marconi", MLSys 2025, arXiv 2411.19379).

Worth is `recency + alpha x efficiency`. Recency is one over the requests since the last use, efficiency
the FLOPs saved beyond the next best point for each byte of the prefix's KV and its checkpoint; both are
scaled to 0..1 over the points at hand, those that others fork from left out. `alpha` is 0 until the tuner
has replayed the first requests with every other one.

The scales move with every request, so no score is kept. Two orders are, one by each term; both are
walked from their low ends until no point further on can be lower than the best found (the threshold
algorithm, Fagin et al., 2003).
"""

import heapq
import math
from collections import deque
from typing import TypeAlias

from tiercache.core.policy.forest import Point
from tiercache.core.policy.ranking import STALE_MAX, STALE_SPARE, Clock
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.shadow import Shadow
from tiercache.core.policy.visits import Visit

WALK_MAX = 256
"""Steps of one walk; what is found by then is good enough."""

ALPHAS = tuple(step / 10 for step in range(21))
WINDOW_FACTOR = 5
"""The window ends after this many times the requests that came before the first eviction."""

WINDOW_VISITS_MAX = 4096
WINDOW_BLOCKS_MAX = 1 << 20
REPLAYS_PER_VISIT = 32

_Entry: TypeAlias = tuple[float, int, Point]


class _Order:
    """Points by a number, ascending. Entries of points that changed or went are dropped when met."""

    def __init__(self, stamps: dict[Point, int]) -> None:
        self._stamps = stamps
        self._heap: list[_Entry] = []

    def push(self, key: float, stamp: int, point: Point) -> None:
        heapq.heappush(self._heap, (key, stamp, point))
        if len(self._heap) > STALE_MAX * len(self._stamps) + STALE_SPARE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def pop(self) -> _Entry | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry
        return None

    def first(self) -> _Entry | None:
        entry = self.pop()
        if entry is not None:
            heapq.heappush(self._heap, entry)
        return entry

    def give_back(self, entries: list[_Entry]) -> None:
        for entry in entries:
            heapq.heappush(self._heap, entry)

    def _is_current(self, entry: _Entry) -> bool:
        """Whether it says what is so, and the point is a candidate: it may have come to fork since."""
        return self._stamps.get(entry[2]) == entry[1] and len(entry[2].node.children) < 2


class Marconi:
    """A `Ranking`. `alpha` may be set at any time."""

    def __init__(self, alpha: float = 0.0) -> None:
        self.alpha = alpha
        self._stamps: dict[Point, int] = {}
        self._stamp = 0
        self._worst, self._best = _Order(self._stamps), _Order(self._stamps)  # By efficiency.
        self._oldest, self._newest = _Order(self._stamps), _Order(self._stamps)  # By use.

    def __len__(self) -> int:
        return len(self._stamps)

    def put(self, point: Point, clock: Clock) -> None:
        """See `Ranking`."""
        self._stamp += 1
        self._stamps[point] = self._stamp
        efficiency = _efficiency(point)
        self._worst.push(efficiency, self._stamp, point)
        self._best.push(-efficiency, self._stamp, point)
        self._oldest.push(point.used, self._stamp, point)
        self._newest.push(-point.used, self._stamp, point)

    def drop(self, point: Point) -> None:
        """See `Ranking`."""
        del self._stamps[point]

    def lowest(self, clock: Clock) -> Point | None:
        """See `Ranking`."""
        worst, best = self._worst.first(), self._best.first()
        oldest, newest = self._oldest.first(), self._newest.first()
        if worst is None or best is None or oldest is None or newest is None:
            return next(iter(self._stamps), None)  # All fork, or there are none.
        after = clock.tick + 1
        low = 1 / (after - oldest[0])
        width = 1 / (after + newest[0]) - low
        spread = -best[0] - worst[0]

        def recency(used: float) -> float:
            return (1 / (after - used) - low) / width if width > 0 else 1.0

        def efficiency(value: float) -> float:
            return self.alpha * ((value - worst[0]) / spread if spread > 0 else 1.0)

        found, lowest = worst[2], math.inf
        walked: tuple[list[_Entry], list[_Entry]] = ([], [])
        for _ in range(WALK_MAX):
            left, right = self._worst.pop(), self._oldest.pop()
            assert left is not None
            assert right is not None  # At the end of both, the lowest is within any bound.
            walked[0].append(left)
            walked[1].append(right)
            bound = efficiency(left[0]) + recency(right[0])
            for point in (left[2], right[2]):
                value = efficiency(_efficiency(point)) + recency(point.used)
                if value < lowest:
                    found, lowest = point, value
            if lowest <= bound:
                break
        self._worst.give_back(walked[0])
        self._oldest.give_back(walked[1])
        return found


def _efficiency(point: Point) -> float:
    node = point.node
    shape = node.shape
    return node.gain() / (shape.state_bytes + node.end * shape.block_bytes)


class Tuner:
    """Finds alpha: keeps the first requests, then replays them with each one, some at every request."""

    def __init__(self, ranking: Marconi, budget: float, reuse: Reuse) -> None:
        self._ranking = ranking
        self._budget = budget
        self._reuse = reuse
        self._window: list[Visit] = []
        self._blocks = 0
        self._until = 0  # Requests in the window; 0: nothing was evicted yet.
        self._left: deque[float] = deque(ALPHAS)
        self._trial: tuple[float, Shadow, int] | None = None
        self._best = (-1.0, 0.0)
        self.done = False

    @property
    def alpha(self) -> float:
        """The alpha to use now."""
        return self._ranking.alpha

    def visit(self, visit: Visit, evictions: int) -> None:
        """Take in one request, before which there were `evictions`."""
        if self.done:
            return
        if self._trial is not None:
            self._replay()
            return
        self._window.append(visit)
        self._blocks += len(visit.path)
        count = len(self._window)
        if evictions and not self._until:
            self._until = WINDOW_FACTOR * count
        full = count >= WINDOW_VISITS_MAX or self._blocks >= WINDOW_BLOCKS_MAX
        if full or 0 < self._until <= count:
            self._trial = self._start()

    def _start(self) -> tuple[float, Shadow, int]:
        alpha = self._left.popleft()
        shadow = Shadow(self._budget, {"marconi": Marconi(alpha)}, "marconi", self._reuse)
        return alpha, shadow, 0

    def _replay(self) -> None:
        assert self._trial is not None
        alpha, shadow, at = self._trial
        for visit in self._window[at : at + REPLAYS_PER_VISIT]:
            shadow.visit(visit)
        at += REPLAYS_PER_VISIT
        if at < len(self._window):
            self._trial = (alpha, shadow, at)
            return
        self._best = max(self._best, (shadow.tally.saved, -alpha))
        if self._left:
            self._trial = self._start()
            return
        self._ranking.alpha = -self._best[1]
        self._trial = None
        self._window = []
        self.done = True
