"""One memory for KV blocks and state slots: the one grows from its start, the other from its end.

Either kind of load may take what the other leaves, and the boundary between them is nowhere fixed. An
end is made of *slabs* of equal size. A slab belongs to one kind while any of its units is taken, so that
kinds of different sizes share an end; taken slabs stay close to their end because the nearest free unit
is always taken first. What lies between the two frontiers is anybody's. What is free on the wrong side
of a frontier, and what padding costs, is measured by `usage`: it is lost to the other end until the
units beyond it are given back.

Numbers only; `memory` of a kind is for the caller to cut (`space`). Not thread-safe.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import Final

import torch

from tiercache.device.pools import Space

START_ALIGN: Final = 512
"""Every slab begins at a multiple of this many bytes: enough for any vector load or copy engine."""


class End(Enum):
    """From which end of the memory a kind grows."""

    LOW = "low"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class UnitKind:
    """Units of one size: `nbytes` each, starting at multiples of `align` bytes."""

    name: str
    end: End
    nbytes: int
    align: int = 16

    def __post_init__(self) -> None:
        if self.nbytes < 1 or self.align < 1 or self.align & (self.align - 1):
            raise ValueError(f"{self.name}: nbytes must be above 0 and align a power of two")


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the bytes are.

    `used`: what was asked for, by kind. `padding`: bytes of taken units beyond that. `gap`: bytes
    between the frontiers, free for either end. `stranded`: free bytes that only their own end or kind
    can take. `frontiers`: bytes from each end that its slabs span. All add up to `total`.
    """

    total: int
    used: dict[str, int]
    padding: int
    gap: int
    stranded: int
    frontiers: tuple[int, int]

    @property
    def fragmentation(self) -> float:
        """The share of free bytes that is stranded; 0 when nothing is free."""
        free = self.gap + self.stranded
        return self.stranded / free if free else 0.0


class _Slab:
    """A slab in use: the kind that owns it, and its free units, lowest first."""

    __slots__ = ("free", "kind")

    def __init__(self, kind: "_Kind") -> None:
        self.kind = kind
        self.free = list(range(kind.per_slab))


