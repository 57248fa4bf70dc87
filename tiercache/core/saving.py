"""How objects come in: reserved, written by a client, committed, sealed."""

from collections.abc import Collection, Iterator, Sequence

from tiercache.core.advising import Advising, Verdict
from tiercache.core.books import NO_ROOM, Books, Session
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.commands import Flushed, Granted, Reserved, Seal
from tiercache.core.events import FlushAsked, Offer, ReserveAsked, Tail
from tiercache.core.writeback import WriteBack
from tiercache.state import NATIVE, Care, Layout
from tiercache.state.canonical import DIGEST_BYTES

CHECKSUM_BYTES = 16


class FlushWait:
    """A client that waits until what it committed is sealed, then perhaps stored."""

    __slots__ = ("asked", "lost", "missing", "turn")

    def __init__(self, asked: FlushAsked, missing: set[Item]) -> None:
        self.asked = asked
        self.missing = missing  # Not sealed yet.
        self.turn: int | None = None  # Once all are sealed: what was queued for NVMe up to here.
        self.lost = 0  # Not stored, though it had earned it.


class Saving:
    """Answers `ReserveAsked` and `FlushAsked`; takes in commits and checksums."""

    def __init__(self, books: Books, writeback: WriteBack, advising: Advising) -> None:
        self._books = books
        self._advising = advising
        self._writeback = writeback
        self._sealing: dict[int, list[tuple[int, Item]]] = {}
        self._flushes: list[FlushWait] = []

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every running job that uses it."""
        for job in self._sealing.values():
            for _, item in job:
                yield item

    # --- reserve

    def reserve(self, session: Session, shelf: Shelf, asked: ReserveAsked, now: float) -> None:
        """Answer each offer with room, or with why not. Nothing waits for room."""
        request = session.scoped(shelf, asked.request)
        if self._books.protection.refuses(request, asked.care):
            refused = [Granted("do_not_store", 0, None)] * len(asked.offers)
            self._grants(session, shelf, asked, refused)
            return
        self._books.sights.first_time(request)
        assert shelf.layout is not None
        layout, entries = shelf.layout, shelf.entries
        sound = [
            offer
            for offer in asked.offers
            if _is_of_boundary(layout, offer)
            and _fits(layout, offer)
            and (offer.digest not in entries or entries[offer.digest].agrees(offer.end, offer.base))
        ]
        verdict = self._advising.judge(session, shelf, request, sound)
        self._books.passage.wrote(shelf, request, asked.offers, now)
        care = asked.care
        grants = [self._grant(session, shelf, offer, verdict, care, now) for offer in asked.offers]
        self._grants(session, shelf, asked, grants)

    def _grants(
        self, session: Session, shelf: Shelf, asked: ReserveAsked, grants: list[Granted]
    ) -> None:
        """Count what became of each offer, and answer."""
        tenant = shelf.tenant
        assert tenant is not None
        for grant in grants:
            own = grant.outcome == "granted" and grant.own > 0
            self._books.counters.add("reserves", "evicted_own" if own else grant.outcome)
            tenant.count(grant.outcome, own=own)
        self._books.reply(session.number, asked.call, Reserved(grants))

    def _grant(
        self,
        session: Session,
        shelf: Shelf,
        offer: Offer,
        verdict: Verdict,
        care: Care,
        now: float,
    ) -> Granted:
        books = self._books
        problem = self._why_not(session, shelf, offer)
        if problem:
            return Granted(problem, 0, None)
        self._see(offer, verdict)
        assert shelf.layout is not None
        slot = shelf.slot(shelf.layout.parts[offer.part].name, offer.shard, offer.codec)
        present = books.catalog.find(shelf, slot, offer.digest)
        if present is not None and not self._taken_back(present, now):
            books.catalog.mention(present.entry)
            books.protection.kept(present, care)
            self._writeback.consider(present.entry)
            there = present.status is Status.SEALED and not present.entry.coming >> slot.bit & 1
            return Granted("held" if there else "busy", 0, None)
        if offer.end in verdict.refused and _is_of_boundary(shelf.layout, offer):
            return Granted("not_admitted", 0, None)
        books.passage.asks(shelf, offer, care)
        room = books.allocate(shelf, offer.nbytes) if self._takes_one_more(shelf) else NO_ROOM
        outweighed = books.passage.answered(shelf)
        if room.extent is None:
            why = "outweighed" if outweighed and room is NO_ROOM else room.why
            return Granted(why, 0, None)
        where = Tail(offer.end, offer.digest, offer.base)
        item = books.catalog.create(shelf, slot, where, (offer.start, offer.end))
        item.nbytes = offer.nbytes
        item.parent = offer.parent
        item.requantised = offer.requantised
        item.writer = session.writer
        item.target = room.extent
        books.protection.stored(item, care)
        books.use(item)
        session.reserved[item.id] = item
        session.reserved_at[item.id] = now
        return Granted("granted", item.id, room.extent, room.own)

    def _takes_one_more(self, shelf: Shelf) -> bool:
        """Return whether the catalog takes one more object, after dropping the least valuable ones.

        What is on NVMe too stays known when it leaves memory: then a segment has to go.
        """
        books, tenant = self._books, shelf.tenant
        assert tenant is not None
        for _ in range(books.limits.evictions_per_reserve_max):
            if len(books.catalog.items) < books.limits.objects_max:
                return True
            victim = books.victim(tenant)
            if victim is not None and victim.nvme is None:
                books.evict(victim)
            elif not self._writeback.drop_oldest():
                return False
        return len(books.catalog.items) < books.limits.objects_max

    def _why_not(self, session: Session, shelf: Shelf, offer: Offer) -> str:
        books = self._books
        layout, entry = shelf.layout, shelf.entries.get(offer.digest)
        assert layout is not None
        if not session.write:
            return "read_only"
        if not _fits(layout, offer) or len(offer.codec) > books.limits.name_bytes_max:
            return "invalid"
        if entry is not None and not entry.agrees(offer.end, offer.base):
            return "invalid"
        if len(session.reserved) >= books.limits.reservations_per_session_max:
            return "too_many"
        name = (layout.parts[offer.part].name, offer.shard, offer.codec)
        if name not in shelf.slots and len(shelf.slots) >= books.limits.slots_max:
            return "too_many"
        return "too_large" if offer.nbytes > books.space.object_bytes_max else ""

    def _see(self, offer: Offer, verdict: Verdict) -> None:
        """Saving where no prompt has been (inside a block, beyond the prompt's end) is a sight too."""
        if offer.base or offer.end > verdict.planned:
            self._books.sights.see_beyond(verdict.request, [offer.digest])

    def _taken_back(self, item: Item, now: float) -> bool:
        """Return whether the object's reservation was too old, and so its key is free again.

        Its extent is not: the one who reserved it may be frozen, and write when it wakes.
        """
        if item.status is not Status.WRITING:
            return False
        before = now - self._books.limits.lease_s_max
        for session in self._books.sessions.values():
            if session.reserved_at.get(item.id, now) < before:
                self._books.discard(item)
                return True
        return False

    # --- commit, cancel, seal

    def commit(
        self, session: Session, tickets: list[int], checksums: list[bytes], wall: float
    ) -> None:
        """The bytes are written: seal what comes with its checksum, have the rest summed.

        An unknown ticket is counted, never believed.
        """
        books = self._books
        batch: list[Item] = []
        done: list[Item] = []
        if len(checksums) != len(tickets):  # None, or not one for each: then they say nothing.
            checksums = [b""] * len(tickets)
        for ticket, checksum in zip(tickets, checksums, strict=True):
            item = session.reserved.pop(ticket, None)
            session.reserved_at.pop(ticket, None)
            if item is None or item.status is not Status.WRITING:
                session.lost += 1
                books.counters.add("commits_lost")
                if item is not None:
                    books.let_go(item)
                continue
            if len(checksum) == CHECKSUM_BYTES:
                self._seal(item, checksum, wall)
                done.append(item)
                continue
            item.status = Status.SEALING
            session.unsealed.add(item)
            batch.append(item)
        self._consider(done)
        books.let_go_of(done)
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
            session.reserved_at.pop(ticket, None)
            if item is not None:
                self._abandon(item)
                self._books.let_go(item)

    def _abandon(self, item: Item) -> None:
        """A reserved object will not be written: its key is free for others."""
        if item.status is not Status.DOOMED:
            self._books.discard(item)

    def sealed(self, job: int, checksums: list[bytes], now: float, wall: float) -> None:
        """Checksums are known: from here on the objects are read-only and can be found."""
        books = self._books
        batch = self._sealing.pop(job)
        assert len(batch) == len(checksums)
        done: dict[Item, None] = {}
        for (number, item), checksum in zip(batch, checksums, strict=True):
            done[item] = None
            session = books.sessions.get(number)
            if session is not None:
                session.unsealed.discard(item)
            if item.status is Status.SEALING:
                self._seal(item, checksum, wall)
            elif session is not None:
                session.lost += 1
        self._consider(done)
        books.let_go_of([item for _, item in batch])
        self.settled(set(done), now)

    def _consider(self, items: Collection[Item]) -> None:
        way = max((item.end for item in items), default=0)
        self._writeback.consider_all(dict.fromkeys(item.entry for item in items), way)

    def _seal(self, item: Item, checksum: bytes, wall: float) -> None:
        item.status = Status.SEALED
        item.checksum = checksum
        item.sealed_at = wall
        item.host, item.target = item.target, None
        self._books.catalog.update(item)
        self._books.counters.add("commits")
        self._books.counters.add("committed_bytes", amount=item.nbytes)

    # --- flush

    def flush(self, session: Session, asked: FlushAsked, now: float) -> None:
        """Answer once everything committed before is sealed and, if asked, stored."""
        wait = FlushWait(asked, set(session.unsealed))
        if len(self._flushes) >= self._books.limits.waiting_max:
            self._answer(wait)
            return
        self._flushes.append(wait)
        self.settled(set(), now)

    def settled(self, items: set[Item], now: float, lost: Sequence[int] = ()) -> None:
        """These objects are sealed, those turns lost: answer the flushes that wait for nothing else."""
        writeback = self._writeback
        for wait in list(self._flushes):
            wait.missing -= items
            if wait.turn is not None:
                wait.lost += sum(turn <= wait.turn for turn in lost)
            elif not wait.missing:
                wait.turn = writeback.turn if wait.asked.durable else 0
            done = wait.turn is not None and writeback.is_past(wait.turn)
            if done or wait.asked.deadline <= now:
                self._flushes.remove(wait)
                self._answer(wait)

    def _answer(self, wait: FlushWait) -> None:
        session = self._books.sessions[wait.asked.session]
        waiting = len(wait.missing)
        if wait.turn is not None:
            waiting += self._writeback.waiting(wait.turn)
        lost = session.lost + wait.lost
        self._books.reply(session.number, wait.asked.call, Flushed(waiting, lost))
        session.lost = 0

    def wakeup(self) -> float | None:
        """Return when the next flush's time is up."""
        return min((wait.asked.deadline for wait in self._flushes), default=None)

    def close(self, session: Session) -> None:
        """The session is gone: its flushes are not answered, and what it reserved will not be written."""
        self._flushes = [wait for wait in self._flushes if wait.asked.session != session.number]
        for item in session.reserved.values():
            self._abandon(item)


def _is_of_boundary(layout: Layout, offer: Offer) -> bool:
    """Return whether an offer serves one boundary only: a snapshot does, and a partial block."""
    if not 0 <= offer.part < len(layout.parts):
        return False
    return layout.parts[offer.part].is_snapshot or bool(offer.base)


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
    if len(offer.parent) not in {0, DIGEST_BYTES}:
        return False
    return offer.codec != NATIVE or offer.nbytes == part.nbytes(offer.end - offer.start, shard)
