"""How objects come in: reserved, written by a client, committed, sealed."""

from collections.abc import Iterator

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.commands import Flushed, Granted, Reserved, Seal
from tiercache.core.events import FlushAsked, Offer, ReserveAsked, Tail
from tiercache.core.writeback import WriteBack
from tiercache.state import NATIVE, Layout
from tiercache.state.canonical import DIGEST_BYTES


class FlushWait:
    """A client that waits until what it committed is sealed, then perhaps stored."""

    __slots__ = ("asked", "missing", "sealed")

    def __init__(self, asked: FlushAsked, missing: set[Item]) -> None:
        self.asked = asked
        self.missing = missing
        self.sealed = False


class Saving:
    """Answers `ReserveAsked` and `FlushAsked`; takes in commits and checksums."""

    def __init__(self, books: Books, writeback: WriteBack) -> None:
        self._books = books
        self._writeback = writeback
        self._sealing: dict[int, list[tuple[int, Item]]] = {}
        self._flushes: list[FlushWait] = []

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for job in self._sealing.values():
            for _, item in job:
                yield item

    # --- reserve

    def reserve(self, session: Session, shelf: Shelf, asked: ReserveAsked) -> None:
        """Answer each offer with room, or with why not. Nothing waits for room."""
        grants = [self._grant(session, shelf, offer) for offer in asked.offers]
        for grant in grants:
            self._books.counters.add("reserves", grant.outcome)
        self._books.reply(session.number, asked.call, Reserved(grants))

    def _grant(self, session: Session, shelf: Shelf, offer: Offer) -> Granted:
        books = self._books
        layout = shelf.layout
        assert layout is not None
        if not session.write:
            return Granted("read_only", 0, None)
        if not _fits(layout, offer):
            return Granted("invalid", 0, None)
        if len(session.reserved) >= books.limits.reservations_per_session_max:
            return Granted("too_many", 0, None)
        slot = shelf.slot(layout.parts[offer.part].name, offer.shard, offer.codec)
        present = books.catalog.find(shelf, slot, offer.digest)
        if present is not None:
            if present.status is Status.SEALED:
                return Granted("held", 0, None)
            return Granted("busy", 0, None)
        if offer.nbytes > books.space.object_bytes_max:
            return Granted("too_large", 0, None)
        extent = books.allocate(offer.nbytes)
        if extent is None:
            return Granted("full", 0, None)
        where = Tail(offer.end, offer.digest, offer.base)
        item = books.catalog.create(shelf, slot, where, (offer.start, offer.end))
        item.nbytes = offer.nbytes
        item.parent = offer.parent
        item.requantised = offer.requantised
        item.writer = session.writer
        item.target = extent
        books.use(item)
        session.reserved[item.id] = item
        if offer.base and not books.sights.count(shelf.digest, offer.digest):
            # A prompt's end inside a block is not part of its chain: saving there is its first sight.
            books.sights.see(shelf.digest, [offer.digest])
        return Granted("granted", item.id, extent)

    # --- commit, cancel, seal

    def commit(self, session: Session, tickets: list[int]) -> None:
        """The bytes are written: have them summed. An unknown ticket is counted, never believed."""
        books = self._books
        batch: list[Item] = []
        for ticket in tickets:
            item = session.reserved.pop(ticket, None)
            if item is None or item.status is not Status.WRITING:
                session.lost += 1
                books.counters.add("commits_lost")
                if item is not None:
                    books.let_go(item)
                continue
            item.status = Status.SEALING
            session.unsealed.add(item)
            batch.append(item)
        if batch:
            job = books.next_job()
            self._sealing[job] = [(session.number, item) for item in batch]
            objects = [(item.target, item.nbytes) for item in batch if item.target is not None]
            assert len(objects) == len(batch)
            books.out.append(Seal(job, objects))

    def cancel(self, session: Session, tickets: list[int]) -> None:
        """These will not be written; unknown tickets are no error."""
        for ticket in tickets:
            item = session.reserved.pop(ticket, None)
            if item is not None:
                self.abandon(item)

    def abandon(self, item: Item) -> None:
        """A reservation ends without its bytes."""
        if item.status is not Status.DOOMED:
            self._books.discard(item)
        self._books.let_go(item)

    def sealed(self, job: int, checksums: list[bytes], now: float, wall: float) -> None:
        """Checksums are known: from here on the objects are read-only and can be found."""
        books = self._books
        batch = self._sealing.pop(job)
        assert len(batch) == len(checksums)
        done: set[Item] = set()
        for (number, item), checksum in zip(batch, checksums, strict=True):
            done.add(item)
            session = books.sessions.get(number)
            if session is not None:
                session.unsealed.discard(item)
            if item.status is Status.SEALING:
                item.status = Status.SEALED
                item.checksum = checksum
                item.sealed_at = wall
                item.host, item.target = item.target, None
                books.catalog.update(item)
                books.counters.add("commits")
                self._writeback.consider(item.entry)
            elif session is not None:
                session.lost += 1
            books.let_go(item)
        self.settled(done, now)

    # --- flush

    def flush(self, session: Session, asked: FlushAsked, now: float) -> None:
        """Answer once everything committed before is sealed and, if asked, stored."""
        self._flushes.append(FlushWait(asked, set(session.unsealed)))
        self.settled(set(), now)

    def settled(self, items: set[Item], now: float) -> None:
        """These objects are sealed, stored or lost: answer the flushes that wait for nothing else."""
        for wait in list(self._flushes):
            wait.missing -= items
            if not wait.missing and not wait.sealed:
                wait.sealed = True
                if wait.asked.durable:
                    wait.missing = self._writeback.pending()
            if not wait.missing or wait.asked.deadline <= now:
                self._flushes.remove(wait)
                self._answer(wait)

    def _answer(self, wait: FlushWait) -> None:
        session = self._books.sessions.get(wait.asked.session)
        if session is not None:
            self._books.reply(
                session.number, wait.asked.call, Flushed(len(wait.missing), session.lost)
            )
            session.lost = 0

    def wakeup(self) -> float | None:
        """Return when the next flush's time is up."""
        return min((wait.asked.deadline for wait in self._flushes), default=None)

    def close(self, session: Session) -> None:
        """The session is gone: its flushes are not answered."""
        self._flushes = [wait for wait in self._flushes if wait.asked.session != session.number]


def _fits(layout: Layout, offer: Offer) -> bool:
    """Return whether an offer can be an object of this layout.

    A wrong size here is a wrong token later: KV one token short, or a state of another shape, is not
    taken in.
    """
    if not 0 <= offer.part < len(layout.parts) or len(offer.digest) != DIGEST_BYTES:
        return False
    part = layout.parts[offer.part]
    shard = offer.shard
    if not 0 <= shard.start < shard.stop <= part.units or not offer.codec.isidentifier():
        return False
    inside_chain_block = offer.end % layout.block_tokens != 0
    if offer.end < 1 or len(offer.base) != (DIGEST_BYTES if inside_chain_block else 0):
        return False
    if part.is_snapshot:
        expected_start = 0
    else:
        expected_start = offer.end - (offer.end % part.block_tokens or part.block_tokens)
    if offer.start != expected_start or offer.nbytes < 1 or offer.requantised < 0:
        return False
    return offer.codec != NATIVE or offer.nbytes == part.nbytes(offer.end - offer.start, shard)