class _Kind:
    """A kind at its end: `stride` bytes from unit to unit, `per_slab` units in a slab."""

    def __init__(self, kind: UnitKind, slab_bytes: int) -> None:
        self.kind = kind
        padded = _up(kind.nbytes, kind.align)
        per_slab = slab_bytes // padded
        # The stride has to divide the slab, or numbers and addresses would not be proportional.
        while per_slab and (slab_bytes % per_slab or slab_bytes // per_slab % kind.align):
            per_slab -= 1
        if not per_slab:
            raise ValueError(f"{kind.name}: units of {kind.nbytes} bytes need larger slabs")
        self.per_slab = per_slab
        self.stride = slab_bytes // per_slab
        self.open: list[int] = []  # Slabs with free units; some may not be this kind's any more.
        self.taken = 0


class _Side:
    """The slabs of one end, numbered from that end."""

    def __init__(self, kinds: Sequence[UnitKind], slab_bytes: int, capacity: int) -> None:
        self.slab_bytes = slab_bytes
        self.capacity = capacity
        self.kinds = {kind.name: _Kind(kind, slab_bytes) for kind in kinds}
        self.slabs: dict[int, _Slab] = {}
        self.holes: list[int] = []  # Free slabs inside the frontier; may name some outside.
        self.frontier = 0

    @property
    def span(self) -> int:
        return self.frontier * self.slab_bytes

    def take(self, name: str, limit: int) -> tuple[int, int] | None:
        """Return (slab, unit) of the free unit nearest to the end, in `limit` bytes; None if none."""
        kind = self.kinds[name]
        while kind.open and not self._is_open(kind, kind.open[0]):
            heapq.heappop(kind.open)  # Given back whole since.
        while self.holes and (self.holes[0] in self.slabs or self.holes[0] >= self.frontier):
            heapq.heappop(self.holes)
        if kind.open:
            number = kind.open[0]
        elif self.holes:
            number = self._start(heapq.heappop(self.holes), kind)
        elif self.span + self.slab_bytes <= limit and self.frontier < self.capacity:
            number = self._start(self.frontier, kind)
            self.frontier += 1
        else:
            return None
        kind.taken += 1
        unit = heapq.heappop(self.slabs[number].free)
        if not self.slabs[number].free:
            heapq.heappop(kind.open)
        return number, unit

    def give(self, name: str, number: int, unit: int) -> None:
        kind, slab = self.kinds[name], self.slabs.get(number)
        if slab is None or slab.kind is not kind or unit in slab.free:
            raise ValueError(f"unit {unit} of slab {number} is not one of {name!r} that is taken")
        kind.taken -= 1
        if not slab.free:
            heapq.heappush(kind.open, number)
        heapq.heappush(slab.free, unit)
        if len(slab.free) == kind.per_slab:
            del self.slabs[number]
            heapq.heappush(self.holes, number)
            while self.frontier and self.frontier - 1 not in self.slabs:
                self.frontier -= 1

    def _start(self, number: int, kind: _Kind) -> int:
        self.slabs[number] = _Slab(kind)
        heapq.heappush(kind.open, number)
        return number

    def _is_open(self, kind: _Kind, number: int) -> bool:
        slab = self.slabs.get(number)
        return slab is not None and slab.kind is kind and bool(slab.free)


class _KindRoom:
    """The free numbers of one kind, as a pool takes them."""

    def __init__(self, pool: "UnifiedPool", name: str) -> None:
        self._pool = pool
        self._name = name

    def take(self) -> int | None:
        """Return a free number, taken; None when there is none."""
        return self._pool.take(self._name)

    def give(self, number: int) -> None:
        """Take a number back."""
        self._pool.give(self._name, number)


class UnifiedPool:
    """`nbytes` of one memory, shared by kinds of units.

    A unit's number times its kind's stride is where it begins: `memory[offset(kind, number):]`. The
    numbers of a kind start at 0 and none is ever outside `[0, count(kind))`.
    """

    def __init__(self, nbytes: int, kinds: Sequence[UnitKind], slab_bytes: dict[End, int]) -> None:
        """`slab_bytes`: for each end that has kinds, a size that its largest unit fits into.

        Raises ValueError when names repeat, a unit does not fit into a slab, no slab fits, or `nbytes`
        is no multiple of `START_ALIGN`.
        """
        if len({kind.name for kind in kinds}) != len(kinds) or not kinds:
            raise ValueError("kinds need different names")
        if nbytes % START_ALIGN or any(kind.align > START_ALIGN for kind in kinds):
            raise ValueError(f"{nbytes} bytes, or an alignment, do not fit steps of {START_ALIGN}")
        self._sides: dict[End, _Side] = {}
        self._ends = {kind.name: kind.end for kind in kinds}
        self.nbytes = nbytes
        for end in End:
            slab = _up(slab_bytes.get(end, START_ALIGN), START_ALIGN)
            ours = [kind for kind in kinds if kind.end is end]
            self._sides[end] = _Side(ours, slab, nbytes // slab)
        if any(not self._sides[end].capacity for end in self._ends.values()):
            raise ValueError(f"{nbytes} bytes hold no slab")

    def take(self, name: str) -> int | None:
        """Return the number of a free unit, taken; None when there is no room."""
        end = self._ends[name]
        side, other = self._sides[end], self._other(end)
        found = side.take(name, self.nbytes - other.span)
        return None if found is None else self._number(side, name, *found)

    def give(self, name: str, number: int) -> None:
        """Take a unit back; ValueError, and nothing changes, when it is not taken."""
        side = self._sides[self._ends[name]]
        slab, unit = divmod(number, side.kinds[name].per_slab)
        side.give(name, self._counted(name, side, slab), unit)

    def stride(self, name: str) -> int:
        """Return the bytes from one unit of a kind to the next."""
        return self._sides[self._ends[name]].kinds[name].stride

    def count(self, name: str) -> int:
        """Return how many units there would be if the kind had the whole memory."""
        side = self._sides[self._ends[name]]
        return side.capacity * side.kinds[name].per_slab

    def base(self, name: str) -> int:
        """Return where unit 0 of a kind begins."""
        end = self._ends[name]
        side = self._sides[end]
        return 0 if end is End.LOW else self.nbytes - side.capacity * side.slab_bytes

    def offset(self, name: str, number: int) -> int:
        """Return where a unit begins."""
        return self.base(name) + number * self.stride(name)

    def space(self, name: str, memory: torch.Tensor) -> Space:
        """Return the units of a kind as the space of a pool, in `memory` (flat uint8, `nbytes`).

        Raises ValueError for memory of another size or alignment.
        """
        if memory.dtype != torch.uint8 or memory.shape != (self.nbytes,) or not _at(memory):
            raise ValueError(f"the memory must be {self.nbytes} flat bytes at a multiple of 16")
        room, base = _KindRoom(self, name), self.base(name)
        return Space(room, self.count(name), memory[base:], self.stride(name))

    def usage(self) -> Usage:
        """Return where the bytes are."""
        used, padding, spans = {}, 0, []
        for end in End:
            side = self._sides[end]
            spans.append(side.span)
            for name, kind in side.kinds.items():
                used[name] = kind.taken * kind.kind.nbytes
                padding += kind.taken * (kind.stride - kind.kind.nbytes)
        gap = self.nbytes - sum(spans)
        stranded = sum(spans) - sum(used.values()) - padding
        return Usage(self.nbytes, used, padding, gap, stranded, (spans[0], spans[1]))

    def _other(self, end: End) -> _Side:
        return self._sides[End.HIGH if end is End.LOW else End.LOW]

    def _number(self, side: _Side, name: str, slab: int, unit: int) -> int:
        return self._counted(name, side, slab) * side.kinds[name].per_slab + unit

    def _counted(self, name: str, side: _Side, slab: int) -> int:
        """Turn a slab's number from its end into one from the start of the memory, or back."""
        return slab if self._ends[name] is End.LOW else side.capacity - 1 - slab


def slab_for(kinds: Sequence[UnitKind], units: int = 1) -> int:
    """Return a slab size for kinds at one end: `units` of the largest, into which all others pack well.

    More units waste less on kinds of other sizes, and strand more when a slab is nearly empty.
    """
    largest = max(_up(kind.nbytes, kind.align) for kind in kinds)
    parts = [units * largest // _up(kind.nbytes, kind.align) for kind in kinds]
    step = lcm(START_ALIGN, *(part * kind.align for part, kind in zip(parts, kinds, strict=True)))
    return _up(units * largest, step)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _at(memory: torch.Tensor) -> bool:
    return memory.data_ptr() % 16 == 0
