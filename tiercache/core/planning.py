"""Where a request can resume: planning, loading and fetching."""

from collections.abc import Iterable
from functools import partial

from tiercache.core.advising import Advice, Advising
from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf, Status
from tiercache.core.cluster.agreeing import AGREED_S_MAX
from tiercache.core.cluster.reach import Question, Reach
from tiercache.core.cluster.walking import in_place
from tiercache.core.commands import Fetched, Loaded, Planned, Refused
from tiercache.core.events import FetchAsked, LoadAsked, PlanAsked, Tail
from tiercache.core.filling import Filling
from tiercache.core.losses import Depths, check_tokens, note, settle
from tiercache.core.route import Route, terms_of
from tiercache.core.routes import Routes
from tiercache.core.search import SEATED_SHARE, Search, Seat
from tiercache.core.waits import Wait, Waits
from tiercache.core.worth import Worth
from tiercache.core.writeback import WriteBack
from tiercache.state import Layout, Piece


class Planning:
    """Answers `PlanAsked`, `LoadAsked` and `FetchAsked`."""

    def __init__(
        self,
        books: Books,
        writeback: WriteBack,
        filling: Filling,
        advising: Advising,
        reach: Reach,
    ) -> None:
        self._books = books
        self._writeback = writeback
        self._filling = filling
        self.advising = self._advising = advising
        self.worth = self._worth = Worth(books)
        self._reach = reach
        self._routes = Routes(books, advising)
        self._waits = Waits(books.limits.waiting_max)

    def __len__(self) -> int:
        """Calls that wait."""
        return len(self._waits)

    def check(self) -> None:
        """Raise AssertionError if routes and the sessions that take part in them disagree."""
        self._routes.check()
        self._waits.check()
        check_tokens(self._books.counters)

    # --- plan

    def plan(
        self,
        session: Session,
        shelf: Shelf,
        asked: PlanAsked,
        now: float,
        search: Search | None = None,
    ) -> None:
        """Answer where to resume, lease what is in memory, send for the rest. `search`: what it waited
        for."""
        books = self._books
        route, advice = self._route(session, shelf, asked)
        # A second session of the same request is another rank: it gets no more than was decided.
        alone = route.begin(session.number, asked)
        # What the request leased before stays leased: somebody may still read it.
        self._routes.join(session, shelf, asked.request, route)
        route.walk(asked, asked.limit if alone else min(asked.limit, route.decided))
        _mention(books, shelf, asked.tails)
        self._writeback.consider_all(route.entries, route.way)
        position, ready = _deepest(route, session)
        ask = alone and asked.care.store  # Others would count the visit.
        if ask and self._ask(session, asked, route, position, now):
            return  # `reached` goes on.
        if asked.seats and asked.all_ranks and (alone or route.agreed is None):
            if self._reach.agreeing.ask(session, asked, route, now, search):
                return
            position, ready = _deepest(route, session)
        boundary = could = _at(route, position)
        # Other ranks get what the first one got, and so do those whose plan another node made.
        if alone and (asked.all_ranks or not asked.seats):
            position = self._worth.of(route, session, position, ready)
            boundary = _at(route, position)
        books.protection.planned(route.entries, position, asked.care)
        items = self._hold(session, asked, route, position, now)
        candidates = route.candidates(asked, boundary, books.limits.tails_max)
        if alone:
            route.decided = boundary
        elif asked.tails or not candidates:  # Otherwise it may ask again, and decide then.
            route.decided = min(boundary, route.decided)
        same = advice.reached(route.layout)
        reason = note(route, session, asked, Depths(boundary, could, same, ready == position))
        if not candidates:
            settle(books.counters, route)
        checkpoints = self._advising.place(advice, session, route, asked, boundary)
        if alone and (asked.tails or not candidates):
            self._pass(session, route, asked, {*checkpoints, *advice.ends, advice.fork}, now)
        books.reply(
            session.number,
            asked.call,
            Planned(
                boundary=boundary,
                ready=ready == position,
                ready_boundary=_at(route, ready),
                pieces=_pieces(items) if ready == position else [],
                checkpoints=checkpoints,
                candidates=candidates,
                reason=reason,
            ),
        )

    def _pass(
        self, session: Session, route: Route, asked: PlanAsked, stops: set[int], now: float
    ) -> None:
        """The eviction policies and the pool learn of a request, once, when it is decided."""
        if route.passed:
            return
        route.passed = True
        name = session.scoped(route.shelf, asked.request)
        self._books.passage.visited(route.shelf, name, asked, route.decided, stops, now)
        self._reach.deposits.resumed(route, session, asked.care.store and route.decided, now)

    def _hold(
        self, session: Session, asked: PlanAsked, route: Route, position: int, now: float
    ) -> list[Item]:
        """Lease what is planned, send for what is not in memory; return the session's own."""
        items = route.chosen(session, position)
        leased = route.chosen(session, position, all_ranks=True) if asked.all_ranks else items
        self._books.lease(session.number, asked.request, leased, now)
        for segment in {item.nvme.segment for item in leased if item.nvme is not None}:
            self._books.log.touch(segment)
        self._filling.start([item for item in leased if item.host is None])
        return items

    def _ask(
        self, session: Session, asked: PlanAsked, route: Route, position: int, now: float
    ) -> bool:
        """Ask another node, or the next one; True when the plan waits for it. A request looks for others
        once, whatever it plans meanwhile."""
        if not self._reach.is_open:
            return False
        if route.search is None:
            route.search = _search(session, asked, route, now)
        elif self._reach.is_asking(route.search):
            return False
        digests = asked.digests[: asked.limit // route.layout.block_tokens]
        whole = partial(route.whole, session)
        boundary = _at(route, position)

        def kept() -> list[Item]:
            rests_on = route.chosen(session, position, all_ranks=True)
            return in_place(route.layout, route.entries, rests_on)

        question = Question(asked, route.shelf, digests, 0, boundary, whole, kept, asked.source)
        return self._reach.ask(route.search, question, now)

    def reached(self, asked: PlanAsked, now: float, found: Search | frozenset[bytes]) -> None:
        """Another node has said what it has, or is late: answer the plan that waited for it, or ask the
        next one. `found`: the search, or what all nodes agreed on."""
        session = self._books.sessions[asked.session]
        shelf = self._books.shelf_of(session, asked.lora, asked.salt)
        if shelf is None:  # Cleared meanwhile, and no room to open it again.
            self._books.reply(asked.session, asked.call, Refused("refused", "too many namespaces"))
            return
        route = self._route(session, shelf, asked)[0]
        if isinstance(found, Search):
            route.search = found  # Cleared meanwhile, the route is another one: no new search.
            self.plan(session, shelf, asked, now, search=found)
            return
        route.agreed, route.terms = found, (terms_of(asked), now + AGREED_S_MAX)
        route.search = route.search or _search(session, asked, route, now)
        route.search.over()
        self.plan(session, shelf, asked, now)

    def _route(self, session: Session, shelf: Shelf, asked: PlanAsked) -> tuple[Route, Advice]:
        """Return the request's route, and what is known of it; its sights are counted."""
        route = self._routes.open(session, shelf, asked.request)
        name = session.scoped(shelf, asked.request)
        advice = self._advising.meet(name, asked, route.layout.block_tokens)
        route.passed |= advice.passed
        return route, advice

    # --- load

    def load(self, session: Session, shelf: Shelf, asked: LoadAsked, now: float) -> None:
        """Answer when the session's objects of a planned request are in memory."""
        route = self._routes.find(session, shelf, asked.request)
        waits = route is not None and not route.planned and not route.lost  # For other nodes.
        if route is None or waits or not route.leads_to(asked.boundary, asked.digest):
            self._books.reply(session.number, asked.call, Loaded(0, [], "not_planned"))
            return
        self._routes.join(session, shelf, asked.request, route)
        route.cut(min(route.decided, asked.boundary))
        wanted = route.chosen(session, route.deepest_known(), all_ranks=route.all_ranks)
        # Leased before room is made for the others: making room must not drop it.
        self._books.lease(session.number, asked.request, wanted, now)
        coming = self._filling.start([item for item in wanted if item.host is None])
        self._wait(Wait(asked, list(wanted), set(coming)), now)

    def _conclude_load(self, session: Session, asked: LoadAsked, now: float) -> None:
        shelf = self._books.shelf_of(session, asked.lora, asked.salt)
        route = self._routes.find(session, shelf, asked.request) if shelf is not None else None
        if route is None or not route.leads_to(asked.boundary, asked.digest):
            self._books.reply(session.number, asked.call, Loaded(0, [], "released"))
            return
        route.cut(min(route.decided, asked.boundary))
        position = route.deepest(session, in_host=True)
        boundary = route.positions[position] if position >= 0 else 0
        items = route.chosen(session, position)
        leased = route.chosen(session, position, all_ranks=True) if route.all_ranks else items
        if route.outcome is None:
            route.outcome = (boundary, "nvme" if boundary else "declined", "")
        settle(self._books.counters, route)
        reason = "" if boundary == route.decided else "lost_or_late"
        route.decided = boundary
        self._books.lease(session.number, asked.request, leased, now)
        # What came from NVMe could not go to the pool when the request was planned.
        self._reach.deposits.resumed(route, session, boundary, now, counts=False)
        pieces = _pieces(items)
        self._books.reply(session.number, asked.call, Loaded(boundary, pieces, reason))

    # --- fetch

    def fetch(self, session: Session, shelf: Shelf, asked: FetchAsked, now: float) -> None:
        """Lease objects by name, bringing back from NVMe what is there only."""
        assert shelf.layout is not None
        parts, slots, entries = shelf.layout.parts, shelf.slots, shelf.entries
        items: list[Item | None] = []
        for wanted in asked.wanted:
            slot = slots.get((parts[wanted.part].name, wanted.shard, wanted.codec))
            entry = entries.get(wanted.digest)
            held = slot is not None and entry is not None and entry.held >> slot.bit & 1
            items.append(entry.items[slot.bit] if slot and entry and held else None)
        there = [item for item in items if item is not None]
        absent = [item for item in there if item.host is None]
        counters = self._books.counters
        counters.add("fetches", "host", len(there) - len(absent))
        counters.add("fetches", "nvme", len(absent))
        counters.add("fetches", "miss", len(items) - len(there))
        self._books.lease(session.number, asked.request, there, now)
        if absent:
            coming = self._filling.start(absent) if asked.deadline > now else []
            self._wait(Wait(asked, items, set(coming)), now)
            return
        # Nothing to wait for: what was just leased is the answer.
        pieces = [None if item is None else item.piece or _piece(item) for item in items]
        self._books.reply(session.number, asked.call, Fetched(pieces))

    def _lease(
        self, session: Session, request: str, items: Iterable[Item | None], now: float
    ) -> None:
        present = (item for item in items if item is not None and item.status is Status.SEALED)
        self._books.lease(session.number, request, present, now)

    def _conclude_fetch(
        self, session: Session, asked: FetchAsked, items: list[Item | None], now: float
    ) -> None:
        # What was cleared, dropped or found damaged while the call waited is not given out.
        sealed = [item if item and item.status is Status.SEALED else None for item in items]
        self._lease(session, asked.request, sealed, now)
        pieces = [_piece(item) if item and item.host is not None else None for item in sealed]
        self._books.reply(session.number, asked.call, Fetched(pieces))

    # --- waiting

    def _wait(self, wait: Wait, now: float) -> None:
        if not wait.missing or wait.deadline <= now or self._waits.is_full:
            self._conclude(wait, now)
        else:
            self._waits.add(wait)

    def _conclude(self, wait: Wait, now: float) -> None:
        session = self._books.sessions[wait.asked.session]
        match wait.asked:
            case LoadAsked() as asked:
                self._conclude_load(session, asked, now)
            case FetchAsked() as asked:
                self._conclude_fetch(session, asked, wait.items, now)

    def arrived(self, items: list[Item], now: float) -> None:
        """These objects came from NVMe, or failed to: answer whoever waits for nothing else."""
        for wait in self._waits.arrived(items):
            self._conclude(wait, now)

    def tick(self, now: float) -> None:
        """Answer every call whose time is up."""
        for wait in self._waits.late(now):
            self._conclude(wait, now)

    def wakeup(self) -> float | None:
        """Return when the next call's time is up, or a time before."""
        return self._waits.wakeup()

    # --- the end of a request

    def release(self, session: Session, request: str) -> None:
        """The session is done with a request; the last one ends it."""
        self._routes.release(session, request)

    def close(self, session: Session) -> None:
        """The session is gone: none of its calls is answered any more."""
        self._waits.close(session.number)
        self._routes.close(session)

    def forget(self, shelf: Shelf) -> None:
        """A namespace is cleared: what was planned in it is void."""
        self._routes.forget(shelf)
        self._advising.forget(shelf.digest)
        self._books.passage.forget(shelf)


def _mention(books: Books, shelf: Shelf, tails: Iterable[Tail]) -> None:
    for tail in tails:
        entry = shelf.entries.get(tail.digest)
        if entry is not None:
            books.catalog.mention(entry)


def _at(route: Route, position: int) -> int:
    return route.positions[position] if position >= 0 else 0


def _search(session: Session, asked: PlanAsked, route: Route, now: float) -> Search:
    """Return the search of a plan: for the ranks that sit here."""
    elsewhere = frozenset(seat.node for seat in asked.seats if seat.node)
    waits_again = bool(elsewhere) and asked.all_ranks
    share = SEATED_SHARE if waits_again else 1.0
    return Search(now, Seat(session.ranks, *route.here), last=elsewhere, share=share)


def _deepest(route: Route, session: Session) -> tuple[int, int]:
    """Return the deepest positions that could be resumed: at all, and with what is in memory."""
    ready = route.deepest(session, in_host=True)
    if ready == route.deepest_known():
        return ready, ready
    return route.deepest(session, in_host=False), ready


def _pieces(items: Iterable[Item]) -> list[Piece]:
    return [_piece(item) for item in items]


def _piece(item: Item) -> Piece:
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
        requantised=item.requantised,
    )
