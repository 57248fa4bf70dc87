"""The NVMe tier: bytes in segment files, what is where in a small index beside them.

Bytes first, then the index entry: what the index names is there. Only the death of the process is
survived in every case; after a loss of power the checksums find what did not reach the disk.
"""

import logging
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from tiercache.errors import ConfigError, Fault, LayoutError, StorageFault
from tiercache.state import Extent, Key, Label, Layout
from tiercache.tiers import crash
from tiercache.tiers.base import ALIGNMENT, Found, Read, Write
from tiercache.tiers.direct import Moved, storage_fault
from tiercache.tiers.directory import Directory
from tiercache.tiers.nvme_entry import (
    NAMESPACES,
    OBJECTS,
    Remembered,
    decode_entry,
    encode_entry,
    object_key,
)
from tiercache.tiers.nvme_index import Index
from tiercache.tiers.segments import Segments

RUN_BYTES_MAX = 8 << 20
"""Neighbours are moved in one call up to this size."""

INDEX_SHARE = 32
"""One part in this many of the cap is the index's: enough for objects of 16 KiB on average."""

INDEX_BYTES_MIN = 4 << 20
ENTRY_BYTES_MAX = 512
"""What one entry takes in the index, at most and roughly: it decides how often to look."""

HEADROOM_BYTES_MAX = 64 << 20
"""Left free on the filesystem when a segment is made, so that the index can go on."""

_log = logging.getLogger(__name__)


