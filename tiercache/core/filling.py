"""Bringing objects back from NVMe when they are asked for."""

from collections.abc import Iterator

from tiercache.core.books import Books
from tiercache.core.catalog import Item, Status
from tiercache.core.commands import Fill
from tiercache.errors import Fault
from tiercache.state import Extent, Record


class Filling:
    """The jobs from NVMe to the host tier."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._jobs: dict[int, list[tuple[Item, Extent]]] = {}

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for job in self._jobs.values():
            for item, _ in job:
                yield item

    def in_segments(self) -> Iterator[int]:
        """Yield each segment of the log once for every extent that a running job reads there."""
        for job in self._jobs.values():
            for _, extent in job:
                yield extent.segment

    def start(self, items: list[Item]) -> list[Item]:
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
            assert item.nvme is not None
            # In use before room is made for it: making room must not drop it.
            books.use(item)
            item.target = books.allocate(item.entry.shelf, item.nbytes).extent
            if item.target is None:
                books.let_go(item)
                continue
            books.log.started(item.nvme)
            books.log.touch(item.nvme.segment)
            coming.append(item)
            batch.append((item, item.nvme))
            nbytes += item.nbytes
            if nbytes >= books.limits.fill_batch_bytes_max:
                self._read(batch)
                batch, nbytes = [], 0
        if batch:
            self._read(batch)
        return coming

    def _read(self, batch: list[tuple[Item, Extent]]) -> None:
        job = self._books.next_job()
        self._jobs[job] = batch
        nbytes = sum(item.nbytes for item, _ in batch)
        self._books.nvme_pace.started(nbytes, self._books.protection.now)
        objects: list[tuple[Record, Extent, Extent]] = []
        for item, extent in batch:
            assert item.target is not None
            objects.append((item.record, extent, item.target))
        self._books.out.append(Fill(job, objects))

    def ended(self, job: int, faults: list[Fault | None]) -> list[Item]:
        """Take in the outcomes of one `Fill`; return its objects, those that failed included."""
        books = self._books
        batch = self._jobs.pop(job)
        assert len(batch) == len(faults)
        nbytes = sum(item.nbytes for item, _ in batch)
        given = 0 if any(faults) else nbytes
        books.nvme_pace.ended(nbytes, given, books.protection.now)
        for (item, extent), fault in zip(batch, faults, strict=True):
            books.log.finished(extent)
            if fault is None and item.status is Status.SEALED:
                item.host, item.target = item.target, None
                books.counters.add("nvme_read_bytes", amount=item.nbytes)
                books.catalog.update(item)
            elif fault is not None:
                if item.target is not None and item.status is Status.SEALED:
                    books.free(item, item.target)
                    item.target = None
                self.damaged(item, fault)
        items = [item for item, _ in batch]
        books.let_go_of(items)
        return items

    def damaged(self, item: Item, fault: Fault) -> None:
        """The NVMe copy cannot be read: it is never offered again, and a miss if it was the only one."""
        books = self._books
        books.counters.add("nvme_faults", fault.value)
        if fault in {Fault.DAMAGED, Fault.MISSING}:
            books.counters.add("damaged", "nvme")
        if item.nvme is not None:
            books.drop_stored(item)
