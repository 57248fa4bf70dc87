"""What operators ask for: lists, eviction, clearing, verification, figures."""

import re
from collections.abc import Iterator

from tiercache.core.books import Books, Disk
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.cluster.commands import FlushPool
from tiercache.core.commands import Check, Evicted, Row, Rows, Stats, Verified, Wipe
from tiercache.core.events import ClearAsked, EvictAsked, ListAsked, StatsAsked, VerifyAsked
from tiercache.core.filling import Filling
from tiercache.core.planning import Planning
from tiercache.core.writeback import WriteBack
from tiercache.errors import Fault
from tiercache.state import Extent, Key, Record
from tiercache.state.canonical import DIGEST_BYTES
from tiercache.state.keys import KEY_NAMESPACE_CHARS

WHOLE_DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_BYTES}}}")


class Selector:
    """Matches objects by the start of their key's text, without writing out every key.

    A namespace's digest may be longer there than a key's text has it, when nothing follows it.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._namespace, self._beyond, rest = prefix.partition("/")
        digest = rest.partition("/")[0]
        try:
            self._digest = bytes.fromhex(digest[: len(digest) // 2 * 2])
        except ValueError:
            self._digest = b"no digest"  # Longer text will not match either.
        self._of_shelf: dict[Shelf, bool] = {}

    def matches(self, item: Item) -> bool:
        """Return whether the object is selected."""
        shelf = item.entry.shelf
        found = self._of_shelf.get(shelf)
        if found is None:
            name = shelf.digest.hex()
            found = name.startswith(self._namespace)
            if self._beyond:
                found = name[:KEY_NAMESPACE_CHARS] == self._namespace
            self._of_shelf[shelf] = found
        if not (found and self._beyond):
            return found
        return item.entry.digest.startswith(self._digest) and str(item.key).startswith(self._prefix)


class Checking:
    """A verification that waits for its outcomes."""

    __slots__ = ("asked", "copies", "cursor")

    def __init__(
        self, asked: VerifyAsked, copies: list[tuple[Item, str, Extent]], cursor: int
    ) -> None:
        self.asked = asked
        self.copies = copies
        self.cursor = cursor


class Clearing:
    """A clear whose answer waits until the NVMe tier, and the pool, have forgotten. `failed` names what
    has not, `left` counts what has not said yet."""

    __slots__ = ("answer", "asked", "failed", "left")

    def __init__(self, asked: ClearAsked, answer: Evicted) -> None:
        self.asked = asked
        self.answer = answer
        self.failed = ""
        self.left = 0


class Operation:
    """Answers the operator's questions. None of them waits for a client."""

    def __init__(
        self, books: Books, writeback: WriteBack, filling: Filling, planning: Planning
    ) -> None:
        self._books = books
        self._writeback = writeback
        self._filling = filling
        self._planning = planning
        self._checks: dict[int, Checking] = {}
        self._wipes: dict[int, Clearing] = {}
        self._unscanned: list[Clearing] = []  # Cleared while the disk was not all known.

    @property
    def is_full(self) -> bool:
        """Whether as many answers wait for the disk as may."""
        waiting = len(self._checks) + len(self._wipes) + len(self._unscanned)
        return waiting >= self._books.limits.operations_max

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for check in self._checks.values():
            for item, _, _ in check.copies:
                yield item

    def in_segments(self) -> Iterator[int]:
        """Yield each segment of the log once for every copy there that is being read."""
        for check in self._checks.values():
            for _, tier, extent in check.copies:
                if tier == "nvme":
                    yield extent.segment

    # --- list

    def page(self, asked: ListAsked) -> None:
        """Answer with one page of objects."""
        rows: list[Row] = []
        cursor = 0
        limits = self._books.limits
        selector = Selector(asked.prefix)
        count = max(1, min(asked.count, limits.list_rows_max))
        for seen, item in enumerate(self._books.catalog.after(asked.cursor)):
            if len(rows) == count or seen == limits.list_scan_max:
                break
            if selector.matches(item):
                rows.append(self._row(item))
            cursor = item.id
        else:
            cursor = 0
        self._books.reply(asked.session, asked.call, Rows(rows, cursor))

    def _row(self, item: Item) -> Row:
        shelf, entry = item.entry.shelf, item.entry
        protection = self._books.protection
        layout = shelf.layout
        part = layout.part(item.slot.part) if layout is not None else None
        return Row(
            id=item.id,
            key=str(item.key),
            record=item.record,
            kind=part.kind.value if part is not None else "",
            label=shelf.label,
            layout=layout.fingerprint if layout is not None else "",
            host=item.host,
            nvme=item.nvme,
            status=item.status.name.lower(),
            leases=item.users,
            sights=self._books.sights.count(shelf.digest, entry.digest),
            dtype=" ".join(dict.fromkeys(t.dtype for t in part.tensors)) if part else "",
            left_s=protection.expiry.left_s(item, protection.now),
            pinned=item in protection.pins,
        )

    # --- evict, clear

    def evict(self, asked: EvictAsked) -> None:
        """Drop what matches and nobody uses, the least recently used first in the host tier."""
        books = self._books
        objects = nbytes = busy = 0
        for item in self._matching(asked.prefix):
            if asked.nbytes and nbytes >= asked.nbytes:
                break
            pinned = item in books.protection.pins
            if item.users or item.status is not Status.SEALED or item.queued or pinned:
                busy += 1
                continue
            freed = 0
            if asked.tier in {"", "host"} and item.host is not None:
                freed += item.nbytes
                books.counters.add("evictions", "host")
                books.counters.add("evicted_bytes", "host", item.nbytes)
                if asked.tier == "" and item.nvme is not None:
                    freed += item.nbytes
                    books.counters.add("evictions", "nvme")
                    books.counters.add("evicted_bytes", "nvme", item.nbytes)
                    books.discard(item)
                else:
                    books.drop_host(item)
            elif asked.tier in {"", "nvme"} and item.nvme is not None:
                freed += item.nbytes
                books.counters.add("evictions", "nvme")
                books.counters.add("evicted_bytes", "nvme", item.nbytes)
                books.drop_stored(item)
            if freed:
                objects += 1
                nbytes += freed
        self._writeback.sweep()
        books.reply(asked.session, asked.call, Evicted(objects, nbytes, busy))

    def _matching(self, prefix: str) -> Iterator[Item]:
        selector = Selector(prefix)
        idle = list(self._books.eviction)
        yield from filter(selector.matches, idle)
        seen = set(idle)
        rest = [item for item in self._books.catalog if item not in seen]
        yield from filter(selector.matches, rest)

    def clear(self, asked: ClearAsked) -> None:
        """Make everything of the matching namespaces unfindable at once, in every tier.

        What is leased or in flight is freed when its users let go; nothing finds it meanwhile.
        """
        books = self._books
        objects = nbytes = busy = 0
        keys: list[Key] = []
        flushes = _pool_flushes(books, asked)
        # What is gone already may be on its way to the disk, where it would be found once more.
        keys.extend(
            item.key
            for item in books.doomed
            if item.queued and item.entry.shelf.digest.hex().startswith(asked.namespace)
        )
        if asked.flush:
            books.flushed(bytes.fromhex(asked.namespace), asked.flush)
        for shelf in list(books.catalog.shelves.values()):
            if not shelf.digest.hex().startswith(asked.namespace):
                continue
            shelf.clears += 1
            self._planning.forget(shelf)
            books.sights.forget(shelf.digest)
            for item in self._items_of(shelf):
                objects += 1
                nbytes += item.nbytes
                busy += item.users > 0
                if item.nvme is not None or item.queued:
                    keys.append(item.key)
                books.discard(item, forget=False)
        clearing = Clearing(asked, Evicted(objects, nbytes, busy))
        clearing.left = 1
        if flushes:
            job = books.next_job()
            self._wipes[job] = clearing
            clearing.left += 1
            books.out.append(FlushPool(job, flushes))
        match books.disk:
            case Disk.READY:
                self._wipe(clearing, keys)
            case Disk.OPENING:
                self._unscanned.append(clearing)
            case Disk.SCANNING:
                self._unscanned.append(clearing)
                books.forget(keys)
            case Disk.OFF | Disk.FAILED:
                books.forget(keys)
                self._forgotten(clearing, "nvme" if books.disk is Disk.FAILED else "")
        self._writeback.sweep()

    def was_cleared(self, key: Key) -> bool:
        """Return whether the object's namespace was cleared before the object was found."""
        text = key.namespace.hex()
        return any(text.startswith(clearing.asked.namespace) for clearing in self._unscanned)

    def scanned(self) -> None:
        """All that is on the disk was found, and what was cleared forgotten: make sure of that."""
        for clearing in self._unscanned:
            self._wipe(clearing, [])
        self._unscanned.clear()

    def faltered(self, *, for_good: bool) -> None:
        """The NVMe tier may not have forgotten what it was told to."""
        for clearing in self._unscanned:
            clearing.failed = "nvme"
        if for_good:
            for clearing in self._unscanned:
                self._forgotten(clearing, "nvme")
            self._unscanned.clear()

    def _wipe(self, clearing: Clearing, keys: list[Key]) -> None:
        job = self._books.next_job()
        self._wipes[job] = clearing
        self._books.out.append(Wipe(job, keys))

    def wiped(self, job: int, fault: Fault | None) -> None:
        """Only now is it true that what was cleared will not come back."""
        if fault is not None:
            self._books.counters.add("nvme_faults", fault.value)
        self._forgotten(self._wipes.pop(job), "nvme" if fault is not None else "")

    def pool_flushed(self, job: int, fault: Fault | None) -> None:
        """Nobody will find in the pool what was cleared; or the pool could not be told."""
        if fault is not None:
            self._books.counters.add("pool_faults", fault.value)
        self._forgotten(self._wipes.pop(job), "pool" if fault is not None else "")

    def _forgotten(self, clearing: Clearing, failed: str) -> None:
        """One more has forgotten, or failed to; the last one is what the answer waited for."""
        clearing.failed = clearing.failed or failed
        clearing.left -= 1
        if clearing.left:
            return
        done, asked = clearing.answer, clearing.asked
        answer = Evicted(done.objects, done.nbytes, done.busy, clearing.failed)
        self._books.reply(asked.session, asked.call, answer)

    def _items_of(self, shelf: Shelf) -> list[Item]:
        return [item for entry in list(shelf.entries.values()) for item in entry.items.values()]

    # --- verify

    def verify(self, asked: VerifyAsked) -> None:
        """Have one page of objects read back from wherever they are."""
        books = self._books
        copies: list[tuple[Item, str, Extent]] = []
        cursor, seen = 0, 0
        limit = max(1, min(asked.count, books.limits.list_rows_max))
        for item in self._books.catalog.after(asked.cursor):
            if seen == limit:
                break
            seen += 1
            cursor = item.id
            if item.status is not Status.SEALED:
                continue
            for tier, extent in (("host", item.host), ("nvme", item.nvme)):
                if extent is not None:
                    copies.append((item, tier, extent))
        else:
            cursor = 0
        if not copies:
            books.reply(asked.session, asked.call, Verified(0, 0, [], cursor))
            return
        job = books.next_job()
        objects: list[tuple[Record, str, Extent]] = []
        for item, tier, extent in copies:
            books.look_at([item])
            if tier == "nvme":
                books.log.started(extent)
            objects.append((item.record, tier, extent))
        self._checks[job] = Checking(asked, copies, cursor)
        books.out.append(Check(job, objects))

    def checked(self, job: int, faults: list[Fault | None]) -> list[Item]:
        """Take in the outcomes: a damaged copy is never offered again. Return the objects."""
        books = self._books
        check = self._checks.pop(job)
        assert len(check.copies) == len(faults)
        failed: list[tuple[str, str, str]] = []
        nbytes = 0
        for (item, tier, extent), fault in zip(check.copies, faults, strict=True):
            nbytes += item.nbytes
            if tier == "nvme":
                books.log.finished(extent)
            if fault is not None:
                failed.append((str(item.key), tier, fault.value))
                self._damaged(item, tier, extent, fault)
        books.let_go_of([item for item, _, _ in check.copies])
        asked = check.asked
        books.reply(asked.session, asked.call, Verified(len(faults), nbytes, failed, check.cursor))
        return [item for item, _, _ in check.copies]

    def _damaged(self, item: Item, tier: str, extent: Extent, fault: Fault) -> None:
        if item.status is not Status.SEALED:
            return
        if tier == "nvme" and item.nvme == extent:
            self._filling.damaged(item, fault)
        elif tier == "host" and item.host == extent:
            # A reader may hold it: it goes out of sight, and its bytes when the last one lets go.
            self._books.counters.add("damaged", "host")
            self._books.discard(item)

    # --- figures

    def stats(self, asked: StatsAsked, gauges: dict[str, dict[str, float]]) -> None:
        """Answer with counters, gauges and one line per namespace."""
        books = self._books
        namespaces = [
            (shelf.label, {"objects": shelf.objects, **shelf.bytes})
            for shelf in books.catalog.shelves.values()
            if shelf.label is not None
        ]
        counters = {name: dict(labels) for name, labels in books.counters.values.items()}
        books.reply(asked.session, asked.call, Stats(counters, gauges, namespaces))


def _pool_flushes(books: Books, asked: ClearAsked) -> dict[bytes, int]:
    """Begin flushes of a pool that is shared without a cluster, which would number them; return them.

    Otherwise what is dropped here would come back from there.
    """
    clustering = books.limits.clustering
    if not clustering.pool or clustering.peers_max or asked.flush:
        return {}
    found = [d for d in books.catalog.shelves if d.hex().startswith(asked.namespace)]
    if not found and WHOLE_DIGEST.fullmatch(asked.namespace):
        found = [bytes.fromhex(asked.namespace)]  # Nobody attached with it here; others may have.
    flushes = {digest: books.flush_of(digest) + 1 for digest in found}
    for digest, number in flushes.items():
        books.flushed(digest, number)
    return flushes
