"""The reference arena and tier, in plain memory: what the others must behave like."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Extent, Key, Label, Layout, Record
from tiercache.tiers.base import Found, Read, Write


class MemoryArena:
    """An `Arena` of private memory: nobody else can address it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._memory = [memoryview(bytearray(size)) for size in sizes]

    @property
    def segments(self) -> Sequence[int]:
        """See `Arena.segments`."""
        return self._sizes

    def view(self, extent: Extent) -> memoryview:
        """See `Arena.view`."""
        assert extent.offset + extent.size <= self._sizes[extent.segment], extent
        return self._memory[extent.segment][extent.offset : extent.offset + extent.size]

    def close(self) -> None:
        """See `Arena.close`."""
        self._memory = []


@dataclass(slots=True)
class Store:
    """What outlives a `MemoryTier`: its disk. Tests damage it here, behind the tier's back."""

    segments: dict[int, bytearray] = field(default_factory=dict)
    objects: dict[Key, Found] = field(default_factory=dict)
    namespaces: dict[bytes, tuple[Label, Layout]] = field(default_factory=dict)


class MemoryTier:
    """A `Tier` in memory. It survives a "restart" by being made again on the same `store`."""

    def __init__(self, store: Store | None = None, *, segment_bytes: int = 0) -> None:
        self.name = "memory"
        self.store = store or Store()
        self._segment_bytes = segment_bytes
        self._before = dict(self.store.objects)

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        for record, extent, source in batch:
            assert len(source) == extent.size, extent
            end = extent.offset + extent.size
            segment = self.store.segments.get(extent.segment)
            if segment is None:
                segment = bytearray(max(self._segment_bytes, end))
                self.store.segments[extent.segment] = segment
            segment.extend(bytes(max(0, end - len(segment))))
            segment[extent.offset : end] = source
            self.store.objects[record.key] = Found(record, extent)
            self._before.pop(record.key, None)
        return [None] * len(batch)

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """See `Tier.read`."""
        return [self._read(*read) for read in batch]

    def forget(self, keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.forget`."""
        for key in keys:
            self.store.objects.pop(key, None)
            self._before.pop(key, None)
        return None

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.reclaim`."""
        self.forget(keys)
        for segment in segments:
            self.store.segments.pop(segment, None)
        return None

    def remember(self, label: Label, layout: Layout) -> StorageFault | None:
        """See `Tier.remember`."""
        self.store.namespaces[label.digest] = (label, layout)
        return None

    def namespaces(self) -> list[tuple[Label, Layout]]:
        """See `Tier.namespaces`."""
        return list(self.store.namespaces.values())

    def scan(self, batch: int) -> Iterator[list[Found]]:
        """See `Tier.scan`."""
        waiting = sorted(self._before.values(), key=lambda each: each.record.key.encode())
        for start in range(0, len(waiting), batch):
            found = []
            for each in waiting[start : start + batch]:
                if self._before.get(each.record.key) is not each:
                    continue
                if self._exists(each.extent):
                    found.append(each)
                else:
                    self.forget([each.record.key])
            if found:
                yield found

    def segment_bytes(self) -> dict[int, int]:
        """See `Tier.segment_bytes`."""
        return {number: len(segment) for number, segment in self.store.segments.items()}

    def used_bytes(self) -> int:
        """See `Tier.used_bytes`. Bytes of the segments; labels are not counted."""
        return sum(self.segment_bytes().values())

    def close(self) -> None:
        """See `Tier.close`."""

    def _exists(self, extent: Extent) -> bool:
        return extent.offset + extent.size <= len(self.store.segments.get(extent.segment, b""))

    def _read(self, record: Record, extent: Extent, target: memoryview) -> StorageFault | None:
        segment = self.store.segments.get(extent.segment)
        if segment is None:
            return StorageFault(Fault.MISSING, f"segment {extent.segment}")
        stored = segment[extent.offset : extent.offset + extent.size]
        target[: len(stored)] = stored
        whole = len(stored) == extent.size
        if whole and xxhash.xxh3_128_digest(target[: record.nbytes]) == record.checksum:
            return None
        return StorageFault(Fault.DAMAGED, f"{record.key} at {extent}")
