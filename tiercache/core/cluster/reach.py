"""Plans and surveys that wait for what another node says."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple, TypeAlias

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Item, Shelf
from tiercache.core.cluster.agreeing import Agreeing
from tiercache.core.cluster.commands import Locate
from tiercache.core.cluster.depositing import Depositing
from tiercache.core.cluster.events import AgreeAsked, LocateEnded, MembersSeen, PeerTold
from tiercache.core.cluster.peers import POOL, Peer, Peers, Whom
from tiercache.core.cluster.pulling import Pulling, fits
from tiercache.core.cluster.walking import storable
from tiercache.core.events import PlanAsked, SurveyAsked
from tiercache.core.search import Search, Seat
from tiercache.core.sights import Request
from tiercache.core.worth import PROBE_EVERY, is_slower
from tiercache.state import Layout, Record, Shard

Asked: TypeAlias = PlanAsked | SurveyAsked | AgreeAsked


FAIR_SHARE: Final = 0.25
"""Who is late says nothing of itself if it had less than so much of what it may take: others took the
time."""


class Question(NamedTuple):
    """What a call would like to know of another node: whether a path leads deeper than `boundary`.

    `digests`: of consecutive whole blocks, which `start` tokens come before, -1 when nobody knows;
    `boundary` counts from there. `whole()` says how many tokens of the prompt need not be sent, since all
    ranks that count have them; `kept()`, what it could go on from here: that stays in place meanwhile, also
    while room is made for what comes.
    `source`: a node to ask whatever it has told.
    """

    asked: Asked
    shelf: Shelf
    digests: list[bytes]
    start: int
    boundary: int
    whole: Callable[[], int]
    kept: Callable[[], list[Item]]
    source: str = ""


class Held(NamedTuple):
    """Calls that wait, for which path, whom they wait for, and until when. `clears`: how often the shelf
    had been cleared by then. `boundary`: where a request could go on without; -1 for a survey.
    `fair`: there was time enough to tell who is ill. `kept`: what stays in place."""

    asked: list[Asked]
    shelf: Shelf
    clears: int
    digests: list[bytes]
    start: int
    peer: Peer
    until: float
    boundary: int
    search: Search
    fair: bool
    kept: list[Item]


class Waited(NamedTuple):
    """A call that waited for another node, and may ask the next one."""

    asked: Asked
    search: Search


class Reach:
    """Asks other nodes where a prompt could be resumed, when one has told that it may be deeper.

    One is asked after another, as long as one may lead deeper than what is known by then: each request
    looks for others once. What a node has is brought at once: then it is on its way, whatever becomes of
    the request.
    """

    def __init__(self, books: Books, pulling: Pulling) -> None:
        self._books = books
        self.pulling = pulling
        self.peers = self._peers = Peers(books.limits.clustering, books.limits.sample_bytes_min)
        self._held: dict[int, Held] = {}
        self.agreeing = Agreeing(books, self._peers)
        self._recent: OrderedDict[Request, Search] = OrderedDict()  # Of surveys.
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
        """Like `ask`, but one search for all ranks and repetitions of a request: who asks while a
        question is under way waits for the same answer."""
        name = session.scoped(question.shelf, question.asked.request)
        search = self._recent.get(name) or Search(now, Seat(session.ranks))
        held = self._held.get(search.job)
        if held is not None:
            held.asked.append(question.asked)
            held.kept.extend(self._keep(question))
            return True
        if not self.ask(search, question, now):
            return False  # One that asked nobody has not begun: others may tell of the path later.
        self._recent[name] = search
        if len(self._recent) > self._books.limits.surveys_max:
            self._recent.popitem(last=False)
        return True

    def is_asking(self, search: Search) -> bool:
        """Whether a question of this search is under way."""
        return search.job in self._held

    def ask(self, search: Search, question: Question, now: float) -> bool:
        """Ask the next node that may resume deeper; True when the call has to wait for it. Only while it
        `is_open`."""
        question = question._replace(whole=cache(question.whole))
        count, peer = self._next(search, question, now)
        if peer is None:
            return False
        question = question._replace(digests=question.digests[:count])
        within_s = self._within_s(peer.name)
        search.asks(peer.name, question.whole(), within_s)
        _, other = self._next(search, question, now)
        next_s = self._within_s(other.name) if other is not None else 0.0
        self._send(search, question, peer, search.waits(now, within_s, next_s), now)
        return True

    def _within_s(self, name: str) -> float:
        limits = self._books.limits.clustering
        return limits.pool_answer_s_max if name == POOL else limits.peer_answer_s_max

    def _next(self, search: Search, question: Question, now: float) -> tuple[int, Peer | None]:
        """Return whom to ask next, and how many blocks lead to what may be there."""
        shelf, digests = question.shelf, question.digests
        assert shelf.layout is not None
        step = shelf.layout.block_tokens
        above = question.boundary // step
        if above >= len(digests):
            return 0, None

        def has_time(name: str) -> bool:
            return search.has_time(now, self._within_s(name))

        def below(name: str) -> float:
            return search.below(name, question.whole) if has_time(name) else 0

        source = self._peers.get(question.source) if question.source else None
        if (
            source is not None
            and source.breaker.may_ask(now)
            and has_time(source.name)
            and not search.has_asked(source.name)
        ):
            return len(digests), source
        ends = search.ends
        counts = (
            frozenset(end // step for end in ends if end % step == 0) if ends is not None else None
        )
        whom = Whom((shelf.digest, *search.seat), below, search.last, counts)
        count, peers = self._peers.deepest(shelf.digest, digests, above, now, whom)
        return count, peers[0] if peers else None

    def _send(
        self, search: Search, question: Question, peer: Peer, until: float, now: float
    ) -> None:
        books, asked, shelf = self._books, question.asked, question.shelf
        assert shelf.layout is not None
        search.job = job = books.next_job()
        peer.breaker.asked()
        reshard = not isinstance(asked, SurveyAsked) and asked.reshard
        survey = isinstance(asked, SurveyAsked)
        self._held[job] = Held(
            [asked],
            shelf,
            shelf.clears,
            question.digests,
            question.start,
            peer,
            until,
            -1 if survey else question.boundary,
            search,
            until - now >= FAIR_SHARE * self._within_s(peer.name),
            self._keep(question),
        )
        books.out.append(
            Locate(
                job,
                peer.name,
                peer.boot,
                asked.request,
                shelf.digest,
                question.digests,
                len(question.digests) * shelf.layout.block_tokens,
                question.whole(),
                search.seat.ranks,
                storable(asked.codecs, books),
                reshard,
                books.flush_of(shelf.digest),
                first=search.seat.first,
                stop=search.seat.stop,
                some=reshard or (search.seat.ranks > 1 and not survey),
                wait_s=until - now,
            )
        )

    def _keep(self, question: Question) -> list[Item]:
        items = question.kept()
        self._books.look_at(items)
        return items

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every call that waits and could go on from it."""
        for held in self._held.values():
            yield from held.kept

    def located(self, event: LocateEnded, now: float) -> list[Waited]:
        """Take in what a node said; return the calls that waited for it, [] when none does any more."""
        held = self._held.pop(event.job, None)
        if held is None:
            return []
        shelf, layout = held.shelf, held.shelf.layout
        assert layout is not None
        step, search = layout.block_tokens, held.search
        start = held.start
        if start < 0:
            start = _start(event.records, held.digests, step)
        deepest = min(event.boundary, len(held.digests) * step)
        sound = [
            record
            for record in event.records
            if record.key.namespace == shelf.digest
            and record.end - start <= deepest
            and fits(record, layout, held.digests, start)
        ]
        failed = event.fault is not None or len(sound) < len(event.records)
        late = event.fault is not None and now >= held.until
        if late:
            _was_late(held, now)
        elif failed:
            held.peer.breaker.failed(now)
        else:
            held.peer.breaker.succeeded()
        # One that knows nothing of seats sends what all ranks need.
        sound = [record for record in sound if _is_of(record, layout, search.seat)]
        if deepest < len(held.digests) * step and not failed:
            of_use = search.ends is None or deepest in search.ends
            sound = sound if of_use else []
            below = 0 if of_use else deepest // step
            search.fell_short(held.peer.name, start + deepest, below)
        if not failed and search.seat.stop:
            held.peer.lacks((shelf.digest, *search.seat), nothing=not sound)
        declined = not failed and self._declines(held, deepest, sound)
        outcome = "found" if sound else "not_found"
        if failed:
            outcome = "late" if late else "failed"
        self._count(held.peer, "slower" if declined else outcome)
        # What was there before a clear may be on its way until after it.
        current = self._books.catalog.shelves.get(shelf.digest) is shelf
        if not (current and held.clears == shelf.clears):
            search.over()
        elif event.fault is None and not declined:
            self.pulling.start(shelf, held.peer, sound, now)
        self._books.let_go_of(held.kept)
        return [Waited(asked, search) for asked in held.asked]

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

    def tick(self, now: float) -> list[Waited]:
        """Return the calls whose time is up; a node that is late counts as one that failed, if it had
        time."""
        late = [job for job, held in self._held.items() if held.until <= now]
        calls: list[Waited] = []
        for job in late:
            held = self._held.pop(job)
            _was_late(held, now)
            self._books.let_go_of(held.kept)
            self._count(held.peer, "late")
            calls += [Waited(asked, held.search) for asked in held.asked]
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
                self._books.let_go_of(held.kept)

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        self._peers.check()
        self.deposits.check()
        waiting = [asked for held in self._held.values() for asked in held.asked]
        own = {asked.session for asked in waiting if not isinstance(asked, AgreeAsked)}
        assert own <= self._books.sessions.keys()
        assert all(held.asked for held in self._held.values()), "a question of nobody"
        assert all(held.search.job == job for job, held in self._held.items()), "two at once"
        assert len(self._recent) <= self._books.limits.surveys_max


def _was_late(held: Held, now: float) -> None:
    if held.fair:
        held.peer.breaker.failed(now)
    else:
        held.peer.breaker.withdrawn()


def _is_of(record: Record, layout: Layout, seat: Seat) -> bool:
    """Return whether the ranks of a seat need anything of a record that fits."""
    if not seat.stop:
        return True
    key = record.key
    own = layout.part(key.part).shards(seat.ranks)[seat.first : seat.stop]
    return any(_overlap(shard, key.shard) for shard in own)


def _overlap(one: Shard, other: Shard) -> bool:
    return one.start < other.stop and other.start < one.stop


def _start(records: Sequence[Record], digests: Sequence[bytes], step: int) -> int:
    """Return how many tokens come before a path, as most of the records on it say; whole blocks do, so that
    others count for nothing. Of two numbers that as many say, the smaller one."""
    at = {digest: number * step for number, digest in enumerate(digests, 1)}
    said = (record.end - at[record.key.digest] for record in records if record.key.digest in at)
    votes = Counter(start for start in said if start >= 0 and start % step == 0)
    return min(votes, key=lambda start: (-votes[start], start), default=0)
