"""Moving what has earned it to NVMe, behind the scenes, and back when it is asked for."""

from collections import OrderedDict
from collections.abc import Iterator

from tiercache.core.books import Books
from tiercache.core.catalog import Entry, Item, Status
from tiercache.core.commands import Fill, Reclaim, Remember, Store
from tiercache.core.log import Segment
from tiercache.core.policy.admission import Eager, SecondSight
from tiercache.core.policy.base import Admission
from tiercache.errors import Fault
from tiercache.state import Extent, Record


class WriteBack:
    """The queue to NVMe, the jobs on it, and the jobs from it."""

    def __init__(self, books: Books) -> None:
        self._books = books
        limits = books.limits
        self._admission: Admission = Eager() if limits.eager else SecondSight()
        self._queue: OrderedDict[Item, None] = OrderedDict()
        self._storing: dict[int, list[tuple[Item, Extent]]] = {}
        self._filling: dict[int, list[tuple[Item, Extent]]] = {}
        self._in_flight_bytes = 0
        self.paused_until: float | None = None

    def __len__(self) -> int:
        """Objects waiting or on their way to NVMe."""
        return len(self._queue) + sum(len(job) for job in self._storing.values())

    def pending(self) -> set[Item]:
        """Return the objects waiting or on their way to NVMe."""
        storing = {item for job in self._storing.values() for item, _ in job}
        return storing.union(self._queue)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for job in (*self._storing.values(), *self._filling.values()):
            for item, _ in job:
                yield item

    # --- to NVMe

    def consider_all(self, entries: list[Entry]) -> None:
        """Queue what is held at these entries in memory only and has earned more."""
        for entry in entries:
            if entry.host & ~entry.nvme:
                self.consider(entry)

    def consider(self, entry: Entry) -> None:
        """Queue what is held at this entry in memory only, if the entry has earned it."""
        if not entry.host & ~entry.nvme or self._books.limits.nvme_bytes == 0:
            return
        if self._admission.earned(self._books.sights.count(entry.shelf.digest, entry.digest)):
            for item in entry.items.values():
                if item.host is not None and item.nvme is None and not item.queued:
                    self._enqueue(item)

    def _enqueue(self, item: Item) -> None:
        if item.status is not Status.SEALED:
            return
        if len(self) >= self._books.limits.write_back_objects_max:
            self._books.counters.add("writeback_dropped", "queue_full")
            return
        item.queued = True
        self._queue[item] = None

    def pump(self, now: float) -> None:
        """Start as many writes as may run at once."""
        if self.paused_until is not None and now < self.paused_until:
            return
        self.paused_until = None
        limit = self._books.limits.write_back_in_flight_bytes_max
        while self._queue and self._in_flight_bytes < limit:
            if not self._start_batch():
                return

    def _start_batch(self) -> bool:
        books = self._books
        batch: list[tuple[Item, Extent]] = []
        nbytes = 0
        while self._queue and nbytes < books.limits.write_back_batch_bytes_max:
            item = next(iter(self._queue))
            del self._queue[item]
            if item.status is not Status.SEALED or item.host is None:
                item.queued = False
                books.counters.add("writeback_dropped", "gone")
                continue
            if books.log.rounded(item.nbytes) > books.log.capacity:
                item.queued = False
                books.counters.add("writeback_dropped", "no_room")
                continue
            extent = self._place(item)
            if extent is None:  # Every segment is in use: the jobs there end, and pump again.
                self._queue[item] = None
                self._queue.move_to_end(item, last=False)
                break
            batch.append((item, extent))
            nbytes += extent.size
        if not batch:
            return False
        job = books.next_job()
        self._storing[job] = batch
        self._in_flight_bytes += nbytes
        objects: list[tuple[Record, Extent, Extent]] = []
        for item, extent in batch:
            books.use(item)
            assert item.host is not None
            objects.append((item.record, item.host, extent))
            self._remember(item)
        books.out.append(Store(job, objects))
        return True

    def _remember(self, item: Item) -> None:
        shelf = item.entry.shelf
        if not shelf.remembered and shelf.label is not None and shelf.layout is not None:
            shelf.remembered = True
            self._books.out.append(Remember(shelf.label, shelf.layout))

    def _place(self, item: Item) -> Extent | None:
        log = self._books.log
        while True:
            extent = log.place(item.nbytes)
            if extent is not None:
                return extent
            victim = log.victim()
            if victim is None:
                return None
            self._drop_segment(victim)

    def _drop_segment(self, victim: Segment) -> None:
        books = self._books
        keys = [item.key for item in victim.items]
        for item in list(victim.items):
            books.counters.add("evictions", "nvme")
            books.counters.add("evicted_bytes", "nvme", item.nbytes)
            books.drop_nvme(item)
        books.log.remove(victim)
        books.out.append(Reclaim([victim.number], keys))

    def stored(self, job: int, faults: list[Fault | None], now: float) -> list[Item]:
        """Take in the outcomes of one `Store`; return its objects."""
        batch = self._storing.pop(job)
        assert len(batch) == len(faults)
        for (item, extent), fault in zip(batch, faults, strict=True):
            item.queued = False
            self._in_flight_bytes -= extent.size
            self._books.log.finished(extent)
            if fault is None:
                self._stored_one(item, extent)
            else:
                self._failed_one(extent, fault, now)
            self._books.let_go(item)
        return [item for item, _ in batch]

    def _stored_one(self, item: Item, extent: Extent) -> None:
        books = self._books
        books.counters.add("writeback_bytes", amount=extent.size)
        if item.status is Status.SEALED:
            item.nvme = extent
            books.log.keep(item)
            books.catalog.update(item)
            return
        # It was dropped while it was being written: what the index says of it must go, unless the
        # same key is there anew.
        key = item.key
        shelf = books.catalog.shelves.get(key.namespace)
        slot = shelf.slots.get((key.part, key.shard, key.codec)) if shelf is not None else None
        again = books.catalog.find(shelf, slot, key.digest) if shelf and slot else None
        if again is None or (again.nvme is None and not again.queued):
            books.forget([key])

    def _failed_one(self, extent: Extent, fault: Fault, now: float) -> None:
        books = self._books
        books.counters.add("nvme_faults", fault.value)
        books.counters.add("writeback_dropped", "no_space" if fault is Fault.NO_SPACE else "io")
        books.log.seal_open()
        segment = books.log.segments[extent.segment]
        if not segment.items and not segment.jobs:
            books.log.remove(segment)
            books.out.append(Reclaim([segment.number], []))
        self.paused_until = now + books.limits.nvme_pause_s

    # --- from NVMe

    def fill(self, items: list[Item]) -> list[Item]:
        """Start bringing objects back to the host tier; return those that are on their way.

        One already on its way is not read twice. One that finds no room is left out.
        """
        books = self._books
        coming: list[Item] = []
        batch: list[tuple[Item, Extent]] = []
        nbytes = 0
        for item in items:
            if item.target is not None:
                coming.append(item)
                continue
            if item.nvme is None:
                continue
            # In use before room is made for it: making room must not drop it.
            books.use(item)
            item.target = books.allocate(item.nbytes)
            if item.target is None:
                books.let_go(item)
                continue
            books.log.started(item.nvme)
            books.log.touch(item.nvme.segment)
            coming.append(item)
            batch.append((item, item.nvme))
            nbytes += item.nbytes
            if nbytes >= books.limits.fill_batch_bytes_max:
                self._start_fill(batch)
                batch, nbytes = [], 0
        if batch:
            self._start_fill(batch)
        return coming

    def _start_fill(self, batch: list[tuple[Item, Extent]]) -> None:
        job = self._books.next_job()
        self._filling[job] = batch
        objects: list[tuple[Record, Extent, Extent]] = []
        for item, extent in batch:
            assert item.target is not None
            objects.append((item.record, extent, item.target))
        self._books.out.append(Fill(job, objects))

    def filled(self, job: int, faults: list[Fault | None]) -> list[Item]:
        """Take in the outcomes of one `Fill`; return its objects, those that failed included."""
        books = self._books
        batch = self._filling.pop(job)
        assert len(batch) == len(faults)
        for (item, extent), fault in zip(batch, faults, strict=True):
            books.log.finished(extent)
            if fault is None and item.status is Status.SEALED:
                item.host, item.target = item.target, None
                books.counters.add("nvme_read_bytes", amount=item.nbytes)
                books.catalog.update(item)
            elif fault is not None:
                self.damaged(item, fault)
            books.let_go(item)
        return [item for item, _ in batch]

    def damaged(self, item: Item, fault: Fault) -> None:
        """The NVMe copy cannot be read: it is never offered again, and a miss if it was the only one."""
        books = self._books
        books.counters.add("nvme_faults", fault.value)
        if fault in {Fault.DAMAGED, Fault.MISSING}:
            books.counters.add("damaged", "nvme")
        if item.target is not None and item.status is not Status.DOOMED:
            books.space.free(item.target)
            item.target = None
        if item.nvme is not None:
            self.drop(item)

    def drop(self, item: Item) -> None:
        """Give up the NVMe copy of an object, in the index too."""
        self._books.forget([item.key])
        self._books.drop_nvme(item)

    def trim(self) -> None:
        """Drop segments until the log is within its capacity: it may have been lowered."""
        log = self._books.log
        while log.segments_bytes > log.capacity:
            victim = log.victim()
            if victim is None:
                return
            self._drop_segment(victim)

    def wakeup(self) -> float | None:
        """Return when a pause ends that something waits for."""
        return self.paused_until if self._queue else None