def index_reserve_bytes(cap_bytes: int) -> int:
    """Return how much of `cap_bytes` is kept for the index; segments may take the rest."""
    return max(cap_bytes // INDEX_SHARE, INDEX_BYTES_MIN)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start met in the directory; counts of this start so far.

    `dropped` entries named a place that cannot exist, or could not be read; `orphans` are segment
    files that no entry named, deleted; `rebuilt`: the index was damaged and built anew.
    """

    dropped: int
    orphans: int
    rebuilt: bool


class NvmeTier:
    """A `Tier` on a directory of a local disk, which it owns.

    `segment_bytes` is the size of a new segment file; one object larger than that has its own. The
    directory stays within `cap_bytes` when segments take at most `cap_bytes` less
    `index_reserve_bytes(cap_bytes)`: the caller counts them. When small objects fill the share of
    the index, writes fail with NO_SPACE until objects are forgotten. `sync` makes writes durable
    against loss of power. Never fork after construction. Raises ConfigError when the directory
    cannot be had, StorageFault when the device fails.
    """

    def __init__(
        self, path: Path, *, cap_bytes: int, segment_bytes: int, sync: bool = False
    ) -> None:
        reserve = index_reserve_bytes(cap_bytes)
        if segment_bytes % ALIGNMENT or not 0 < segment_bytes <= cap_bytes - reserve:
            raise ConfigError(
                f"nvme.cap_bytes {cap_bytes} leaves {cap_bytes - reserve} bytes beside the index: "
                f"nvme.segment_bytes {segment_bytes} must be a multiple of {ALIGNMENT} and fit"
            )
        self.name = "nvme"
        self._sync = sync
        self._reserve = reserve
        with ExitStack() as undo:
            self._directory = Directory(path)
            undo.callback(self._directory.close)
            crash.reach("nvme.owned")
            self._index = Index(self._directory.index, reserve, sync=sync)
            undo.callback(self._index.close)
            headroom = min(reserve, HEADROOM_BYTES_MAX)
            self._segments = Segments(self._directory.segments, segment_bytes, headroom)
            undo.pop_all()
        # Tells what was stored before this start. Drawn, not counted: a full disk keeps no count.
        self._start_mark = secrets.randbits(32)
        self._written_since_look = 0
        self._forgotten_since_compaction = 0
        self._full: StorageFault | None = None
        self._counts_lock = threading.Lock()
        self._dropped = 0
        self._orphans = 0

    @property
    def recovery(self) -> Recovery:
        """What this start has met so far; complete when `scan` has ended."""
        with self._counts_lock:
            return Recovery(self._dropped, self._orphans, self._index.rebuilt)

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        full = self._index_full(len(batch))
        if full is not None:
            return [full] * len(batch)
        crash.reach("nvme.before_write")
        outcomes: list[StorageFault | None] = []
        for run in _runs([write.extent for write in batch]):
            outcomes += self._write_run(batch[run])
        if self._sync:
            self._sync_written(batch, outcomes)
        crash.reach("nvme.after_write_before_index")
        stored = [write for write, fault in zip(batch, outcomes, strict=True) if fault is None]
        try:
            self._index.write(
                encode_entry(record, extent, self._start_mark) for record, extent, _ in stored
            )
        except StorageFault as fault:
            return [outcome or fault for outcome in outcomes]
        crash.reach("nvme.after_index")
        return outcomes

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """See `Tier.read`. Asks the disk only, never the index."""
        outcomes: list[StorageFault | None] = []
        for run in _runs([read.extent for read in batch]):
            outcomes += self._read_run(batch[run])
        return outcomes

    def forget(self, keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.forget`."""
        deletes = [object_key(key) for key in keys]
        if not deletes:
            return None
        self._forgotten_since_compaction += len(deletes)
        try:
            self._index.write((), deletes)
        except StorageFault as fault:
            return fault
        crash.reach("nvme.after_forget")
        return None

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.reclaim`. On a full disk the space comes first: the index needs some itself."""
        keys = list(keys)
        fault = self.forget(keys)
        if fault is not None and fault.fault is not Fault.NO_SPACE:
            return fault
        crash.reach("nvme.mid_reclaim_after_forget")
        try:
            for segment in segments:
                self._segments.remove(segment)
                crash.reach("nvme.mid_reclaim_after_remove")
        except StorageFault as problem:
            return problem
        return self.forget(keys) if fault is not None else None

    def remember(self, label: Label, layout: Layout) -> StorageFault | None:
        """See `Tier.remember`."""
        value = msgspec.msgpack.encode(Remembered(label, layout))
        try:
            self._index.write([(NAMESPACES + label.digest, value)])
        except StorageFault as fault:
            return fault
        crash.reach("nvme.after_remember")
        return None

    def namespaces(self) -> list[tuple[Label, Layout]]:
        """See `Tier.namespaces`. Leaves out what another version's layout cannot be read as."""
        found = []
        for key, value in self._pages(NAMESPACES, 256):
            try:
                kept = msgspec.msgpack.decode(value, type=Remembered)
            except (msgspec.DecodeError, LayoutError) as error:
                _log.warning("a namespace of the index cannot be read: %s", error)
                continue
            if NAMESPACES + kept.label.digest == key:
                found.append((kept.label, kept.layout))
        return found

    def scan(self, batch: int) -> Iterator[list[Found]]:
        """See `Tier.scan`. May run beside every other call; deletes orphan segments at its end.

        Raises StorageFault when the index cannot be read.
        """
        named: set[int] = set()
        after = b""
        while page := self._index.page(OBJECTS, after, batch):
            after = page[-1][0]
            found, lost = self._sort(page)
            named.update(each.extent.segment for each in found)
            if lost:
                self._index.discard(lost)
                with self._counts_lock:
                    self._dropped += len(lost)
            crash.reach("nvme.mid_scan")
            if found:
                yield found
        for segment in self._segments.inherited().keys() - named:
            if self._segments.remove_orphan(segment):
                with self._counts_lock:
                    self._orphans += 1
                crash.reach("nvme.after_orphan_removed")

    def segment_bytes(self) -> dict[int, int]:
        """See `Tier.segment_bytes`. Orphans count until `scan` has ended."""
        return self._segments.sizes()

    def used_bytes(self) -> int:
        """See `Tier.used_bytes`. Like `du`: index, preallocated space and folders included."""
        return self._directory.used_bytes()

    def close(self) -> None:
        """See `Tier.close`."""
        self._segments.close()
        self._index.close()
        self._directory.close()

    def _sort(
        self, page: list[tuple[bytes, bytes]]
    ) -> tuple[list[Found], list[tuple[bytes, bytes]]]:
        """Part the entries of earlier starts into those that can be there and the lost ones."""
        sizes = self._segments.inherited()
        found, lost = [], []
        for key, value in page:
            entry = decode_entry(key, value)
            if entry is None:
                lost.append((key, value))
                continue
            start_mark, object_found = entry
            if start_mark == self._start_mark:
                continue
            extent = object_found.extent
            if extent.offset + extent.size <= sizes.get(extent.segment, 0):
                found.append(object_found)
            else:
                lost.append((key, value))
        return found, lost

    def _pages(self, prefix: bytes, count: int) -> Iterator[tuple[bytes, bytes]]:
        after = b""
        while page := self._index.page(prefix, after, count):
            after = page[-1][0]
            yield from page

    def _write_run(self, run: Sequence[Write]) -> list[StorageFault | None]:
        first, last = run[0].extent, run[-1].extent
        try:
            with self._segments.writing(first.segment, last.offset + last.size) as file:
                moved = file.write(first.offset, [write.source for write in run])
        except StorageFault as fault:
            return [fault] * len(run)
        return _reached(first.segment, [write.extent for write in run], moved)

    def _read_run(self, run: Sequence[Read]) -> list[StorageFault | None]:
        first = run[0].extent
        try:
            with self._segments.reading(first.segment) as file:
                moved = file.read(first.offset, [read.target for read in run])
        except StorageFault as fault:
            return [fault] * len(run)
        outcomes = _reached(first.segment, [read.extent for read in run], moved)
        return [fault or _check(read) for read, fault in zip(run, outcomes, strict=True)]

    def _sync_written(self, batch: Sequence[Write], outcomes: list[StorageFault | None]) -> None:
        """A failed sync fails every object of its segment: nobody can say which bytes are there."""
        failed: dict[int, StorageFault] = {}
        for segment in {write.extent.segment for write in batch}:
            try:
                with self._segments.reading(segment) as file:
                    try:
                        file.sync()
                    except OSError as error:
                        raise storage_fault(error, f"segment {segment}") from error
                self._segments.sync_folder()
            except StorageFault as fault:
                failed[segment] = fault
        for at, write in enumerate(batch):
            outcomes[at] = outcomes[at] or failed.get(write.extent.segment)

    def _index_full(self, entries: int) -> StorageFault | None:
        """Half of the index's share may be in use; compaction needs the other half for moments."""
        self._written_since_look += entries
        if self._full is None and self._written_since_look * ENTRY_BYTES_MAX < self._reserve // 16:
            return None
        self._written_since_look = 0
        self._full = None
        forgotten = self._forgotten_since_compaction * ENTRY_BYTES_MAX
        try:
            used = self._directory.index_bytes()
            if used > self._reserve // 2 and forgotten > self._reserve // 16:
                self._forgotten_since_compaction = 0
                self._index.compact()
                used = self._directory.index_bytes()
        except StorageFault as fault:
            return fault
        if used > self._reserve // 2:
            self._full = StorageFault(
                Fault.NO_SPACE,
                f"the index takes {used} bytes, and its share of the cap is {self._reserve}: "
                f"the objects are small and many",
            )
        return self._full


def _runs(extents: Sequence[Extent]) -> Iterator[slice]:
    """Yield slices of neighbours in one segment, none much larger than `RUN_BYTES_MAX`."""
    start = nbytes = 0
    for at, extent in enumerate(extents):
        before = extents[at - 1] if at > start else None
        if before is not None and (
            extent.segment != before.segment
            or extent.offset != before.offset + before.size
            or nbytes + extent.size > RUN_BYTES_MAX
        ):
            yield slice(start, at)
            start, nbytes = at, 0
        nbytes += extent.size
    if extents:
        yield slice(start, len(extents))


def _reached(segment: int, extents: Sequence[Extent], moved: Moved) -> list[StorageFault | None]:
    """Return which of neighbouring extents a transfer has moved in full."""
    if moved.error is None:
        fault = StorageFault(Fault.DAMAGED, f"segment {segment} is cut short")
    else:
        fault = storage_fault(moved.error, f"segment {segment}")
    end = extents[0].offset + moved.nbytes
    return [None if extent.offset + extent.size <= end else fault for extent in extents]


def _check(read: Read) -> StorageFault | None:
    record = read.record
    if xxhash.xxh3_128_digest(read.target[: record.nbytes]) == record.checksum:
        return None
    return StorageFault(Fault.DAMAGED, f"{record.key} at {read.extent}")
