"""Who has which bytes of the arena: an allocator that only counts.

Free runs are binned by size (two-level segregated fit, after Masmano et al., "TLSF", 2004) and merged
with their neighbours when they are freed, so space freed by small objects serves large ones and the
cost of a call does not grow with the number of objects.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from tiercache.state import Extent

_Run: TypeAlias = tuple[int, int]
_Runs: TypeAlias = OrderedDict[_Run, None]
"""Runs of one size. Ordered: the first one is found in O(1) whatever was removed before it."""

_SUB_BITS = 3  # Eight bins for each power of two: a run is at most an eighth larger than its bin.


class Space:
    """Free and taken runs of a number of segments. Sizes are bytes, rounded up to `alignment`."""

    def __init__(self, segments: Sequence[int], alignment: int) -> None:
        if alignment < 1 or any(size < alignment or size % alignment for size in segments):
            raise ValueError(f"segments must be positive multiples of {alignment}: {segments}")
        self._alignment = alignment
        self.capacity = sum(segments)
        self.free_bytes = self.capacity
        self.object_bytes_max = max(segments, default=0)
        self._size_at: dict[_Run, int] = {}  # First byte of a free run -> its size.
        self._start_of: dict[_Run, int] = {}  # One past its last byte -> its first.
        self._bins: dict[int, dict[int, _Runs]] = {}  # Bin -> size -> runs.
        self._filled = 0  # Bit per bin: it holds a run.
        for segment, size in enumerate(segments):
            self._insert(segment, 0, size)

    def rounded(self, nbytes: int) -> int:
        """Return the space that an object of `nbytes` takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def allocate(self, nbytes: int) -> Extent | None:
        """Take a run of at least `nbytes`; None when no free run is long enough."""
        size = self.rounded(nbytes)
        if nbytes < 1 or size > self.free_bytes:
            return None
        run = self._find(size)
        if run is None:
            return None
        segment, offset = run
        whole = self._remove(segment, offset)
        if whole > size:
            self._insert(segment, offset + size, whole - size)
        self.free_bytes -= size
        return Extent(segment, offset, size)

    def free(self, extent: Extent) -> None:
        """Give a run back. The caller guarantees that it was allocated and is freed once."""
        segment, start, size = extent.segment, extent.offset, extent.size
        stop = start + size
        if (segment, start) in self._size_at:
            raise AssertionError(f"{extent} is free already")
        self.free_bytes += size
        before = self._start_of.get((segment, start))
        if before is not None:
            self._remove(segment, before)
            start = before
        if (segment, stop) in self._size_at:
            stop += self._remove(segment, stop)
        self._insert(segment, start, stop - start)

    def largest_free(self) -> int:
        """Return the longest run that can be allocated now."""
        if not self._filled:
            return 0
        return max(self._bins[self._filled.bit_length() - 1])

    def free_runs(self) -> Iterator[Extent]:
        """Yield every free run, in no order."""
        for (segment, offset), size in self._size_at.items():
            yield Extent(segment, offset, size)

    def _find(self, size: int) -> _Run | None:
        own = self._bin(size)
        sizes = self._bins.get(own, {})
        if size in sizes:
            return next(iter(sizes[size]))
        above = self._filled >> (own + 1)
        if above:  # Any run of a higher bin is long enough: the lowest such bin wastes least.
            lowest = own + 1 + (above & -above).bit_length() - 1
            return next(iter(next(iter(self._bins[lowest].values()))))
        for found, runs in sizes.items():
            if found >= size:
                return next(iter(runs))
        return None

    def _bin(self, size: int) -> int:
        power = size.bit_length() - 1
        if power <= _SUB_BITS:
            return size
        return (power << _SUB_BITS) | ((size >> (power - _SUB_BITS)) & ((1 << _SUB_BITS) - 1))

    def _insert(self, segment: int, offset: int, size: int) -> None:
        run = (segment, offset)
        self._size_at[run] = size
        self._start_of[segment, offset + size] = offset
        number = self._bin(size)
        self._bins.setdefault(number, {}).setdefault(size, OrderedDict())[run] = None
        self._filled |= 1 << number

    def _remove(self, segment: int, offset: int) -> int:
        run = (segment, offset)
        size = self._size_at.pop(run)
        del self._start_of[segment, offset + size]
        number = self._bin(size)
        sizes = self._bins[number]
        runs = sizes[size]
        del runs[run]
        if not runs:
            del sizes[size]
            if not sizes:
                self._filled &= ~(1 << number)
        return size
