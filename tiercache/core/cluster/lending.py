"""What this node gives to others: where a prompt could be resumed here, and the objects of that."""

from collections.abc import Iterable, Iterator

from tiercache.core.books import Books
from tiercache.core.catalog import Item, Status
from tiercache.core.cluster.commands import Lent, Located, Summarised
from tiercache.core.cluster.events import LendAsked, LocateAsked, SummaryAsked
from tiercache.core.cluster.gathering import Found, for_all, for_some
from tiercache.core.cluster.summary import Summary
from tiercache.core.cluster.walking import is_sound, route_of
from tiercache.core.filling import Filling
from tiercache.core.holds import Holds, Name
from tiercache.core.route import Route
from tiercache.core.waits import Wait, Waits
from tiercache.core.writeback import WriteBack
from tiercache.state import Extent, Key

NOTHING = Summary(0, whole=True, added=[], removed=[])
"""What a node tells that keeps no account of its boundaries."""


class Lending:
    """Answers `LocateAsked`, `LendAsked` and `SummaryAsked`.

    What was located is held for a while, and may still be gone when it is fetched: then it is missing,
    which is a miss. What is lent stays until the loan is over.
    """

    def __init__(self, books: Books, writeback: WriteBack, filling: Filling) -> None:
        self._books = books
        self._writeback = writeback
        self._filling = filling
        limits = books.limits.clustering
        self._waits = Waits(books.limits.waiting_max)
        self._holds = Holds(books, limits.lends_max, limits.lent_objects_max)
        self._loans: dict[tuple[int, int], list[Item]] = {}

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every hold and every loan that uses it."""
        yield from self._holds.items()
        for items in self._loans.values():
            yield from items

    # --- where

    def locate(self, asked: LocateAsked, now: float) -> None:
        """Answer at once, or when what is on NVMe has come, by the deadline at the latest."""
        shelf = self._books.catalog.shelves.get(asked.namespace)
        books = self._books
        behind = books.is_isolated(now) or books.flush_of(asked.namespace) < asked.flush
        if shelf is None or shelf.layout is None or behind:
            self._books.reply(asked.session, asked.call, Located(0, []))
            return
        if not is_sound(books, shelf.layout, asked) or not _is_seat(asked):
            self._books.reply(asked.session, asked.call, Located(0, []))
            return
        sights, request = self._books.sights, (shelf.digest, asked.peer, asked.request)
        if sights.first_time(request):
            sights.see(request, asked.digests, goes_on=True)
        route = route_of(shelf, shelf.layout, asked, (asked.first, asked.stop), asked.whole)
        self._writeback.consider_all(route.entries)
        items = _lacked(route, asked, _best(route, asked, in_host=False))
        coming = self.bring((asked.session, asked.request), items, asked.until, now)
        wait = Wait(asked, list(items), set(coming))
        if not coming or asked.deadline <= now or self._waits.is_full:
            self._answer(asked)
        else:
            self._waits.add(wait)

    def bring(
        self, name: Name, items: list[Item], until: float, now: float, also: Iterable[Item] = ()
    ) -> list[Item]:
        """Keep these under a name for a while, and send for those that are not in memory; return them.
        `also`: keep these as they are."""
        for segment in {item.nvme.segment for item in items if item.nvme is not None}:
            self._books.log.touch(segment)
        self._holds.keep(name, [*items, *also], until, now)
        return self._filling.start(
            [item for item in items if item.host is None and item.nvme is not None]
        )

    def _answer(self, asked: LocateAsked) -> None:
        shelf = self._books.catalog.shelves.get(asked.namespace)
        if shelf is None or shelf.layout is None:  # Cleared, and gone, while it waited.
            self._books.reply(asked.session, asked.call, Located(0, []))
            return
        layout = shelf.layout
        route = route_of(shelf, layout, asked, (asked.first, asked.stop), asked.whole)
        found = _best(route, asked, in_host=True)
        items = [item for item in _lacked(route, asked, found) if self._gives(item)]
        items = items[: self._books.limits.clustering.peer_objects_max]
        boundary = route.positions[found.position] if found.position >= 0 else 0
        self._books.counters.add("peer_answered", "found" if boundary else "not_found")
        records = [item.record for item in items]
        self._books.reply(asked.session, asked.call, Located(boundary, records))

    # --- what

    def lend(self, asked: LendAsked) -> None:
        """Lend what is in memory; for the rest, nothing."""
        lent: list[Item] = []
        objects: list[tuple[Extent, int, bytes] | None] = []
        for key, nbytes in asked.wanted:
            item = self._find(key)
            if item is None or item.host is None or item.nbytes != nbytes or not self._gives(item):
                objects.append(None)
                continue
            self._books.use(item)
            lent.append(item)
            objects.append((item.host, nbytes, item.checksum))
            self._books.counters.add("peer_lent_bytes", amount=nbytes)
        if lent:
            self._loans[asked.session, asked.call] = lent
        self._books.reply(asked.session, asked.call, Lent(objects))

    def _find(self, key: Key) -> Item | None:
        """Return the sealed object of that name."""
        shelf = self._books.catalog.shelves.get(key.namespace)
        slot = shelf.slots.get((key.part, key.shard, key.codec)) if shelf is not None else None
        if shelf is None or slot is None:
            return None
        item = self._books.catalog.find(shelf, slot, key.digest)
        return item if item is not None and item.status is Status.SEALED else None

    def _gives(self, item: Item) -> bool:
        """An object whose request said when it ends stays here: elsewhere nobody would know."""
        return not self._books.protection.expiry.is_own(item)

    def loan_over(self, session: int, call: int) -> None:
        """Nobody reads what that call was lent. Nothing may have been."""
        self._books.let_go_of(self._loans.pop((session, call), []))

    def summarise(self, asked: SummaryAsked) -> None:
        """Answer what changed in what this node could resume."""
        own = self._books.catalog.own
        told = own.since(asked.version) if own is not None else NOTHING
        self._books.reply(asked.session, asked.call, Summarised(*told))

    # --- time, and the end

    def arrived(self, items: list[Item]) -> None:
        """These objects came from NVMe, or failed to: answer whoever waits for nothing else."""
        for wait in self._waits.arrived(items):
            self._conclude(wait)

    def tick(self, now: float) -> None:
        """Answer every call whose time is up, and end every hold."""
        for wait in self._waits.late(now):
            self._conclude(wait)
        self._holds.tick(now)

    def _conclude(self, wait: Wait) -> None:
        assert isinstance(wait.asked, LocateAsked)
        self._answer(wait.asked)

    def wakeup(self) -> float | None:
        """Return when something is due next, or a time before."""
        due = [at for at in (self._waits.wakeup(), self._holds.wakeup()) if at is not None]
        return min(due, default=None)

    def close(self, session: int) -> None:
        """A connection ended. Its loans end by themselves."""
        self._waits.close(session)
        self._holds.close(session)

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        self._waits.check()
        self._holds.check()
        assert all(self._loans.values()), "an empty loan"


def _is_seat(asked: LocateAsked) -> bool:
    """Return whether the ranks that are asked for are some of those there are."""
    return 0 <= asked.first < asked.stop <= asked.ranks or asked.first == asked.stop == 0


def _best(route: Route, asked: LocateAsked, *, in_host: bool) -> Found:
    """Return the deepest boundary of use. One that is no deeper than what the asker has already does not
    hide what some ranks have: it goes with that."""
    found = for_all(route, asked.ranks, in_host=in_host)
    if not asked.some or (found.position >= 0 and route.positions[found.position] > route.given):
        return found
    some = for_some(route, asked.ranks, in_host=in_host)
    if some.position <= found.position:
        return found
    return Found(some.position, list(dict.fromkeys([*found.items, *some.items])))


def _lacked(route: Route, asked: LocateAsked, found: Found) -> list[Item]:
    """Return what a boundary rests on that the asker lacks."""
    items = found.items
    if asked.partial:
        items = list(dict.fromkeys([*items, *_runs(route)]))
    parts = {part.name for part in route.layout.parts if part.window is None}
    return [item for item in items if item.end > asked.whole or item.slot.part not in parts]


def _runs(route: Route) -> Iterator[Item]:
    """Yield what lies in memory along a route of parts that are runs of blocks, a boundary or not."""
    runs = {part.name for part in route.layout.parts if not part.is_snapshot}
    for entry in route.entries:
        for bit, item in entry.items.items():
            if entry.host >> bit & 1 and item.slot.part in runs:
                yield item
