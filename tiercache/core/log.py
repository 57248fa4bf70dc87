"""Who has which bytes of the NVMe tier: append-only segments that are given back whole.

Bytes are written once and never moved: to make room, the segment used longest ago is dropped with all
that still lives in it. That is a cache's privilege, and keeps write amplification at 1.
"""

from collections import OrderedDict

from tiercache.core.catalog import Item
from tiercache.state import Extent


class Segment:
    """One segment file: what lives in it, and how many jobs are reading or writing there."""

    __slots__ = ("items", "jobs", "live_bytes", "number", "size", "used")

    def __init__(self, number: int, size: int, used: int = 0) -> None:
        self.number = number
        self.size = size
        self.used = used
        self.items: dict[Item, None] = {}
        self.live_bytes = 0
        self.jobs = 0


class Log:
    """Places objects in segments of `segment_bytes` (all there is, if that is less); a larger object has
    a segment of its own.

    Sizes are multiples of `alignment`. The sum of all segments stays within `capacity`.
    """

    def __init__(self, capacity: int, segment_bytes: int, alignment: int) -> None:
        self.capacity = capacity
        self._segment_bytes = min(segment_bytes, capacity // alignment * alignment)
        self._alignment = alignment
        self.segments: OrderedDict[int, Segment] = OrderedDict()  # Used longest ago first.
        self.segments_bytes = 0
        self._open: Segment | None = None
        self._next = 1
        self._adopted = False  # Before, numbers of segments that exist are not known.
        self._scanning = False

    def adopt(self, sizes: dict[int, int]) -> None:
        """Take over the segments of an earlier start; they are full as far as writing goes."""
        self._adopted = self._scanning = True
        for number, size in sorted(sizes.items()):
            self.segments[number] = Segment(number, size, used=size)
            self.segments_bytes += size
            self._next = max(self._next, number + 1)

    def scanned(self) -> None:
        """Everything that lives in adopted segments is known now; before that none may be dropped."""
        self._scanning = False

    def rounded(self, nbytes: int) -> int:
        """Return the space that an object of `nbytes` takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def place(self, nbytes: int) -> Extent | None:
        """Return room for an object at the end of the log; None when a segment must be dropped first,
        or earlier segments were not adopted yet.

        The segment counts one more running job, until `finished`.
        """
        if not self._adopted:
            return None
        size = self.rounded(nbytes)
        segment = self._open
        if segment is None or segment.used + size > segment.size:
            segment = self._begin(max(size, self._segment_bytes))
            if segment is None:
                return None
        extent = Extent(segment.number, segment.used, size)
        segment.used += size
        segment.jobs += 1
        if segment.used < segment.size:
            self._open = segment
        elif segment is self._open:
            self._open = None
        return extent

    def seal_open(self) -> None:
        """Write no more into the open segment: the device failed there."""
        self._open = None

    def keep(self, item: Item) -> None:
        """`item.nvme` is a place of this log now."""
        assert item.nvme is not None
        segment = self.segments[item.nvme.segment]
        segment.items[item] = None
        segment.live_bytes += item.nvme.size

    def drop(self, item: Item) -> None:
        """`item.nvme` is no longer used. The space comes back with its segment."""
        assert item.nvme is not None
        segment = self.segments[item.nvme.segment]
        del segment.items[item]
        segment.live_bytes -= item.nvme.size

    def started(self, extent: Extent) -> None:
        """A job reads at this place: the segment stays."""
        self.segments[extent.segment].jobs += 1

    def finished(self, extent: Extent) -> None:
        """A job at this place is over."""
        self.segments[extent.segment].jobs -= 1

    def touch(self, segment: int) -> None:
        """Something in this segment was used."""
        self.segments.move_to_end(segment)

    def empty(self) -> list[Segment]:
        """Return the segments in which nothing lives and no job runs."""
        if self._scanning:
            return []
        return [s for s in self.segments.values() if not (s.items or s.jobs)]

    def victim(self) -> Segment | None:
        """Return the segment to drop next: an empty one, else the one used longest ago; None when
        every segment is in use."""
        if self._scanning:
            return None
        idle = None
        for segment in self.segments.values():
            if segment.jobs or segment is self._open:
                continue
            if not segment.items:
                return segment
            idle = idle or segment
        if idle is None and self._open is not None and not self._open.jobs:
            return self._open  # The only one, and too full for what comes next.
        return idle

    def remove(self, segment: Segment) -> None:
        """Give a segment's space back. Its objects must have been dropped, and no job runs in it."""
        assert not segment.items
        assert not segment.jobs
        del self.segments[segment.number]
        self.segments_bytes -= segment.size
        if segment is self._open:
            self._open = None

    def _begin(self, size: int) -> Segment | None:
        if self.segments_bytes + size > self.capacity:
            return None
        segment = Segment(self._next, size)
        self._next += 1
        self.segments[segment.number] = segment
        self.segments_bytes += size
        return segment
