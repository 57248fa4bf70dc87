"""The other side of `agreeing`: this node has some ranks of an engine whose plans another node makes."""

from typing import NamedTuple

from tiercache.core.advising import Advising
from tiercache.core.books import Books
from tiercache.core.catalog import Shelf
from tiercache.core.cluster.agreeing import ENDS_MAX
from tiercache.core.cluster.commands import Agreed
from tiercache.core.cluster.events import AgreeAsked
from tiercache.core.cluster.lending import Lending
from tiercache.core.cluster.walking import Asker, is_sound
from tiercache.core.events import Capture, PlanAsked
from tiercache.core.route import Route
from tiercache.core.writeback import WriteBack
from tiercache.state import Layout
from tiercache.state.seats import Seat


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
        self, books: Books, writeback: WriteBack, lending: Lending, advising: Advising
    ) -> None:
        self._books = books
        self._writeback = writeback
        self._lending = lending
        self._advising = advising

    def take(self, asked: AgreeAsked, now: float) -> None:
        """Answer at once. What the deepest of these boundaries rests on is kept for a while, and sent for
        if it is not in memory: the ranks here fetch it next."""
        books = self._books
        shelf = books.catalog.shelves.get(asked.namespace)
        behind = books.is_isolated(now) or books.flush_of(asked.namespace) < asked.flush
        ends: list[int] = []
        layout = shelf.layout if shelf is not None and not behind else None
        if shelf is not None and layout is not None and _is_sound(books, layout, asked):
            ends = self._ends(shelf, layout, asked, now)
        books.reply(asked.session, asked.call, Agreed(ends))

    def _ends(self, shelf: Shelf, layout: Layout, asked: AgreeAsked, now: float) -> list[int]:
        plan = _plan(asked)
        route = Route(shelf, layout)
        route.walk(plan, asked.limit)
        asker = Asker(asked.ranks, asked.first)
        name = (shelf.digest, asked.writer, asked.request)
        advice = self._advising.meet(name, plan, layout.block_tokens)
        self._writeback.consider_all(route.entries, route.way)
        wanted = set(asked.ends)
        found = [
            at
            for at in route.resumable(asker, route.deepest_known())
            if route.positions[at] in wanted
        ]
        boundary = route.positions[found[0]] if found else 0
        if found:
            items = route.chosen(asker, found[0], all_ranks=True)
            self._lending.bring((asked.session, asked.request), items, asked.until, now)
        checkpoints = self._advising.place(advice, asker, route, plan, boundary)
        stops = {*checkpoints, *advice.ends, advice.fork}
        self._books.passage.visited(shelf, name, plan, boundary, stops, now)
        return [route.positions[at] for at in found]


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
        seats=[Seat("", asked.first, asked.stop)],
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
