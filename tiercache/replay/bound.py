"""What no policy can beat: an upper bound on the FLOPs that a cache of a budget can save.

The cache is relaxed to one whose bytes are bought: whoever keeps a page from one use to the next pays its
size for each request between, at a price. Then each request decides alone where to resume, and what is
saved, less what was paid, plus the worth of the whole budget at those prices, bounds every policy from
above, whatever the prices (weak Lagrangian duality). Prices are the same within each of 128 stretches of
the trace; a search lowers the bound.

Pages of a request that were used last by the same request form a run. What a boundary saves is convex in
its depth and the price of a run linear, so only the ends of runs need to be looked at.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tiercache.core.policy.visits import Shape
from tiercache.replay.traces import Trace

STRETCHES = 128
STEPS = 160
_Floats: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float64]]"
_Ints: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs of a trace: their request, the request before that used them, first and last page."""

    request: _Ints
    before: _Ints
    first: _Ints
    last: _Ints
    starts: _Ints  # The first run of each request that has one.
    count: int  # Requests.


def runs_of(trace: Trace) -> Runs:
    """Return the runs of a trace; pages are counted from 1."""
    used: dict[int, int] = {}
    rows: list[tuple[int, int, int, int]] = []
    for number, request in enumerate(trace.requests):
        usable = (request.tokens - 1) // trace.page
        before = -1
        for depth, page in enumerate(request.pages, 1):
            last = used.get(page, -1)
            used[page] = number
            if depth > usable or last < 0:
                usable = 0  # Beyond the first unknown page nothing can be resumed.
            elif last == before:
                rows[-1] = (number, last, rows[-1][2], depth)
            else:
                rows.append((number, last, depth, depth))
                before = last
    table = np.array(rows, np.int64).reshape(-1, 4)
    owner = table[:, 0]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    return Runs(owner, table[:, 1], table[:, 2], table[:, 3], starts, len(trace.requests))


class Bound:
    """The bound for one trace and model; `total` are all FLOPs of the trace."""

    def __init__(self, trace: Trace, shape: Shape, runs: Runs) -> None:
        self._runs = runs
        work = shape.work
        self.total = sum(work.flops(request.tokens) for request in trace.requests)
        scale = 1 / self.total
        page = trace.page
        self._saved = (
            np.array([work.flops(depth * page) * scale for depth in runs.first.tolist()]),
            np.array([work.flops(depth * page) * scale for depth in runs.last.tolist()]),
        )
        self._page_bytes = float(shape.block_bytes)
        self._state_bytes = float(shape.state_bytes)
        stretch = np.arange(runs.count) * STRETCHES // max(runs.count, 1)
        self._stretch = stretch
        self._width = np.bincount(stretch, minlength=STRETCHES).astype(float)

    def infinite(self) -> float:
        """Return the part of all FLOPs that a cache without a bound saves."""
        return self._value(np.zeros(STRETCHES))[0]

    def of(self, budget: float) -> float:
        """Return the part of all FLOPs that no cache of `budget` bytes can save more than."""
        best, price = math.inf, 0.0
        low, high = -60.0, -20.0
        for _ in range(3):  # Ever finer around the best uniform price.
            grid = np.linspace(low, high, 25)
            for exponent in grid:
                value = self._dual(np.full(STRETCHES, math.exp(exponent)), budget)
                if value < best:
                    best, price = value, float(exponent)
            step = float(grid[1] - grid[0])
            low, high = price - step, price + step
        prices = np.full(STRETCHES, math.exp(price))
        slope = self._slope(prices, budget)
        step = 0.5
        for _ in range(STEPS):
            trial = prices * np.exp(-step * np.clip(slope, -2, 1))
            value = self._dual(trial, budget)
            if value < best:
                best, prices = value, trial
                slope = self._slope(prices, budget)
                step = min(step * 1.3, 1.0)
            else:
                step *= 0.6
                if step < 1e-3:
                    break
        return min(best, self.infinite())

    def _dual(self, prices: _Floats, budget: float) -> float:
        return self._value(prices)[0] + budget * float((prices * self._width).sum())

    def _value(self, prices: _Floats) -> tuple[float, _Floats, _Floats]:
        """Return what all requests gain, and of each run what its two ends gain."""
        runs = self._runs
        if not len(runs.request):
            return 0.0, np.empty(0), np.empty(0)
        paid = np.concatenate([[0.0], np.cumsum(prices[self._stretch])])
        kept = paid[runs.request] - paid[runs.before]
        each = self._page_bytes * kept
        whole = each * (runs.last - runs.first + 1)
        until = np.cumsum(whole)
        base = np.zeros(len(until))
        base[runs.starts] = np.diff(np.concatenate([[0.0], (until - whole)[runs.starts]]))
        until -= np.cumsum(base)
        state = self._state_bytes * kept
        first = self._saved[0] - (until - whole + each) - state
        last = self._saved[1] - until - state
        gains = np.maximum.reduceat(np.maximum(first, last), runs.starts)
        return float(np.maximum(gains, 0.0).sum()), first, last

    def _slope(self, prices: _Floats, budget: float) -> _Floats:
        """Return for each stretch which part of the budget is not bought (negative: too much is)."""
        runs = self._runs
        _, first, last = self._value(prices)
        best = np.maximum(first, last)
        gains = np.maximum.reduceat(best, runs.starts)
        which = np.cumsum(np.bincount(runs.starts, minlength=len(best))) - 1
        at = np.flatnonzero((best == gains[which]) & (best > 0))
        _, unique = np.unique(which[at], return_index=True)
        at = at[unique]
        depth = np.zeros(len(runs.starts), np.int64)
        depth[which[at]] = np.where(last[at] >= first[at], runs.last[at], runs.first[at])
        pages = np.clip(depth[which] - runs.first + 1, 0, runs.last - runs.first + 1)
        size = runs.count + 1
        change = np.zeros(size)
        for rows, nbytes in ((slice(None), pages * self._page_bytes), (at, self._state_bytes)):
            weights = np.broadcast_to(nbytes, runs.request[rows].shape)
            change += np.bincount(runs.before[rows], weights=weights, minlength=size)
            change -= np.bincount(runs.request[rows], weights=weights, minlength=size)
        bought = np.bincount(self._stretch, np.cumsum(change)[: runs.count], STRETCHES)
        room = budget * np.maximum(self._width, 1e-9)
        slope: _Floats = (budget * self._width - bought) / room
        return slope
