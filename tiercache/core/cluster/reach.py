"""Plans that wait for what another node says."""

from typing import NamedTuple

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Shelf
from tiercache.core.cluster.agreeing import Agreeing
from tiercache.core.cluster.commands import Locate
from tiercache.core.cluster.events import LocateEnded, MembersSeen, PeerTold
from tiercache.core.cluster.peers import Peer, Peers
from tiercache.core.cluster.pulling import Pulling, fits
from tiercache.core.events import PlanAsked
from tiercache.core.route import Route


class Held(NamedTuple):
    """A plan that waits, whom it waits for, and until when. `clears`: how often the shelf had been
    cleared by then."""

    asked: PlanAsked
    shelf: Shelf
    clears: int
    peer: Peer
    until: float


class Reach:
    """Asks another node where a prompt could be resumed, when one has told that it may be deeper.

    One node is asked for one request, once. What it has is brought at once: then it is on its way,
    whatever becomes of the request.
    """

    def __init__(self, books: Books, pulling: Pulling) -> None:
        self._books = books
        self._pulling = pulling
        self.peers = self._peers = Peers(books.limits.clustering, books.limits.sample_bytes_min)
        self._held: dict[int, Held] = {}
        self.agreeing = Agreeing(books, self._peers)

    def __len__(self) -> int:
        """Other nodes that are there."""
        return len(self._peers)

    def members(self, event: MembersSeen) -> None:
        """These nodes are there now."""
        self._peers.members(event.boots)

    def told(self, event: PeerTold) -> None:
        """A node said what it could resume."""
        peer = self._peers.get(event.peer)
        if peer is None or peer.boot != event.boot:
            return
        # It may have been told before the node was away, and come after: then what it adds to is gone.
        if event.whole or event.since == peer.version:
            self._peers.told(
                event.peer, event.version, event.added, event.removed, whole=event.whole
            )

    def version(self, peer: str) -> int:
        """Return up to which version that node's summary is known; -1 when nothing is."""
        known = self._peers.get(peer)
        return known.version if known is not None else -1

    def ask(
        self, session: Session, asked: PlanAsked, route: Route, boundary: int, now: float
    ) -> bool:
        """Ask a node that may resume deeper than `boundary`; True when the plan has to wait for it."""
        books = self._books
        limits = books.limits.clustering
        if route.reached_out or not len(self._peers) or len(self._held) >= limits.pulls_max:
            return False
        shelf = route.shelf
        route.reached_out = True
        step = route.layout.block_tokens
        digests = asked.digests[: asked.limit // step]
        count, peers = self._peers.deepest(shelf.digest, digests, boundary // step, now)
        source = self._peers.get(asked.source) if asked.source else None
        if source is not None and source.breaker.may_ask(now) and boundary // step < len(digests):
            count, peers = len(digests), [source]
        if not peers:
            return False
        peer, job = peers[0], books.next_job()
        peer.breaker.asked()
        until = now + limits.peer_answer_s_max
        self._held[job] = Held(asked, shelf, shelf.clears, peer, until)
        books.out.append(
            Locate(
                job,
                peer.name,
                peer.boot,
                asked.request,
                shelf.digest,
                digests[:count],
                min(asked.limit, count * step),
                route.whole(session),
                session.ranks,
                asked.codecs,
                asked.reshard,
                books.flush_of(shelf.digest),
            )
        )
        return True

    def located(self, event: LocateEnded, now: float) -> PlanAsked | None:
        """Take in what a node said; return the plan that waited for it, None when none does any more."""
        held = self._held.pop(event.job, None)
        if held is None:
            return None
        shelf, layout, digests = held.shelf, held.shelf.layout, held.asked.digests
        assert layout is not None
        sound = [
            record
            for record in event.records
            if record.key.namespace == shelf.digest
            and record.end <= event.boundary <= held.asked.limit
            and fits(record, layout, digests)
        ]
        failed = event.fault is not None or len(sound) < len(event.records)
        if failed:
            held.peer.breaker.failed(now)
        else:
            held.peer.breaker.succeeded()
        outcome = "failed" if failed else "found" if sound else "not_found"
        self._books.counters.add("peer_asked", outcome)
        # What was there before a clear may be on its way until after it.
        current = self._books.catalog.shelves.get(shelf.digest) is shelf
        if event.fault is None and current and held.clears == shelf.clears:
            self._pulling.start(shelf, held.peer, sound, now)
        return held.asked

    def tick(self, now: float) -> list[PlanAsked]:
        """Return the plans whose time is up; a node that is late counts as one that failed."""
        late = [job for job, held in self._held.items() if held.until <= now]
        plans = []
        for job in late:
            held = self._held.pop(job)
            held.peer.breaker.failed(now)
            self._books.counters.add("peer_asked", "late")
            plans.append(held.asked)
        return plans

    def wakeup(self) -> float | None:
        """Return when the next plan's time is up."""
        return min((held.until for held in self._held.values()), default=None)

    def close(self, session: int) -> None:
        """The session is gone: none of its plans is answered any more."""
        for job in [job for job, held in self._held.items() if held.asked.session == session]:
            self._held.pop(job).peer.breaker.withdrawn()

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        self._peers.check()
        assert {held.asked.session for held in self._held.values()} <= self._books.sessions.keys()
