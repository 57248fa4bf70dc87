"""Moving what has earned it to NVMe, behind the scenes."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from tiercache.core.books import Books, Disk
from tiercache.core.catalog import Entry, Item, Status
from tiercache.core.commands import Reclaim, Remember, Store
from tiercache.core.log import Segment
from tiercache.core.policy.admission import Eager, SecondSight
from tiercache.core.policy.base import Admission
from tiercache.core.tenants import Tenant
from tiercache.core.worth import Worth
from tiercache.errors import Fault
from tiercache.state import Extent, Record


class WriteBack:
    """The queue to NVMe, and the jobs on it."""

    def __init__(self, books: Books) -> None:
        self._books = books
        limits = books.limits
        self._admission: Admission = Eager() if limits.eager else SecondSight()
        self._worth = Worth(books)
        self._queue: OrderedDict[Item, None] = OrderedDict()
        self._storing: dict[int, list[tuple[Item, Extent]]] = {}
        self._in_flight_bytes = 0
        self._turns: OrderedDict[Item, int] = OrderedDict()  # Of all pending items, ascending.
        self._turn = 0
        self._lost: list[int] = []  # Turns of items that will not be stored; whoever waits is told.
        self.paused_until: float | None = None

    def __len__(self) -> int:
        """Objects waiting or on their way to NVMe."""
        return len(self._turns)

    def is_storing(self, item: Item) -> bool:
        """Return whether the tier was told already to write the object."""
        return item.queued and item not in self._queue

    @property
    def lost(self) -> bool:
        """Whether `take_lost` has anything to say."""
        return bool(self._lost)

    def take_lost(self) -> list[int]:
        """Return the turns of objects that will not be stored, though they were pending, since the last
        call."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def turn(self) -> int:
        """The turn of the object that was queued last; turns ascend."""
        return self._turn

    def is_past(self, turn: int) -> bool:
        """Return whether everything queued up to that turn is stored or lost."""
        return not self._turns or next(iter(self._turns.values())) > turn

    def waiting(self, turn: int) -> int:
        """Return how many objects up to that turn are not stored yet."""
        return sum(1 for other in self._turns.values() if other <= turn)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for job in self._storing.values():
            for item, _ in job:
                yield item

    def in_segments(self) -> Iterator[int]:
        """Yield each segment of the log once for every extent that a running job uses there."""
        for job in self._storing.values():
            for _, extent in job:
                yield extent.segment

    def check(self) -> None:
        """Raise AssertionError if the queue does not add up."""
        in_flight = sum(extent.size for job in self._storing.values() for _, extent in job)
        assert in_flight == self._in_flight_bytes, "bytes in flight"
        pending = set(self._queue).union(*(dict(job) for job in self._storing.values()))
        assert pending == self._turns.keys(), "turns"
        assert list(self._turns.values()) == sorted(self._turns.values()), "turns ascend"
        assert all(item.queued for item in pending)
        assert all(item in pending for item in self._books.catalog if item.queued)
        assert not self._lost, "losses nobody heard of"

    # --- to NVMe

    def consider_all(self, entries: Iterable[Entry], way: int = 0) -> None:
        """Queue what is held at these entries in memory only and has earned more."""
        if self._books.disk < Disk.OPENING:
            return
        for entry in entries:
            if entry.host & ~entry.nvme:
                self.consider(entry, way)

    def consider(self, entry: Entry, way: int = 0) -> None:
        """Queue what is held at this entry in memory only, if the entry has earned it and a prefix that
        needs it could come back sooner than it is computed. `way`: the deepest boundary that is known to
        need its blocks."""
        if not entry.host & ~entry.nvme or self._books.disk < Disk.OPENING:
            return
        if self._admission.earned(self._books.sights.count(entry.shelf.digest, entry.digest)):
            expiry = self._books.protection.expiry
            for item in entry.items.values():
                if item.host is None or item.nvme is not None or item.queued:
                    continue
                if expiry.is_own(item):  # The disk would not know of its end.
                    continue
                if self._worth.pays(entry.shelf, self._needed_by(item, way)):
                    self._enqueue(item)
                elif not item.too_slow:  # Asked at every sight, counted once.
                    item.too_slow = True
                    self._books.counters.add("writeback_dropped", "slower_than_recompute")

    def _needed_by(self, item: Item, way: int) -> int:
        """Return the deepest boundary that is known to need an object: of a snapshot and of a partial
        block, its own."""
        layout = item.entry.shelf.layout
        snapshot = layout is not None and layout.part(item.slot.part).is_snapshot
        return item.end if snapshot or item.entry.base else max(item.end, way)

    def _enqueue(self, item: Item) -> None:
        if len(self) >= self._books.limits.write_back_objects_max:
            self._books.counters.add("writeback_dropped", "queue_full")
            return
        item.queued = True
        self._queue[item] = None
        self._turn += 1
        self._turns[item] = self._turn

    def pump(self, now: float) -> None:
        """Start as many writes as may run at once."""
        if self._books.disk < Disk.SCANNING:
            return
        if self._books.log.segments_bytes > self._books.log.capacity:
            self._trim()
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
                self._drop_queued(item, "gone")
                continue
            if books.log.rounded(item.nbytes) > books.log.capacity:
                self._drop_queued(item, "no_room")
                continue
            extent = self._place(item)
            if extent is None and self._is_hopeless(item):
                self._drop_queued(item, "quota")
                continue
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

    def _drop_queued(self, item: Item, why: str) -> None:
        item.queued = False
        self._lost.append(self._turns.pop(item))
        self._books.counters.add("writeback_dropped", why)

    def _remember(self, item: Item) -> None:
        shelf = item.entry.shelf
        if not shelf.remembered and shelf.label is not None and shelf.layout is not None:
            shelf.remembered = True
            self._books.out.append(Remember(shelf.label, shelf.layout))

    def _place(self, item: Item) -> Extent | None:
        log = self._books.log
        owner = _owner(item)
        while True:
            extent = log.place(item.nbytes, owner)
            if extent is not None:
                return extent
            own_only = owner is not None and log.passes(owner, item.nbytes)
            anyones = self._books.protection.tenants.overcommitted("nvme")
            victim = log.victim(owner, own_only=own_only, anyones=anyones)
            if victim is None:
                return None
            if own_only:
                self._books.counters.add("quota_evictions", "nvme", len(victim.items))
            self._drop_segment(victim)

    def _is_hopeless(self, item: Item) -> bool:
        """Return whether no job will ever make room for the object: others were promised it."""
        log = self._books.log
        owner = _owner(item)
        if owner is not None and log.size_for(item.nbytes) > owner.allowed("nvme"):
            return True
        return log.is_idle and not self._in_flight_bytes

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
            turn = self._turns.pop(item)
            self._in_flight_bytes -= extent.size
            self._books.log.finished(extent)
            if fault is None:
                self._stored_one(item, extent)
            else:
                self._failed_one(item, extent, fault, now)
                self._lost.append(turn)
        items = [item for item, _ in batch]
        self._books.let_go_of(items)
        return items

    def _stored_one(self, item: Item, extent: Extent) -> None:
        books = self._books
        books.counters.add("writeback_bytes", amount=extent.size)
        if item.status is Status.SEALED:
            item.nvme = extent
            books.log.keep(item)
            books.catalog.update(item)
        else:
            self._unlist(item)  # It was dropped while it was being written.

    def _unlist(self, item: Item) -> None:
        """What the index says of the key must go, unless the same key is there anew or on its way."""
        books = self._books
        key = item.key
        shelf = books.catalog.shelves.get(key.namespace)
        slot = shelf.slots.get((key.part, key.shard, key.codec)) if shelf is not None else None
        again = books.catalog.find(shelf, slot, key.digest) if shelf and slot else None
        if again is None or (again.nvme is None and not self.is_storing(again)):
            books.forget([key])

    def _failed_one(self, item: Item, extent: Extent, fault: Fault, now: float) -> None:
        books = self._books
        self._unlist(item)  # An earlier start may have stored it too.
        books.counters.add("nvme_faults", fault.value)
        books.counters.add("writeback_dropped", "no_space" if fault is Fault.NO_SPACE else "io")
        books.log.seal_open()
        segment = books.log.segments[extent.segment]
        if not segment.items and not segment.jobs:
            books.log.remove(segment)
            books.out.append(Reclaim([segment.number], []))
        self.paused_until = now + books.limits.nvme_pause_s

    def drop_oldest(self) -> bool:
        """Drop the segment used longest ago; False when every one is in use."""
        victim = self._books.log.victim()
        if victim is not None:
            self._drop_segment(victim)
        return victim is not None

    def sweep(self) -> None:
        """Give back the space of segments in which nothing lives any more."""
        for segment in self._books.log.empty():
            self._books.log.remove(segment)
            self._books.out.append(Reclaim([segment.number], []))

    def give_up(self) -> None:
        """The tier failed as a whole: nothing more is written, and what waits for it is told."""
        for item in self._queue:
            self._drop_queued(item, "io")
        self._queue.clear()

    def _trim(self) -> None:
        """Drop segments until the log is within its capacity: it may have been lowered."""
        log = self._books.log
        while log.segments_bytes > log.capacity and self.drop_oldest():
            pass

    def wakeup(self) -> float | None:
        """Return when a pause ends that something waits for."""
        return self.paused_until if self._queue else None


def _owner(item: Item) -> Tenant | None:
    """Return the tenant against whose share of the disk an object counts."""
    tenant = item.entry.shelf.tenant
    return tenant if tenant is not None and tenant.share.nvme < 1 else None
