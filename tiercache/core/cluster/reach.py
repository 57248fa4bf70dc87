"""Plans and surveys that wait for what another node says."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Shelf
from tiercache.core.cluster.agreeing import Agreeing
from tiercache.core.cluster.commands import Locate
from tiercache.core.cluster.depositing import Depositing
from tiercache.core.cluster.events import LocateEnded, MembersSeen, PeerTold
from tiercache.core.cluster.peers import Peer, Peers
from tiercache.core.cluster.pulling import Pulling, fits
from tiercache.core.cluster.walking import storable
from tiercache.core.events import PlanAsked, SurveyAsked
from tiercache.core.sights import Request
from tiercache.core.worth import PROBE_EVERY, is_slower
from tiercache.state import Record

Asked: TypeAlias = PlanAsked | SurveyAsked


class Question(NamedTuple):
    """What a call would like to know of another node: whether a path leads deeper than `boundary`.

    `digests`: of consecutive whole blocks, which `start` tokens come before, -1 when nobody knows;
    `boundary` counts from there. `whole()` says how many tokens of the prompt need not be sent, since all
    ranks have them.
    `source`: a node to ask whatever it has told.
    """

    asked: Asked
    shelf: Shelf
    digests: list[bytes]
    start: int
    boundary: int
    whole: Callable[[], int]
    source: str = ""


class Held(NamedTuple):
    """Calls that wait, for which path, whom they wait for, and until when. `clears`: how often the shelf
    had been cleared by then. `boundary`: where a plan could go on without; -1 for a survey."""

    asked: list[Asked]
    shelf: Shelf
    clears: int
    digests: list[bytes]
    start: int
    peer: Peer
    until: float
    boundary: int


class Reach:
    """Asks another node where a prompt could be resumed, when one has told that it may be deeper.

    One node is asked for one request, once. What it has is brought at once: then it is on its way,
    whatever becomes of the request.
    """

    def __init__(self, books: Books, pulling: Pulling) -> None:
        self._books = books
        self.pulling = pulling
        self.peers = self._peers = Peers(books.limits.clustering, books.limits.sample_bytes_min)
        self._held: dict[int, Held] = {}
        self.agreeing = Agreeing(books, self._peers)
        self._recent: OrderedDict[Request, int] = OrderedDict()  # Whose question which job is.
        self._slower = 0
        self.deposits = Depositing(books, self._peers.pool)

    def __len__(self) -> int:
        """Other nodes that are there."""
        return len(self._peers)

    def members(self, event: MembersSeen) -> None:
        """These nodes are there now."""
        self._peers.members(event.boots)

    def told(self, event: PeerTold) -> None:
        """A node said what it could resume."""
        peer = self._peers.teller(event.peer)
        if peer is None or peer.boot != event.boot:
            return
        # It may have been told before the node was away, and come after: then what it adds to is gone.
        if event.whole or event.since == peer.version:
            self._peers.told(
                event.peer, event.version, event.added, event.removed, whole=event.whole
            )

    def version(self, peer: str) -> int:
        """Return up to which version that node's summary is known; -1 when nothing is."""
        known = self._peers.teller(peer)
        return known.version if known is not None else -1

    @property
    def is_open(self) -> bool:
        """Whether there is anybody to ask, and room for a question."""
        return (
            not self._peers.is_empty and len(self._held) < self._books.limits.clustering.pulls_max
        )

    def ask_once(self, session: Session, question: Question, now: float) -> bool:
        """Like `ask`, but one question for all ranks and repetitions of a request: who asks while it is
        under way waits for the same answer."""
        name = session.scoped(question.shelf, question.asked.request)
        job = self._recent.get(name)
        if job is not None:
            held = self._held.get(job)
            if held is not None:
                held.asked.append(question.asked)
            return held is not None
        if not self.ask(session, question, now):
            return False
        self._recent[name] = next(reversed(self._held))
        if len(self._recent) > self._books.limits.surveys_max:
            self._recent.popitem(last=False)
        return True

    def ask(self, session: Session, question: Question, now: float) -> bool:
        """Ask a node that may resume deeper; True when the call has to wait for it. Only while it
        `is_open`."""
        books = self._books
        asked, shelf, digests, start, boundary, whole, source_name = question
        assert shelf.layout is not None
        step = shelf.layout.block_tokens
        count, peers = self._peers.deepest(shelf.digest, digests, boundary // step, now)
        source = self._peers.get(source_name) if source_name else None
        if source is not None and source.breaker.may_ask(now) and boundary // step < len(digests):
            count, peers = len(digests), [source]
        if not peers:
            return False
        peer, job = peers[0], books.next_job()
        peer.breaker.asked()
        pooled = peer is self._peers.pool
        limits = books.limits.clustering
        until = now + (limits.pool_answer_s_max if pooled else limits.peer_answer_s_max)
        goes_on = boundary if isinstance(asked, PlanAsked) else -1
        self._held[job] = Held(
            [asked], shelf, shelf.clears, digests[:count], start, peer, until, goes_on
        )
        books.out.append(
            Locate(
                job,
                peer.name,
                peer.boot,
                asked.request,
                shelf.digest,
                digests[:count],
                count * step,
                whole(),
                session.ranks,
                storable(asked.codecs, books),
                isinstance(asked, PlanAsked) and asked.reshard,
                books.flush_of(shelf.digest),
            )
        )
        return True

    def located(self, event: LocateEnded, now: float) -> list[Asked]:
        """Take in what a node said; return the calls that waited for it, [] when none does any more."""
        held = self._held.pop(event.job, None)
        if held is None:
            return []
        shelf, layout = held.shelf, held.shelf.layout
        assert layout is not None
        start = held.start
        if start < 0:
            start = _start(event.records, held.digests, layout.block_tokens)
        deepest = min(event.boundary, len(held.digests) * layout.block_tokens)
        sound = [
            record
            for record in event.records
            if record.key.namespace == shelf.digest
            and record.end - start <= deepest
            and fits(record, layout, held.digests, start)
        ]
        failed = event.fault is not None or len(sound) < len(event.records)
        if failed:
            held.peer.breaker.failed(now)
        else:
            held.peer.breaker.succeeded()
        declined = not failed and self._declines(held, event.boundary, sound)
        outcome = "failed" if failed else "found" if sound else "not_found"
        self._count(held.peer, "slower" if declined else outcome)
        # What was there before a clear may be on its way until after it.
        current = self._books.catalog.shelves.get(shelf.digest) is shelf
        if event.fault is None and current and held.clears == shelf.clears and not declined:
            self.pulling.start(shelf, held.peer, sound, now)
        return held.asked

    def _declines(self, held: Held, boundary: int, records: list[Record]) -> bool:
        """Return whether it takes longer to fetch these than to compute what they spare. Now and then they
        are fetched all the same: the way may have become faster."""
        if held.boundary < 0:
            return False
        nbytes = sum(record.nbytes for record in records)
        tokens = (held.boundary, max(boundary, held.boundary))
        if not records or not is_slower(held.shelf, held.peer.pace, nbytes, tokens):
            return False
        self._slower += 1
        return self._slower % PROBE_EVERY != 0

    def _count(self, peer: Peer, outcome: str) -> None:
        name = "pool_asked" if peer is self._peers.pool else "peer_asked"
        self._books.counters.add(name, outcome)

    def tick(self, now: float) -> list[Asked]:
        """Return the calls whose time is up; a node that is late counts as one that failed."""
        late = [job for job, held in self._held.items() if held.until <= now]
        calls: list[Asked] = []
        for job in late:
            held = self._held.pop(job)
            held.peer.breaker.failed(now)
            self._count(held.peer, "late")
            calls += held.asked
        return calls

    def wakeup(self) -> float | None:
        """Return when the next call's time is up."""
        return min((held.until for held in self._held.values()), default=None)

    def close(self, session: int) -> None:
        """The session is gone: none of its calls is answered any more."""
        for job, held in list(self._held.items()):
            held.asked[:] = [asked for asked in held.asked if asked.session != session]
            if not held.asked:
                del self._held[job]
                held.peer.breaker.withdrawn()

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        self._peers.check()
        self.deposits.check()
        waiting = [asked.session for held in self._held.values() for asked in held.asked]
        assert set(waiting) <= self._books.sessions.keys()
        assert all(held.asked for held in self._held.values()), "a question of nobody"
        assert len(self._recent) <= self._books.limits.surveys_max


def _start(records: Sequence[Record], digests: Sequence[bytes], step: int) -> int:
    """Return how many tokens come before a path, as the first record on it says."""
    at = {digest: number * step for number, digest in enumerate(digests, 1)}
    said = (record.end - at[record.key.digest] for record in records if record.key.digest in at)
    return max(0, next(said, 0))
