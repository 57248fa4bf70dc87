"""How soon things of a class are used again, learned from what happened and from what has not yet.

Ages are cut into buckets that grow by a quarter of an octave. For each class and bucket it counts how
many came to its end or were used in it, and how many were used: their quotient is the hazard. What is
still waiting counts too, so rare and slow reuse is not mistaken for none. A class with few counts
leans on the coarser one around it, scaled by how much more often than that one it was used so far.
Counts are taken together with those of the two buckets beside them (a kernel, as usual for hazards): the
largest ratio of many would otherwise often be chance.

The index of a class at an age is the largest ratio, over all horizons, of the chance to be used by then
to the expected time until then: what keeping it earns for each second (Gittins, 1979).
"""

import math
from itertools import accumulate
from operator import mul

OCTAVE = 4
"""Buckets for each doubling of the age."""

FIRST_S = 0.5
"""The first bucket ends here."""

BUCKETS = 18 * OCTAVE + 2
"""Up to 36 hours; what is older is in the last one."""

PRIOR_OCTAVE = 0.12
"""The chance of reuse in each octave of age before anything was seen."""

PRIOR_WEIGHT = 20.0
LEAN = 30.0
"""How many counts weigh as much as the coarser class does."""

LEAN_FIRST = 4.0
HAZARD_MAX = 0.9

_EDGES = [0.0] + [FIRST_S * 2 ** (bucket / OCTAVE) for bucket in range(BUCKETS)]
_WIDTHS = [_EDGES[bucket + 1] - _EDGES[bucket] for bucket in range(BUCKETS)]


def bucket_of(age: float) -> int:
    """Return the bucket that an age in seconds lies in."""
    if age < FIRST_S:
        return 0
    return min(int(math.log2(age / FIRST_S) * OCTAVE) + 1, BUCKETS - 1)


def bucket_end(bucket: int) -> float:
    """Return the age in seconds at which a bucket ends."""
    return _EDGES[bucket + 1]


class _Counts:
    __slots__ = ("hits", "reached")

    def __init__(self) -> None:
        self.reached = [0.0] * BUCKETS
        self.hits = [0.0] * BUCKETS

    def add(self, other: "_Counts") -> None:
        self.reached = [a + b for a, b in zip(self.reached, other.reached, strict=True)]
        self.hits = [a + b for a, b in zip(self.hits, other.hits, strict=True)]

    def smoothed(self) -> "_Counts":
        counts = _Counts()
        counts.reached, counts.hits = _smoothed(self.reached), _smoothed(self.hits)
        return counts


class Hazards:
    """Counts by class, and the index they give. A class is a number; dividing it by each of `coarser` makes
    it coarser.

    What is learned takes effect at the next `renew`: an index that was given out stays until then.
    """

    def __init__(self, coarser: tuple[int, int]) -> None:
        self._fine, self._coarse = coarser
        self._counts: dict[int, _Counts] = {}
        self._index: dict[int, list[float]] = {}
        self._middle: dict[int, _Counts] = {}
        self._kinds: dict[int, _Counts] = {}
        self._kind_hazards: dict[int, list[float]] = {}
        self._middle_hazards: dict[int, list[float]] = {}
        self._all: list[float] = []
        self.renew()

    def reached(self, kind: int) -> list[float]:
        """Return what a class counts by bucket: add one where something comes to the end of it unused."""
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = _Counts()
        return counts.reached

    def used(self, kind: int, bucket: int) -> None:
        """Something was used in a bucket."""
        self.reached(kind)[bucket] += 1
        self._counts[kind].hits[bucket] += 1

    def renew(self) -> None:
        """Let what was counted so far take effect."""
        self._index.clear()
        self._kind_hazards.clear()
        self._middle_hazards.clear()
        self._middle.clear()
        self._kinds.clear()
        for number, counts in self._counts.items():
            self._middle.setdefault(number // self._fine, _Counts()).add(counts)
        for number, counts in self._middle.items():
            kind = number * self._fine // self._coarse
            self._kinds.setdefault(kind, _Counts()).add(counts)
        for coarse in (self._middle, self._kinds):
            for number, counts in coarse.items():
                coarse[number] = counts.smoothed()
        every = _Counts()
        for counts in self._kinds.values():
            every.add(counts)
        mean = PRIOR_OCTAVE / OCTAVE
        mean = (sum(every.hits) + mean * PRIOR_WEIGHT) / (sum(every.reached) + PRIOR_WEIGHT)
        self._all = [
            (hits + mean * LEAN_FIRST) / (reached + LEAN_FIRST)
            for hits, reached in zip(every.hits, every.reached, strict=True)
        ]

    def index(self, kind: int, age: float) -> float:
        """Return the index of a class at an age in seconds, in uses a second."""
        table = self._index.get(kind)
        if table is None:
            table = self._index[kind] = _gittins(self._hazards(kind))
        if age < FIRST_S:
            part = age / FIRST_S
            return table[0] * (1 - part) + table[1] * part
        place = math.log2(age / FIRST_S) * OCTAVE + 1
        bucket = int(place)
        if bucket >= BUCKETS - 1:
            return table[-1]
        part = place - bucket
        return table[bucket] * (1 - part) + table[bucket + 1] * part

    def _hazards(self, kind: int) -> list[float]:
        middle = kind // self._fine
        found = self._middle_hazards.get(middle)
        if found is None:
            top = kind // self._coarse
            if top not in self._kind_hazards:
                self._kind_hazards[top] = _lean(self._kinds.get(top), self._all)
            above = self._kind_hazards[top]
            found = self._middle_hazards[middle] = _lean(self._middle.get(middle), above)
        counts = self._counts.get(kind)
        return found if counts is None else _lean(counts.smoothed(), found)


def _smoothed(values: list[float]) -> list[float]:
    """Return each value as half of it and a quarter of both its neighbours; at the ends, of itself."""
    before, after = [values[0], *values[:-1]], [*values[1:], values[-1]]
    return [
        (low + 2 * value + high) / 4 for low, value, high in zip(before, values, after, strict=True)
    ]


def _lean(counts: _Counts | None, coarser: list[float]) -> list[float]:
    """Return hazards by bucket: the counts' own, leaning on the coarser class scaled to them."""
    if counts is None:
        return coarser
    expected = sum(map(float.__mul__, counts.reached, coarser))
    scale = (sum(counts.hits) + LEAN) / (expected + LEAN)
    return [
        (hits + min(HAZARD_MAX, scale * prior) * LEAN) / (reached + LEAN)
        for hits, reached, prior in zip(counts.hits, counts.reached, coarser, strict=True)
    ]


def _gittins(hazards: list[float]) -> list[float]:
    """Return for each bucket the best ratio of chance to time over all horizons from its start.

    From the last bucket to the first: what comes after is taken along as long as that does not lower the
    ratio, in stretches of falling ratios. Sums only, so nothing is lost where hardly anything survives.
    """
    best = [0.0] * BUCKETS
    alive = list(accumulate((1 - hazard for hazard in hazards), mul, initial=1.0))
    stretches: list[tuple[float, float]] = []
    for bucket in range(BUCKETS - 1, -1, -1):
        time = alive[bucket] * _WIDTHS[bucket] * (1 - hazards[bucket] / 2)
        chance = alive[bucket] * hazards[bucket]
        while stretches and stretches[-1][1] * time >= chance * stretches[-1][0]:
            more_time, more_chance = stretches.pop()
            time += more_time
            chance += more_chance
        stretches.append((time, chance))
        best[bucket] = chance / time
    return best
