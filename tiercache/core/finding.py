"""What an earlier start left on NVMe: taken in while clients are served already."""

from tiercache.core import events as ev
from tiercache.core.books import Books, Disk
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.operation import Operation
from tiercache.core.writeback import WriteBack
from tiercache.errors import Fault
from tiercache.state import Extent, Key, Label, Layout, Record


class Finding:
    """Takes in segments, namespaces and objects, unless they were cleared or stored anew meanwhile."""

    def __init__(self, books: Books, writeback: WriteBack, operation: Operation) -> None:
        self._books = books
        self._writeback = writeback
        self._operation = operation
        self._earlier: frozenset[int] = frozenset()  # Segments of earlier starts.

    def take(
        self, event: ev.NvmeOpened | ev.Found | ev.ScanEnded | ev.NvmeFailed | ev.TierFailed
    ) -> None:
        """Take in what the tier says of itself."""
        match event:
            case ev.NvmeOpened(segments, namespaces):
                self._opened(segments, namespaces)
            case ev.Found(objects):
                self._found(objects)
            case ev.ScanEnded():
                self._ended()
            case ev.NvmeFailed(fault):
                self._failed(fault)
            case ev.TierFailed(fault):
                self._books.counters.add("nvme_faults", fault.value)
                self._operation.faltered(for_good=False)

    def _opened(self, segments: dict[int, int], namespaces: list[tuple[Label, Layout]]) -> None:
        """The tier is there: it may be written from now on."""
        books = self._books
        books.disk = Disk.SCANNING
        books.log.adopt(segments)
        self._earlier = frozenset(segments)
        for label, layout in namespaces:
            shelf = books.catalog.shelves.setdefault(
                label.digest, Shelf(label.digest, label, layout)
            )
            shelf.remembered = True
            books.named(shelf)

    def _found(self, objects: list[tuple[Record, Extent]]) -> None:
        """These were stored before this start."""
        stale: list[Key] = []
        for record, extent in objects:
            shelf = self._shelf(record.key)
            present = self._present(shelf, record.key)
            if present is not None:
                if present.nvme is None and not self._writeback.is_storing(present):
                    stale.append(record.key)  # Saved anew, not stored yet: only that one counts.
            elif self._can_be(shelf, record, extent):
                self._adopt(shelf, record, extent)
            else:
                stale.append(record.key)
        self._books.forget(stale)

    def _ended(self) -> None:
        """All of it was found."""
        self._books.disk = Disk.READY
        self._books.log.scanned()
        self._operation.scanned()

    def _failed(self, fault: Fault) -> None:
        """The tier cannot be used any more, except for reading what was found."""
        books = self._books
        books.disk = Disk.FAILED
        books.counters.add("nvme_faults", fault.value)
        self._writeback.give_up()
        self._operation.faltered(for_good=True)

    def _shelf(self, key: Key) -> Shelf:
        shelves = self._books.catalog.shelves
        shelf = shelves.get(key.namespace)
        if shelf is None:
            shelf = shelves[key.namespace] = Shelf(key.namespace, None, None)
        return shelf

    def _present(self, shelf: Shelf, key: Key) -> Item | None:
        slot = shelf.slots.get((key.part, key.shard, key.codec))
        return None if slot is None else self._books.catalog.find(shelf, slot, key.digest)

    def _can_be(self, shelf: Shelf, record: Record, extent: Extent) -> bool:
        """Return whether an index entry is believed. Its bytes are checked whenever they are read."""
        entry = shelf.entries.get(record.key.digest)
        return (
            extent.segment in self._earlier
            and extent.segment in self._books.log.segments
            and 0 < record.nbytes <= extent.size
            and len(self._books.catalog.items) < self._books.limits.objects_max
            and (entry is None or entry.agrees(record.end, record.base))
            and not self._operation.was_cleared(record.key)
        )

    def _adopt(self, shelf: Shelf, record: Record, extent: Extent) -> None:
        books = self._books
        key = record.key
        slot = shelf.slot(key.part, key.shard, key.codec)
        where = ev.Tail(record.end, key.digest, record.base)
        item = books.catalog.create(shelf, slot, where, (record.start, record.end))
        item.nbytes, item.checksum = record.nbytes, record.checksum
        item.writer, item.sealed_at = record.writer, record.sealed_at
        item.parent, item.requantised = record.parent, record.requantised
        item.nvme = extent
        item.status = Status.SEALED
        books.log.keep(item)
        books.catalog.update(item)
        if shelf.ttl_s:  # Nobody knows how old it is: its time begins anew.
            books.protection.expiry.begin(item, books.protection.now + shelf.ttl_s, own=False)
