"""Who has which bytes of the NVMe tier: append-only segments that are given back whole.

Bytes are written once and never moved: to make room, the segment used longest ago is dropped with all
that still lives in it. That is a cache's privilege, and keeps write amplification at 1.
"""

from collections import OrderedDict
from math import inf
from typing import Final

from tiercache.core.catalog import Item
from tiercache.core.tenants import Tenant
from tiercache.state import Extent

RANKS: Final = 5


class Segment:
    """One segment file: what lives in it, and how many jobs are reading or writing there. `owner`: the
    tenant whose share it counts against, None for what nobody has a share of."""

    __slots__ = ("items", "jobs", "live_bytes", "number", "owner", "size", "used")

    def __init__(self, number: int, size: int, used: int = 0, owner: Tenant | None = None) -> None:
        self.number = number
        self.owner = owner
        self.size = size
        self.used = used
        self.items: dict[Item, None] = {}
        self.live_bytes = 0
        self.jobs = 0


class Log:
    """Places objects in segments of `segment_bytes` (all there is, if that is less); a larger object has
    a segment of its own.

    Sizes are multiples of `alignment`. The sum of all segments stays within `capacity`. A tenant with a
    share has segments of its own, whose sum stays within it.
    """

    def __init__(self, capacity: int, segment_bytes: int, alignment: int) -> None:
        self.capacity = capacity
        self._segment_bytes = min(segment_bytes, capacity // alignment * alignment)
        self._alignment = alignment
        self.segments: OrderedDict[int, Segment] = OrderedDict()  # Used longest ago first.
        self.segments_bytes = 0
        self._open: dict[Tenant | None, Segment] = {}
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
        for segment in self.segments.values():
            tenants = {item.entry.shelf.tenant for item in segment.items}
            owner = tenants.pop() if len(tenants) == 1 else None
            if segment.owner is None and owner is not None and owner.share.nvme < 1:
                segment.owner = owner
                owner.segments_bytes += segment.size

    def rounded(self, nbytes: int) -> int:
        """Return the space that an object of `nbytes` takes."""
        return -(-nbytes // self._alignment) * self._alignment

    def size_for(self, nbytes: int) -> int:
        """Return the size of a new segment for an object."""
        return max(self.rounded(nbytes), self._segment_bytes)

    def passes(self, owner: Tenant, nbytes: int) -> bool:
        """Return whether one more segment for an object would be more than the tenant's share."""
        return owner.segments_bytes + self.size_for(nbytes) > owner.allowed("nvme")

    def place(self, nbytes: int, owner: Tenant | None = None) -> Extent | None:
        """Return room for an object at the end of the log, among those of the same owner; None when a
        segment must be dropped first, or earlier segments were not adopted yet.

        The segment counts one more running job, until `finished`.
        """
        if not self._adopted:
            return None
        size = self.rounded(nbytes)
        segment = self._open.get(owner)
        if segment is None or segment.used + size > segment.size:
            segment = self._begin(nbytes, owner)
            if segment is None:
                return None
        extent = Extent(segment.number, segment.used, size)
        segment.used += size
        segment.jobs += 1
        if segment.used < segment.size:
            self._open[owner] = segment
        elif segment is self._open.get(owner):
            del self._open[owner]
        return extent

    def seal_open(self) -> None:
        """Write no more into the open segments: the device failed."""
        self._open.clear()

    def keep(self, item: Item) -> None:
        """`item.nvme` is a place of this log now."""
        assert item.nvme is not None
        segment = self.segments[item.nvme.segment]
        segment.items[item] = None
        segment.live_bytes += item.nvme.size
        tenant = item.entry.shelf.tenant
        if tenant is not None:
            tenant.taken["nvme"] += item.nvme.size

    def drop(self, item: Item) -> None:
        """`item.nvme` is no longer used. The space comes back with its segment."""
        assert item.nvme is not None
        segment = self.segments[item.nvme.segment]
        del segment.items[item]
        segment.live_bytes -= item.nvme.size
        tenant = item.entry.shelf.tenant
        if tenant is not None:
            tenant.taken["nvme"] -= item.nvme.size

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

    @property
    def is_idle(self) -> bool:
        """Whether no job runs anywhere, and all that lives in the log is known."""
        return not self._scanning and not any(s.jobs for s in self.segments.values())

    def victim(
        self, owner: Tenant | None = None, *, own_only: bool = False, anyones: bool = True
    ) -> Segment | None:
        """Return the segment to drop next; None when every one that may go is in use.

        An empty one, else the one used longest ago: of those without an owner, then of the owner's, then
        of those who have more than their share and, if `anyones`, of everybody's. `own_only`: the
        owner's only.
        """
        if self._scanning:
            return None
        open_now = set(self._open.values())
        found: Segment | None = None
        lowest = inf
        for segment in self.segments.values():
            if segment.jobs:
                continue
            rank = _rank(segment, owner, own_only=own_only, anyones=anyones)
            if segment in open_now:
                rank += RANKS  # Only when there is no other: it is too full for what comes next.
            if rank < lowest:
                found, lowest = segment, rank
                if not rank:
                    break
        return found

    def remove(self, segment: Segment) -> None:
        """Give a segment's space back. Its objects must have been dropped, and no job runs in it."""
        assert not segment.items
        assert not segment.jobs
        del self.segments[segment.number]
        self.segments_bytes -= segment.size
        if segment.owner is not None:
            segment.owner.segments_bytes -= segment.size
        for owner, opened in list(self._open.items()):
            if opened is segment:
                del self._open[owner]

    def _begin(self, nbytes: int, owner: Tenant | None) -> Segment | None:
        size = self.size_for(nbytes)
        if self.segments_bytes + size > self.capacity:
            return None
        if owner is not None:
            if self.passes(owner, nbytes):
                return None
            owner.segments_bytes += size
        segment = Segment(self._next, size, owner=owner)
        self._next += 1
        self.segments[segment.number] = segment
        self.segments_bytes += size
        return segment


def _rank(segment: Segment, owner: Tenant | None, *, own_only: bool, anyones: bool) -> float:
    """Return how soon a segment goes, the lowest first; infinity when it may not."""
    whose = segment.owner
    if own_only and whose is not owner:
        return inf
    if not segment.items:
        return 0
    if whose is None or whose.share.nvme >= 1:
        return 1
    if whose is owner:
        return 2
    if whose.segments_bytes > whose.allowed("nvme"):
        return 3
    return 4 if anyones else inf
