"""A disk in memory that fails the way disks do. It outlives the node that uses it."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import xxhash

from tiercache.errors import Fault
from tiercache.state import Extent, Key, Label, Layout, Record


@dataclass(slots=True)
class Faults:
    """How likely each fault is, for each object or call; 0 means never."""

    no_space: float = 0.0
    write_io: float = 0.0
    lost_write: float = 0.0
    bit_flip: float = 0.0
    read_io: float = 0.0
    forget_io: float = 0.0


@dataclass(slots=True)
class Disk:
    """Segments, an index, and chance. `calm` switches every fault off."""

    rng: random.Random
    faults: Faults
    segment_bytes: int
    segments: dict[int, bytearray] = field(default_factory=dict)
    index: dict[Key, tuple[Record, Extent]] = field(default_factory=dict)
    labels: dict[bytes, tuple[Label, Layout]] = field(default_factory=dict)
    calm: bool = False
    over_cap: bool = False  # By a fault, or since the cap was lowered.
    stale: bool = False  # Something was not forgotten.
    written_bytes: int = 0

    def hits(self, chance: float) -> bool:
        """Return whether a fault of that chance happens now."""
        return not self.calm and chance > 0 and self.rng.random() < chance

    def used_bytes(self) -> int:
        """Return what the segments take."""
        return sum(map(len, self.segments.values()))

    def write(self, record: Record, extent: Extent, source: bytes) -> Fault | None:
        """Store one object, then index it."""
        if self.hits(self.faults.no_space):
            return Fault.NO_SPACE
        if self.hits(self.faults.write_io):
            self._place(extent, source[: self.rng.randrange(len(source))])
            return Fault.IO
        lost = self.hits(self.faults.lost_write)
        self._place(extent, b"" if lost else source)
        if self.hits(self.faults.bit_flip):
            at = extent.offset + self.rng.randrange(record.nbytes)
            self.segments[extent.segment][at] ^= 1 << self.rng.randrange(8)
        self.index[record.key] = (record, extent)
        self.written_bytes += extent.size
        return None

    def tear(self, extent: Extent, source: bytes) -> None:
        """The node dies in the middle of a write: some bytes, and nothing in the index."""
        self._place(extent, source[: self.rng.randrange(len(source))])

    def read(self, record: Record, extent: Extent, target: memoryview) -> Fault | None:
        """Fill `target` and check it against the record."""
        if self.hits(self.faults.read_io):
            return self.rng.choice((Fault.IO, Fault.DAMAGED))
        segment = self.segments.get(extent.segment)
        if segment is None:
            return Fault.MISSING
        found = segment[extent.offset : extent.offset + extent.size]
        target[: len(found)] = found
        whole = xxhash.xxh3_128_digest(found[: record.nbytes]) == record.checksum
        return None if whole else Fault.DAMAGED

    def forget(self, keys: Iterable[Key]) -> Fault | None:
        """Make objects unfindable."""
        if self.hits(self.faults.forget_io):
            self.stale = True
            return Fault.IO
        for key in keys:
            self.index.pop(key, None)
        return None

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> Fault | None:
        """Forget `keys`, then give back segments."""
        fault = self.forget(keys)
        if fault is not None:
            self.over_cap = True
            return fault
        for number in segments:
            self.segments.pop(number, None)
        return None

    def remember(self, label: Label, layout: Layout) -> Fault | None:
        """Keep a namespace's name and layout."""
        self.labels[label.digest] = (label, layout)
        return None

    def found(self) -> list[tuple[Record, Extent]]:
        """Return what the index lists, as far as its place exists; forget the rest."""
        for key, (_, extent) in list(self.index.items()):
            if extent.offset + extent.size > len(self.segments.get(extent.segment, b"")):
                del self.index[key]
        return list(self.index.values())

    def _place(self, extent: Extent, content: bytes) -> None:
        segment = self.segments.get(extent.segment)
        if segment is None:
            size = max(self.segment_bytes, extent.offset + extent.size)
            segment = self.segments[extent.segment] = bytearray(size)
        segment[extent.offset : extent.offset + len(content)] = content
