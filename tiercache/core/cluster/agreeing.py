"""One engine with ranks on several nodes: which boundary can be resumed by all of them.

The node that is asked for the plan names the boundaries that its own ranks could resume, and each other
node says which of them its ranks could, too. The deepest that all have is the answer. A node that does
not answer in time, or is not there, has none. What was agreed on is of one prompt, as it was stored then:
what was cleared since is asked about again.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf
from tiercache.core.cluster.commands import Agree
from tiercache.core.cluster.events import AgreeEnded
from tiercache.core.cluster.peers import Peer, Peers
from tiercache.core.cluster.walking import in_place, storable
from tiercache.core.events import PlanAsked
from tiercache.core.route import Route, terms_of
from tiercache.core.search import SEATED_SHARE, Search
from tiercache.state.seats import RanksOf

ENDS_MAX: Final = 1024
"""Boundaries that are asked about."""

AGREED_S_MAX: Final = 1.0
"""How long what was agreed on is believed, when the request plans again."""


class Agreement(NamedTuple):
    """A plan that waited, and the digests of the boundaries that all nodes have."""

    asked: PlanAsked
    ends: frozenset[bytes]


class _Round:
    """One plan, and the nodes that have not answered yet. `clears`: how often the shelf had been cleared
    by then. `kept`: what the deepest boundary rests on, in place until it is over."""

    __slots__ = ("asked", "clears", "ends", "kept", "left", "over", "shelf", "until")

    def __init__(self, asked: PlanAsked, shelf: Shelf, ends: frozenset[int], until: float) -> None:
        self.asked = asked
        self.shelf = shelf
        self.clears = shelf.clears
        self.ends = ends
        self.left = 0
        self.until = until
        self.kept: list[Item] = []
        self.over = not ends  # Nobody waits for it: the others are told of the prompt all the same.


class Agreeing:
    """Asks the nodes where the other ranks of an engine sit, once for each prompt of a request, and
    anew when it plans with other seats, or again after a while."""

    def __init__(self, books: Books, peers: Peers) -> None:
        self._books = books
        self._peers = peers
        self._rounds: dict[int, tuple[Peer, _Round]] = {}  # By the job of each question.

    def ask(
        self,
        session: Session,
        asked: PlanAsked,
        route: Route,
        now: float,
        search: Search | None = None,
    ) -> bool:
        """Ask about a plan whose ranks sit on several nodes; True when it has to wait for the answers.

        From then on the route gives out only what all agreed on: nothing, so far. `search`: what the
        plan has waited for; that is part of how long it may.
        """
        elsewhere = [seat for seat in asked.seats if seat.node]
        if not elsewhere:
            route.agreed = route.terms = None  # Every rank sits here.
            return False
        terms, limits = terms_of(asked), self._books.limits.clustering
        if route.terms is not None and route.terms[0] == terms and now < route.terms[1]:
            return False
        wait_s = limits.peer_answer_s_max
        began = search.began if search is not None else now
        until = max(began + wait_s, now + SEATED_SHARE * wait_s)
        route.agreed, route.terms = frozenset(), (terms, until + AGREED_S_MAX)
        if not asked.digests:
            return False
        step = route.layout.block_tokens
        deepest = route.deepest_known()
        resumable = route.resumable(session, deepest)
        found = [at for at in resumable if route.positions[at] % step == 0]
        ends = _some([route.positions[at] for at in found])
        peers = self._ready(elsewhere, now)
        if len(self._rounds) + len(peers) > limits.pulls_max:
            return False
        whole = frozenset(ends if len(peers) == len(elsewhere) else ())
        held = _Round(asked, route.shelf, whole, until)
        if not held.over:
            rests_on = route.chosen(session, found[0], all_ranks=True)
            held.kept = in_place(route.layout, (), rests_on)
            self._books.look_at(held.kept)
        for peer, seat in peers:
            self._send(session, held, route, (peer, seat), until - now)
        return not held.over

    def _ready(self, seats: Iterable[RanksOf], now: float) -> list[tuple[Peer, RanksOf]]:
        """Return the nodes of these seats that are there, and do well."""
        found = ((self._peers.get(seat.node), seat) for seat in seats)
        return [(peer, seat) for peer, seat in found if peer and peer.breaker.may_ask(now)]

    def _send(
        self,
        session: Session,
        held: _Round,
        route: Route,
        whom: tuple[Peer, RanksOf],
        wait_s: float,
    ) -> None:
        books, asked, (peer, seat) = self._books, held.asked, whom
        whole = len(asked.digests) * route.layout.block_tokens
        job = books.next_job()
        peer.breaker.asked()
        held.left += 1
        self._rounds[job] = (peer, held)
        books.out.append(
            Agree(
                job,
                peer.name,
                peer.boot,
                session.writer,
                asked.request,
                route.shelf.digest,
                asked.digests,
                asked.tokens,
                min(asked.limit, whole),
                session.ranks,
                seat.first,
                seat.stop,
                storable(asked.codecs, books),
                asked.reshard,
                _count(asked.capture.chunk_tokens, asked.tokens),
                _count(asked.capture.grain, asked.tokens),
                asked.care,
                books.flush_of(route.shelf.digest),
                sorted(held.ends),
                wait_s,
            )
        )

    def ended(self, event: AgreeEnded, now: float) -> list[Agreement]:
        """Take in what a node said; return the plan that waited for it, when nothing is missing now."""
        found = self._rounds.pop(event.job, None)
        if found is None:
            return []
        peer, held = found
        if event.fault is not None:
            peer.breaker.failed(now)
        else:
            peer.breaker.succeeded()
        self._count("failed" if event.fault is not None else "found" if event.ends else "not_found")
        held.left -= 1
        held.ends &= frozenset(event.ends if event.fault is None else ())
        if held.over or (held.left and held.ends):
            return []
        self._end(held)
        return [Agreement(held.asked, self._digests(held))]

    def _end(self, held: _Round) -> None:
        """Nobody waits for a round any more."""
        held.over = True
        kept, held.kept = held.kept, []
        self._books.let_go_of(kept)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every plan that waits and rests on it."""
        for held in {held for _, held in self._rounds.values()}:
            yield from held.kept

    def _digests(self, held: _Round) -> frozenset[bytes]:
        """Return what a round agreed on; nothing, if what is here now is not what was asked about."""
        shelf, layout = held.shelf, held.shelf.layout
        current = self._books.catalog.shelves.get(shelf.digest) is shelf
        if layout is None or not current or held.clears != shelf.clears:
            return frozenset()
        return frozenset(held.asked.digests[end // layout.block_tokens - 1] for end in held.ends)

    def tick(self, now: float) -> list[Agreement]:
        """Return the plans whose time is up: nothing was agreed on."""
        agreements = []
        for job in [job for job, (_, held) in self._rounds.items() if held.until <= now]:
            peer, held = self._rounds.pop(job)
            peer.breaker.failed(now)
            self._count("late")
            if not held.over:
                self._end(held)
                agreements.append(Agreement(held.asked, frozenset()))
        return agreements

    def _count(self, outcome: str) -> None:
        self._books.counters.add("agreements", outcome)

    def wakeup(self) -> float | None:
        """Return when the next plan's time is up."""
        return min((held.until for _, held in self._rounds.values()), default=None)

    def close(self, session: int) -> None:
        """The session is gone: none of its plans is answered any more."""
        for _, held in self._rounds.values():
            if held.asked.session == session:
                self._end(held)

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        sessions = self._books.sessions.keys()
        assert {
            held.asked.session for _, held in self._rounds.values() if not held.over
        } <= sessions


def _count(said: int, tokens: int) -> int:
    """Return a step that a client named, as one that has the same meaning for so many tokens and that
    every node takes."""
    return min(max(0, said), tokens + 1)


def _some(ends: list[int]) -> list[int]:
    """Return these boundaries, the deepest first. Of too many: the deepest half of what may be asked
    about, and others at even distances."""
    near = ENDS_MAX // 2
    beyond = max(0, len(ends) - near)
    step = 1 if len(ends) <= ENDS_MAX else -(-beyond // near)
    return [*ends[:near], *ends[near::step]]
