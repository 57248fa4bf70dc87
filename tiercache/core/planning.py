"""Where a request can resume: planning, loading and fetching."""

from collections.abc import Iterable

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf
from tiercache.core.commands import Fetched, Loaded, Planned
from tiercache.core.events import FetchAsked, LoadAsked, PlanAsked
from tiercache.core.policy.base import Checkpoints
from tiercache.core.policy.checkpoints import ChunkEnds
from tiercache.core.route import Route
from tiercache.core.writeback import WriteBack
from tiercache.state import Layout, Piece


class Wait:
    """A call that waits for objects to come from NVMe."""

    __slots__ = ("asked", "deadline", "items", "missing")

    def __init__(
        self, asked: LoadAsked | FetchAsked, items: list[Item | None], missing: set[Item]
    ) -> None:
        self.asked = asked
        self.deadline = asked.deadline
        self.items = items
        self.missing = missing


class Planning:
    """Answers `PlanAsked`, `LoadAsked` and `FetchAsked`."""

    def __init__(self, books: Books, writeback: WriteBack) -> None:
        self._books = books
        self._writeback = writeback
        self._checkpoints: Checkpoints = ChunkEnds(books.limits.checkpoints_max)
        self._routes: dict[tuple[bytes, str, str], Route] = {}
        self._waits: dict[int, Wait] = {}
        self._next_wait = 0

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._waits)

    # --- plan

    def plan(self, session: Session, shelf: Shelf, asked: PlanAsked, now: float) -> None:
        """Answer where the request can resume, lease what is in memory, send for the rest."""
        books = self._books
        route = self._route(session, shelf, asked)
        # A second session of the same request is another rank: it gets no more than was decided.
        alone = route.sessions <= {session.number}
        limit = asked.limit if alone else min(asked.limit, route.decided)
        books.release(session.number, asked.request)
        route.sessions.add(session.number)
        route.walk(asked, limit)
        self._writeback.consider_all(route.entries)
        position = ready = route.deepest(session, in_host=True)
        if ready < len(route.positions) - 1:
            position = route.deepest(session, in_host=False)
        boundary = route.positions[position] if position >= 0 else 0
        route.decided = boundary if alone else min(boundary, route.decided)
        items = route.chosen(session, position)
        leased = items
        if asked.all_ranks:
            leased = route.chosen(session, position, all_ranks=True)
        books.lease(session.number, asked.request, leased, now)
        self._touch_segments(leased)
        self._writeback.fill([item for item in leased if item.host is None])
        candidates = route.candidates(asked, boundary, books.limits.tails_max)
        reason = "" if boundary else route.why_not(session, asked)
        if ready == position:
            route.outcome = (boundary, "host", reason)
            if not candidates:
                self._settle(route)
        books.reply(
            session.number,
            asked.call,
            Planned(
                boundary=boundary,
                ready=ready == position,
                ready_boundary=route.positions[ready] if ready >= 0 else 0,
                pieces=[item.piece or self._piece(item) for item in items]
                if ready == position
                else [],
                checkpoints=self._checkpoints.place(asked.tokens, boundary, asked.capture),
                candidates=candidates,
                reason=reason,
            ),
        )

    def _route(self, session: Session, shelf: Shelf, asked: PlanAsked) -> Route:
        """Return the request's route, and count its sight of what it has not seen before."""
        books = self._books
        name = self._name(session, shelf, asked.request)
        route = self._routes.get(name)
        if route is None:
            if len(self._routes) >= books.limits.plans_max:
                self._end(next(iter(self._routes)))
            assert shelf.layout is not None
            route = self._routes[name] = Route(shelf, shelf.layout)
        tails = [tail.digest for tail in asked.tails]
        if books.sights.first_time(shelf.digest, f"{session.writer}/{asked.request}"):
            books.sights.see(shelf.digest, asked.digests + tails)
            books.counters.add("lookup_tokens", amount=asked.tokens)
        elif session.number in route.sessions:
            # The client names boundaries inside blocks in a second call of the same request.
            known = {entry.digest for entry in route.entries}
            books.sights.see(shelf.digest, [digest for digest in tails if digest not in known])
        return route

    def _name(self, session: Session, shelf: Shelf, request: str) -> tuple[bytes, str, str]:
        """Ranks of one engine share its name, and so its requests; other engines do not."""
        return (shelf.digest, session.writer, request)

    # --- load

    def load(self, session: Session, shelf: Shelf, asked: LoadAsked, now: float) -> None:
        """Answer when the session's objects of a planned request are in memory."""
        route = self._routes.get(self._name(session, shelf, asked.request))
        if route is None:
            self._books.reply(session.number, asked.call, Loaded(0, [], "not_planned"))
            return
        route.sessions.add(session.number)
        route.cut(route.decided)
        wanted = route.chosen(session, len(route.positions) - 1) if route.decided else []
        coming = self._writeback.fill([item for item in wanted if item.host is None])
        self._wait(Wait(asked, list(wanted), set(coming)), now)

    def _conclude_load(self, session: Session, asked: LoadAsked, now: float) -> None:
        shelf = self._books.shelf_of(session, asked.lora, asked.salt)
        name = self._name(session, shelf, asked.request) if shelf is not None else None
        route = self._routes.get(name) if name is not None else None
        if route is None:
            self._books.reply(session.number, asked.call, Loaded(0, [], "released"))
            return
        route.cut(route.decided)
        position = route.deepest(session, in_host=True)
        boundary = route.positions[position] if position >= 0 else 0
        items = route.chosen(session, position)
        if route.outcome is None:
            route.outcome = (boundary, "nvme" if boundary else "declined", "")
        self._settle(route)
        reason = "" if boundary == route.decided else "lost_or_late"
        route.decided = boundary
        self._books.release(session.number, asked.request)
        self._books.lease(session.number, asked.request, items, now)
        pieces = [self._piece(item) for item in items]
        self._books.reply(session.number, asked.call, Loaded(boundary, pieces, reason))

    # --- fetch

    def fetch(self, session: Session, shelf: Shelf, asked: FetchAsked, now: float) -> None:
        """Lease objects by name, bringing back from NVMe what is there only."""
        items: list[Item | None] = []
        assert shelf.layout is not None
        for wanted in asked.wanted:
            slot = shelf.slot(shelf.layout.parts[wanted.part].name, wanted.shard, wanted.codec)
            entry = shelf.entries.get(wanted.digest)
            held = entry is not None and entry.held >> slot.bit & 1
            items.append(entry.items[slot.bit] if entry is not None and held else None)
        absent = [item for item in items if item is not None and item.host is None]
        self._lease_present(session, asked.request, items, now)
        for kind, count in (
            ("nvme", len(absent)),
            ("miss", items.count(None)),
            ("host", len(items) - len(absent) - items.count(None)),
        ):
            self._books.counters.add("fetches", kind, count)
        coming = self._writeback.fill(absent) if absent and asked.deadline > now else []
        self._wait(Wait(asked, items, set(coming)), now)

    def _lease_present(
        self, session: Session, request: str, items: Iterable[Item | None], now: float
    ) -> None:
        present = (item for item in items if item is not None and item.host is not None)
        self._books.lease(session.number, request, present, now)

    def _conclude_fetch(
        self, session: Session, asked: FetchAsked, items: list[Item | None], now: float
    ) -> None:
        self._lease_present(session, asked.request, items, now)
        pieces = [
            self._piece(item) if item is not None and item.host is not None else None
            for item in items
        ]
        self._books.reply(session.number, asked.call, Fetched(pieces))

    # --- waiting

    def _wait(self, wait: Wait, now: float) -> None:
        if (
            not wait.missing
            or wait.deadline <= now
            or len(self._waits) >= self._books.limits.waiting_max
        ):
            self._conclude(wait, now)
            return
        self._next_wait += 1
        self._waits[self._next_wait] = wait

    def _conclude(self, wait: Wait, now: float) -> None:
        session = self._books.sessions.get(wait.asked.session)
        if session is None:
            return
        match wait.asked:
            case LoadAsked() as asked:
                self._conclude_load(session, asked, now)
            case FetchAsked() as asked:
                self._conclude_fetch(session, asked, wait.items, now)

    def arrived(self, items: list[Item], now: float) -> None:
        """These objects came from NVMe, or failed to: answer whoever waits for nothing else."""
        if not self._waits:
            return
        gone = set(items)
        for number, wait in list(self._waits.items()):
            wait.missing -= gone
            if not wait.missing:
                del self._waits[number]
                self._conclude(wait, now)

    def tick(self, now: float) -> None:
        """Answer every call whose time is up."""
        for number, wait in list(self._waits.items()):
            if wait.deadline <= now:
                del self._waits[number]
                self._conclude(wait, now)

    def wakeup(self) -> float | None:
        """Return when the next call's time is up."""
        return min((wait.deadline for wait in self._waits.values()), default=None)

    # --- the end of a request

    def release(self, session: Session, request: str) -> None:
        """The session is done with a request; the last one ends it."""
        for shelf in session.narrowed.values():
            name = self._name(session, shelf, request)
            route = self._routes.get(name)
            if route is not None:
                route.sessions.discard(session.number)
                if not route.sessions:
                    self._end(name)

    def close(self, session: Session) -> None:
        """The session is gone: none of its calls is answered any more."""
        for number, wait in list(self._waits.items()):
            if wait.asked.session == session.number:
                del self._waits[number]
        for name, route in list(self._routes.items()):
            route.sessions.discard(session.number)
            if not route.sessions:
                self._end(name)

    def forget(self, shelf: Shelf) -> None:
        """A namespace is cleared: what was planned in it is void."""
        for name, route in list(self._routes.items()):
            if route.shelf is shelf:
                self._end(name)

    def _end(self, name: tuple[bytes, str, str]) -> None:
        route = self._routes.pop(name)
        if not route.settled and route.outcome is None:
            self._books.counters.add("lookups", "aborted")
        self._settle(route)

    # --- small things

    def _settle(self, route: Route) -> None:
        """Count what became of a request, once."""
        if route.settled or route.outcome is None:
            return
        route.settled = True
        boundary, tier, reason = route.outcome
        counters = self._books.counters
        if boundary:
            counters.add("lookups", f"hit_{tier}")
            counters.add("hit_tokens", tier, boundary)
        elif tier == "declined":
            counters.add("lookups", "declined")
        else:
            counters.add("lookups", "miss")
            counters.add("misses", reason)

    def _touch_segments(self, items: list[Item]) -> None:
        for segment in {item.nvme.segment for item in items if item.nvme is not None}:
            self._books.log.touch(segment)

    def _piece(self, item: Item) -> Piece:
        if item.piece is None:
            layout = item.entry.shelf.layout
            assert layout is not None
            item.piece = _piece_of(item, layout)
        return item.piece


def _piece_of(item: Item, layout: Layout) -> Piece:
    host, slot = item.host, item.slot
    assert host is not None
    return Piece(
        part=layout.parts.index(layout.part(slot.part)),
        shard_start=slot.shard.start,
        shard_stop=slot.shard.stop,
        codec=slot.codec,
        start=item.start,
        end=item.end,
        segment=host.segment,
        offset=host.offset,
        nbytes=item.nbytes,
    )
