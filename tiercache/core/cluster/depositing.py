"""What this node gives to the pool: boundaries that have earned it, each as one set."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from tiercache.core.books import Books
from tiercache.core.catalog import Item, Shelf
from tiercache.core.cluster.breaker import Breaker
from tiercache.core.cluster.commands import Deposit
from tiercache.core.cluster.events import Deposited
from tiercache.core.cluster.peers import Peer
from tiercache.core.debt import ByteDebt
from tiercache.core.route import Ranked, Route
from tiercache.core.worth import is_slower
from tiercache.state.names import short

_Name: TypeAlias = tuple[bytes, bytes]
"""A namespace and a digest."""

AHEAD_S = 1.0
"""What would go to the pool in so much time may go at once: else one large boundary held up all others."""


class _Sending(NamedTuple):
    """A deposit on its way. `clears`: how often the shelf had been cleared by then."""

    name: _Name
    shelf: Shelf
    clears: int
    items: list[Item]


class Depositing:
    """Counts resumes, and gives a boundary to the pool at its second one.

    What it gives is in memory and stays there until the pool has let go of it; so there is a limit to how
    much of the memory that may be, and to how fast it goes. Nothing waits for its turn: what cannot go
    now may go at its next resume. A pool that fails, or is full, is left alone for a while.
    """

    def __init__(self, books: Books, pool: Peer | None) -> None:
        self._books = books
        self._pool = pool
        limits = books.limits.clustering
        self._breaker = Breaker(1, limits.peer_sick_s, limits.peer_sick_s_max)
        self._resumes: OrderedDict[_Name, tuple[int, int]] = OrderedDict()  # Clears, resumes.
        self._sending: dict[int, _Sending] = {}
        self._names: set[_Name] = set()
        self._room = 0  # Memory that stays as it is for them.
        self._debt = ByteDebt(limits.deposit_bytes_per_s)

    def __len__(self) -> int:
        """Deposits on their way."""
        return len(self._sending)

    def is_sick(self, now: float) -> bool:
        """Return whether nothing is given to the pool for now."""
        return self._breaker.is_sick(now)

    def in_jobs(self) -> Iterator[Item]:
        """Yield each item once for every deposit that uses it."""
        for sending in self._sending.values():
            yield from sending.items

    def resumed(
        self, route: Route, session: Ranked, boundary: int, now: float, *, counts: bool = True
    ) -> None:
        """A request resumes at a boundary of its route; `counts`: it was not said before."""
        if self._pool is None or not boundary or not _is_of_all(route, session):
            return
        position = bisect_left(route.positions, boundary)
        entry, shelf = route.entries[position], route.shelf
        if entry.base:  # Inside a block: nobody else would look for it.
            return
        name = (shelf.digest, entry.digest)
        clears, count = self._resumes.pop(name, (shelf.clears, 0))
        count = (count if clears == shelf.clears else 0) + counts
        self._resumes[name] = (shelf.clears, count)
        if len(self._resumes) > self._books.limits.clustering.resumes_max:
            self._resumes.popitem(last=False)
        earned = count >= self._books.limits.clustering.deposit_resumes_min
        if not earned or name in self._names or short(*name) in self._pool.names:
            return
        items = route.chosen(session, position, all_ranks=True)
        why = self._why_not(route, boundary, items, now)
        if why == "absent" and counts:
            return  # It comes, perhaps; then this is asked again.
        if why:
            self._books.counters.add("deposits", why)
            return
        self._send(name, route, boundary, items)
        self._debt.add(sum(item.nbytes for item in items), now)

    def _why_not(self, route: Route, boundary: int, items: Sequence[Item], now: float) -> str:
        books, pool = self._books, self._pool
        assert pool is not None
        limits = books.limits.clustering
        if any(item.host is None for item in items):
            return "absent"
        nbytes = sum(item.nbytes for item in items)
        room, most = _room(items), limits.deposit_share_max * books.space.capacity
        if any(books.protection.expiry.is_own(item) for item in items):
            return "ends"  # In the pool nobody would know of it.
        if not _is_even(items):
            return "mixed"
        if room > most or len(items) > limits.peer_objects_max:
            return "too_large"
        if is_slower(route.shelf, pool.pace, nbytes, (0, boundary)):
            return "slower"
        busy = len(self._sending) >= limits.deposits_max or self._room + room > most
        if busy or not self._breaker.may_ask(now) or pool.breaker.is_sick(now):
            return "busy"
        return "too_fast" if self._debt.wait_s(now) > AHEAD_S else ""

    def _send(self, name: _Name, route: Route, boundary: int, items: list[Item]) -> None:
        books, shelf = self._books, route.shelf
        job = books.next_job()
        self._sending[job] = _Sending(name, shelf, shelf.clears, items)
        self._names.add(name)
        self._room += _room(items)
        self._breaker.asked()
        objects = []
        for item in items:
            books.use(item)
            assert item.host is not None
            objects.append((item.record, item.host))
        flush = books.flush_of(shelf.digest)
        books.out.append(Deposit(job, shelf.digest, boundary, name[1], flush, objects))

    def ended(self, event: Deposited, now: float) -> None:
        """Take in what became of a deposit."""
        books = self._books
        sending = self._sending.pop(event.job)
        self._names.remove(sending.name)
        self._room -= _room(sending.items)
        nbytes = sum(item.nbytes for item in sending.items)
        books.let_go_of(sending.items)
        if event.fault is not None:
            self._breaker.failed(now)
            books.counters.add("deposits", event.fault.value)
            return
        self._breaker.succeeded()
        books.counters.add("deposits", "stored")
        books.counters.add("deposited_bytes", amount=nbytes)

    def check(self) -> None:
        """Raise AssertionError if the books of this do not add up."""
        sending = self._sending.values()
        assert {each.name for each in sending} == self._names
        assert sum(_room(each.items) for each in sending) == self._room
        assert len(self._resumes) <= self._books.limits.clustering.resumes_max


def _room(items: Sequence[Item]) -> int:
    """Return how many bytes of memory objects take that are all there."""
    return sum(item.host.size for item in items if item.host is not None)


def _is_of_all(route: Route, session: Ranked) -> bool:
    """Return whether the ranks that sit here have all shards: a set of some nobody would find."""
    first, stop = route.here
    every = (part.shards(session.ranks) for part in route.layout.parts)
    return not stop or all(set(shards[first:stop]) == set(shards) for shards in every)


def _is_even(items: Sequence[Item]) -> bool:
    """Return whether each part comes in one codec, and every block of it in the same shards: only then
    another node knows what to look for."""
    shards: dict[tuple[str, int], set[tuple[str, int, int]]] = {}
    for item in items:
        slot = item.slot
        shards.setdefault((slot.part, item.end), set()).add(
            (slot.codec, slot.shard.start, slot.shard.stop)
        )
    first: dict[str, set[tuple[str, int, int]]] = {}
    for (part, _), there in shards.items():
        if first.setdefault(part, there) != there or len({codec for codec, _, _ in there}) > 1:
            return False
    return True
