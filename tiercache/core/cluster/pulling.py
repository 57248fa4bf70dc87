"""Bringing objects from other nodes when they are asked for."""

from collections.abc import Iterable, Iterator, Sequence

from tiercache.core.books import Books
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.cluster.commands import Pull
from tiercache.core.cluster.peers import POOL, Peer
from tiercache.core.events import Tail
from tiercache.errors import Fault, LayoutError
from tiercache.state import NATIVE, Extent, Key, Layout, Record
from tiercache.state.care import NO_CARE


class Pulling:
    """The jobs from other nodes to the host tier."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._jobs: dict[int, tuple[Peer, list[Item]]] = {}

    def __len__(self) -> int:
        """Jobs under way."""
        return len(self._jobs)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for _, items in self._jobs.values():
            yield from items

    def start(self, shelf: Shelf, peer: Peer, records: Iterable[Record], now: float) -> list[Item]:
        """Start bringing these objects, which the caller has found to be what they should; return those
        that are on their way, from now on or already.

        What is held or on its way already is left out, and what finds no room. From now on they are on
        their way, and known as such.
        """
        books = self._books
        limits = books.limits.clustering
        coming: list[Item] = []
        batch: list[tuple[Record, Extent]] = []
        items: list[Item] = []
        nbytes = 0
        for record in records:
            already = _on_its_way(shelf, record.key)
            item = already or self._expect(shelf, record)
            if item is None:
                continue
            coming.append(item)
            if already:
                continue
            assert item.target is not None
            items.append(item)
            batch.append((record, item.target))
            nbytes += record.nbytes
            if nbytes >= limits.pull_batch_bytes_max:
                self._pull(peer, items, batch, now)
                items, batch, nbytes = [], [], 0
        if batch:
            self._pull(peer, items, batch, now)
        return coming

    def _expect(self, shelf: Shelf, record: Record) -> Item | None:
        books, key = self._books, record.key
        slot = shelf.slots.get((key.part, key.shard, key.codec))
        if slot is None:
            if len(shelf.slots) >= books.limits.slots_max:
                return None
            slot = shelf.slot(key.part, key.shard, key.codec)
        entry = shelf.entries.get(key.digest)
        if entry is not None and (
            slot.bit in entry.items or not entry.agrees(record.end, record.base)
        ):
            return None
        if (
            len(self._jobs) >= books.limits.clustering.pulls_max
            or len(books.catalog.items) >= books.limits.objects_max
        ):
            return None
        room = books.allocate(shelf, record.nbytes)
        if room.extent is None:
            return None
        where = Tail(record.end, key.digest, record.base)
        item = books.catalog.create(shelf, slot, where, (record.start, record.end))
        item.nbytes = record.nbytes
        item.checksum = record.checksum
        item.parent = record.parent
        item.requantised = record.requantised
        item.writer = record.writer
        item.sealed_at = record.sealed_at
        item.status = Status.SEALED
        item.target = room.extent
        books.protection.stored(item, NO_CARE)
        books.use(item)
        books.catalog.update(item)
        return item

    def _pull(
        self, peer: Peer, items: list[Item], batch: list[tuple[Record, Extent]], now: float
    ) -> None:
        job = self._books.next_job()
        self._jobs[job] = (peer, items)
        peer.breaker.asked()
        peer.pace.started(sum(item.nbytes for item in items), now)
        flush = self._books.flush_of(items[0].entry.shelf.digest)
        self._books.out.append(Pull(job, peer.name, peer.boot, batch, flush))

    def ended(self, job: int, faults: Sequence[Fault | None], now: float) -> list[Item]:
        """Take in the outcomes of one `Pull`; return its objects, those that failed included."""
        books = self._books
        peer, items = self._jobs.pop(job)
        assert len(items) == len(faults)
        whose = "pool" if peer.name == POOL else "peer"
        for item, fault in zip(items, faults, strict=True):
            if fault is not None:
                books.counters.add(f"{whose}_faults", fault.value)
                if item.status is Status.SEALED:
                    books.discard(item)
            elif item.status is Status.SEALED:
                item.host, item.target = item.target, None
                books.counters.add(f"{whose}_read_bytes", amount=item.nbytes)
                books.catalog.update(item)
        given = [item.nbytes for item, fault in zip(items, faults, strict=True) if fault is None]
        peer.pace.ended(sum(item.nbytes for item in items), sum(given), now)
        # What is merely gone over there says nothing of the peer's health.
        if any(fault in {Fault.IO, Fault.DAMAGED} for fault in faults):
            peer.breaker.failed(now)
        else:
            peer.breaker.succeeded()
        books.let_go_of(items)
        return items


def _on_its_way(shelf: Shelf, key: Key) -> Item | None:
    slot = shelf.slots.get((key.part, key.shard, key.codec))
    entry = shelf.entries.get(key.digest)
    if slot is None or entry is None or not entry.coming >> slot.bit & 1:
        return None
    return entry.items[slot.bit]


def fits(record: Record, layout: Layout, digests: Sequence[bytes], start: int = 0) -> bool:
    """Return whether a record that another node sent is of an object of this layout, on the way of
    `digests`, the whole blocks of a prompt after its first `start` tokens.

    What does not fit would be a wrong token later: it is left out, and so a miss.
    """
    key = record.key
    try:
        part = layout.part(key.part)
        expected = part.nbytes(record.end - record.start, key.shard)
    except LayoutError:
        return False
    block, rest = divmod(record.end - start, layout.block_tokens)
    if rest or record.base or not 0 < block <= len(digests) or key.digest != digests[block - 1]:
        return False
    begins = (
        0
        if part.is_snapshot
        else record.end - (record.end % part.block_tokens or part.block_tokens)
    )
    if record.start != begins or record.nbytes < 1 or not key.codec.isidentifier():
        return False
    return key.codec != NATIVE or record.nbytes == expected
