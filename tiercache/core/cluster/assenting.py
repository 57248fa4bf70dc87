"""The other side of `agreeing`: this node has some ranks of an engine whose plans another node makes."""

from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from tiercache.core.advising import Advising
from tiercache.core.books import Books
from tiercache.core.catalog import Item
from tiercache.core.cluster.agreeing import ENDS_MAX
from tiercache.core.cluster.commands import Agreed
from tiercache.core.cluster.events import AgreeAsked
from tiercache.core.cluster.lending import Lending
from tiercache.core.cluster.reach import Question, Reach
from tiercache.core.cluster.walking import Asker, in_place, is_sound
from tiercache.core.events import Capture, PlanAsked
from tiercache.core.route import Route
from tiercache.core.search import Search, Seat
from tiercache.core.worth import Worth
from tiercache.core.writeback import WriteBack
from tiercache.state import Layout
from tiercache.state.seats import RanksOf

KEPT_MAX: Final = 8
"""Boundaries whose states are kept for a while, the deepest ones: others may not have the first."""


class _Prompt(NamedTuple):
    """A prompt that another node plans, as `is_sound` takes it."""

    request: str
    digests: list[bytes]
    limit: int
    ranks: int
    codecs: tuple[str, ...]
    reshard: bool


class Assenting:
    """Answers `AgreeAsked`, and sees the prompt as if it had been planned here: what its ranks save is
    then judged alike on all nodes."""

    def __init__(
        self,
        books: Books,
        writeback: WriteBack,
        lending: Lending,
        advising: Advising,
        worth: Worth,
        reach: Reach,
    ) -> None:
        self._books = books
        self._writeback = writeback
        self._lending = lending
        self._advising = advising
        self._worth = worth
        self._reach = reach

    def take(self, asked: AgreeAsked, now: float) -> None:
        """Answer; where other nodes may have more of these boundaries for the ranks here, they are asked
        first, within the time that there is."""
        seat = Seat(asked.ranks, asked.first, asked.stop)
        last, ends = frozenset({asked.peer}), frozenset(asked.ends)
        self.go_on(asked, Search(now, seat, last=last, ends=ends, until=asked.deadline), now)

    def go_on(self, asked: AgreeAsked, search: Search, now: float) -> None:
        """Ask the next node, or answer. What the deepest of these boundaries rests on is kept for a
        while, and sent for if it is not in memory: the ranks here fetch it next. The states of some
        others are kept too.

        Between the two nodes' flushes nothing is answered: one stored anew what the other still has from
        before.
        """
        books = self._books
        shelf = books.catalog.shelves.get(asked.namespace)
        apart = books.is_isolated(now) or books.flush_of(asked.namespace) != asked.flush
        ends: list[int] = []
        layout = shelf.layout if shelf is not None and not apart else None
        if shelf is not None and layout is not None and _is_sound(books, layout, asked):
            plan = _plan(asked)
            route = Route(shelf, layout)
            route.walk(plan, asked.limit)
            if self._asks(asked, route, search, now):
                return
            ends = self._ends(asked, plan, route, now)
        books.reply(asked.session, asked.call, Agreed(ends))

    def _asks(self, asked: AgreeAsked, route: Route, search: Search, now: float) -> bool:
        """Ask another node; True when the answer waits for it."""
        if not asked.care.store or not self._reach.is_open:
            return False
        asker, wanted = Asker(asked.ranks, asked.first), frozenset(asked.ends)
        held = route.resumable(asker, route.deepest_known())
        position = next((at for at in held if route.positions[at] in wanted), -1)
        boundary = route.positions[position] if position >= 0 else 0
        deepest = min(max(wanted, default=0), asked.limit)
        digests = asked.digests[: deepest // route.layout.block_tokens]
        whole = partial(route.whole, asker)

        def kept() -> list[Item]:
            rests_on = route.chosen(asker, position, all_ranks=True)
            return in_place(route.layout, route.entries, rests_on)

        question = Question(asked, route.shelf, digests, 0, boundary, whole, kept)
        return self._reach.ask(search, question, now)

    def _ends(self, asked: AgreeAsked, plan: PlanAsked, route: Route, now: float) -> list[int]:
        shelf, layout = route.shelf, route.layout
        asker = Asker(asked.ranks, asked.first)
        name = (shelf.digest, asked.writer, asked.request)
        advice = self._advising.meet(name, plan, layout.block_tokens)
        self._writeback.consider_all(route.entries, route.way)
        found = self._found(route, asker, set(asked.ends))
        boundary = route.positions[found[0]] if found else 0
        self._books.protection.planned(route.entries, found[0] if found else -1, asked.care)
        if found:
            # Engines name their requests as they like: those of two may have one name.
            kept = asked.session, f"{asked.writer}\0{asked.request}"
            items = route.chosen(asker, found[0], all_ranks=True)
            also = _states(route, asker, found[1:KEPT_MAX])
            self._lending.bring(kept, items, asked.until, now, also)
        checkpoints = self._advising.place(advice, asker, route, plan, boundary)
        stops = {*checkpoints, *advice.ends, advice.fork}
        if not advice.passed:
            advice.passed = True
            self._books.passage.visited(shelf, name, plan, boundary, stops, now)
        return [route.positions[at] for at in found]

    def _found(self, route: Route, asker: Asker, wanted: set[int]) -> list[int]:
        """Return the positions of those boundaries that can be resumed, and are worth it, the deepest
        first: the ranks here are not asked again."""
        found = [
            at
            for at in route.resumable(asker, route.deepest_known())
            if route.positions[at] in wanted
        ]
        if not found:
            return []
        ready = route.deepest(asker, in_host=True, all_ranks=True)
        deepest = self._worth.of(route, asker, found[0], min(ready, found[0]))
        return [at for at in found if at <= deepest]


def _states(route: Route, asker: Asker, positions: list[int]) -> list[Item]:
    """Return what boundaries rest on that does not serve deeper ones too."""
    parts = {part.name for part in route.layout.parts if part.window is not None}
    if not parts:
        return []
    items = chain.from_iterable(route.chosen(asker, at, all_ranks=True) for at in positions)
    return [item for item in items if item.slot.part in parts]


def _plan(asked: AgreeAsked) -> PlanAsked:
    return PlanAsked(
        0,
        0,
        asked.request,
        "",
        "",
        asked.digests,
        asked.tokens,
        asked.limit,
        [],
        asked.codecs,
        Capture(asked.chunk_tokens, asked.grain),
        all_ranks=True,
        reshard=asked.reshard,
        care=asked.care,
        seats=[RanksOf("", asked.first, asked.stop)],
    )


def _is_sound(books: Books, layout: Layout, asked: AgreeAsked) -> bool:
    prompt = _Prompt(
        asked.request, asked.digests, asked.limit, asked.ranks, asked.codecs, asked.reshard
    )
    return (
        is_sound(books, layout, prompt)
        and len(asked.digests) == asked.tokens // layout.block_tokens
        and 0 <= asked.first < asked.stop <= asked.ranks
        and len(asked.ends) <= ENDS_MAX
        and len(asked.writer.encode()) <= books.limits.name_bytes_max
        and not asked.care.why_not()
    )
