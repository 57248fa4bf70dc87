"""Handing a request over: what one node computed is brought to the node that goes on with it.

The node that has it tells the other one to come and take it, and hears how far that one could go on. It
may do so again and again while the prompt is still being computed: each time, what is new is brought.
"""

from typing import NamedTuple

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf
from tiercache.core.cluster.commands import Announce, Locate, Taken
from tiercache.core.cluster.events import Announced, AnnounceEnded, LocateEnded
from tiercache.core.cluster.peers import Peer, Peers
from tiercache.core.cluster.pulling import Pulling, fits
from tiercache.core.cluster.walking import Asker, is_sound, route_of, storable
from tiercache.core.commands import Pushed
from tiercache.core.events import PushAsked


class Taking(NamedTuple):
    """What this node was told to come and take. `clears`: how often the shelf had been cleared by then."""

    told: Announced
    shelf: Shelf
    clears: int
    peer: Peer


class Coming(NamedTuple):
    """A taking whose objects are on their way."""

    taking: Taking
    missing: set[Item]


class Handing:
    """Answers `PushAsked` of this node's engines and `Announced` of other nodes."""

    def __init__(self, books: Books, peers: Peers, pulling: Pulling) -> None:
        self._books = books
        self._peers = peers
        self._pulling = pulling
        self._pushes: dict[int, tuple[PushAsked, Peer]] = {}
        self._takings: dict[int, Taking] = {}
        self._coming: list[Coming] = []

    def __len__(self) -> int:
        """Requests that are being handed over, in either direction."""
        return len(self._pushes) + len(self._takings) + len(self._coming)

    # --- the node that has it

    def push(self, session: Session, shelf: Shelf, asked: PushAsked, now: float) -> None:
        """Tell another node to come and take what is held of this prompt."""
        books, peer = self._books, self._peers.get(asked.to)
        if peer is None:
            self._pushed(asked, 0, "unknown_node")
        elif not peer.breaker.may_ask(now) or len(self) >= books.limits.clustering.pulls_max:
            self._pushed(asked, 0, "busy")
        else:
            job = books.next_job()
            peer.breaker.asked()
            self._pushes[job] = (asked, peer)
            books.out.append(
                Announce(
                    job,
                    peer.name,
                    peer.boot,
                    asked.request,
                    shelf.digest,
                    asked.digests,
                    asked.limit,
                    session.ranks,
                    storable(asked.codecs, books),
                    asked.reshard,
                    books.flush_of(shelf.digest),
                    max(0.0, asked.deadline - now),
                )
            )

    def announced(self, event: AnnounceEnded, now: float) -> None:
        """The other node said how far it can go on, or did not say."""
        found = self._pushes.pop(event.job, None)
        if found is None:
            return
        asked, peer = found
        if event.fault is None:
            peer.breaker.succeeded()
            self._pushed(asked, event.boundary, "" if event.boundary else "not_taken")
        else:
            peer.breaker.failed(now)
            self._pushed(asked, 0, "unavailable")

    def _pushed(self, asked: PushAsked, boundary: int, reason: str) -> None:
        self._books.counters.add("pushes", reason or "taken")
        if asked.session in self._books.sessions:
            self._books.reply(asked.session, asked.call, Pushed(boundary, reason))

    # --- the node that takes it

    def take(self, told: Announced, now: float) -> None:
        """Ask the node that told for what it has of the prompt, whether it can be resumed yet or not."""
        books = self._books
        shelf, peer = books.catalog.shelves.get(told.namespace), self._peers.get(told.peer)
        if (
            shelf is None
            or shelf.layout is None
            or peer is None
            or not is_sound(books, shelf.layout, told)
            or len(self) >= books.limits.clustering.pulls_max
            or told.deadline <= now
        ):
            self._taken(told, 0)
            return
        job = books.next_job()
        peer.breaker.asked()
        self._takings[job] = Taking(told, shelf, shelf.clears, peer)
        route = route_of(shelf, shelf.layout, told)
        books.out.append(
            Locate(
                job,
                peer.name,
                peer.boot,
                told.request,
                shelf.digest,
                told.digests,
                told.limit,
                route.whole(Asker(told.ranks)),
                told.ranks,
                told.codecs,
                told.reshard,
                max(told.flush, books.flush_of(shelf.digest)),
                partial=True,
            )
        )

    def located(self, event: LocateEnded, now: float) -> bool:
        """Take in what the node has; False when it was not asked on behalf of a handing over."""
        taking = self._takings.pop(event.job, None)
        if taking is None:
            return False
        told, shelf, layout = taking.told, taking.shelf, taking.shelf.layout
        assert layout is not None
        sound = [
            record
            for record in event.records
            if record.key.namespace == shelf.digest
            and record.end <= told.limit
            and fits(record, layout, told.digests)
        ]
        if event.fault is not None or len(sound) < len(event.records):
            taking.peer.breaker.failed(now)
        else:
            taking.peer.breaker.succeeded()
        current = self._books.catalog.shelves.get(shelf.digest) is shelf
        missing: set[Item] = set()
        if event.fault is None and current and taking.clears == shelf.clears:
            missing = set(self._pulling.start(shelf, taking.peer, sound, now))
        if missing:
            self._coming.append(Coming(taking, missing))
        else:
            self._conclude(taking)
        return True

    def arrived(self, items: list[Item]) -> None:
        """These objects came, or failed to: answer whoever waits for nothing else."""
        for coming in list(self._coming):
            coming.missing.difference_update(items)
            if not coming.missing:
                self._coming.remove(coming)
                self._conclude(coming.taking)

    def tick(self, now: float) -> None:
        """Answer every node whose time is up."""
        for job, taking in list(self._takings.items()):
            if taking.told.deadline <= now:
                del self._takings[job]
                taking.peer.breaker.failed(now)
                self._conclude(taking)
        for coming in list(self._coming):
            if coming.taking.told.deadline <= now:
                self._coming.remove(coming)
                self._conclude(coming.taking)
        for job, (asked, peer) in list(self._pushes.items()):
            if asked.deadline <= now:
                del self._pushes[job]
                peer.breaker.failed(now)
                self._pushed(asked, 0, "deadline")

    def wakeup(self) -> float | None:
        """Return when the next one's time is up."""
        ends = [taking.told.deadline for taking in self._takings.values()]
        ends += [coming.taking.told.deadline for coming in self._coming]
        ends += [asked.deadline for asked, _ in self._pushes.values()]
        return min(ends, default=None)

    def _conclude(self, taking: Taking) -> None:
        told, shelf = taking.told, taking.shelf
        boundary = 0
        if self._books.catalog.shelves.get(shelf.digest) is shelf and shelf.layout is not None:
            route = route_of(shelf, shelf.layout, told)
            position = route.deepest(Asker(told.ranks), in_host=True, all_ranks=True)
            boundary = route.positions[position] if position >= 0 else 0
        self._taken(told, boundary)

    def _taken(self, told: Announced, boundary: int) -> None:
        self._books.reply(told.session, told.call, Taken(boundary))
