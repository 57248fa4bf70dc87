"""The way of a prompt that another node asks about, through what this node holds."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tiercache.core.books import Books
from tiercache.core.catalog import Entry, Item, Shelf
from tiercache.core.events import Capture, PlanAsked
from tiercache.core.route import Route
from tiercache.state import Layout
from tiercache.state.canonical import DIGEST_BYTES


class Asker(NamedTuple):
    """Another node's engine, as far as its ranks go."""

    ranks: int
    rank: int = 0


class Sought(NamedTuple):
    """A prompt that is looked for here, as `route_of` takes it."""

    request: str
    digests: list[bytes]
    limit: int
    ranks: int
    codecs: tuple[str, ...]
    reshard: bool


class Prompt(Protocol):
    """A prompt that another node speaks of. Nothing in it is known to make sense."""

    @property
    def request(self) -> str:
        """The request's name over there."""
        ...

    @property
    def digests(self) -> list[bytes]:
        """Of its whole blocks, in order."""
        ...

    @property
    def limit(self) -> int:
        """The deepest boundary of use, in tokens."""
        ...

    @property
    def ranks(self) -> int:
        """How many ranks must have their state."""
        ...

    @property
    def codecs(self) -> Sequence[str]:
        """The encodings that will do."""
        ...

    @property
    def reshard(self) -> bool:
        """Whether shards of other ways to split will do."""
        ...


def is_sound(books: Books, layout: Layout, prompt: Prompt) -> bool:
    """Return whether a prompt makes sense for a layout."""
    limits, ranks = books.limits, prompt.ranks
    return (
        0 < ranks <= limits.ranks_max
        and all(part.units % ranks == 0 or ranks % part.units == 0 for part in layout.parts)
        and 0 < len(prompt.digests) <= limits.batch_max
        and all(len(digest) == DIGEST_BYTES for digest in prompt.digests)
        and 0 <= prompt.limit <= len(prompt.digests) * layout.block_tokens
        and 0 < len(prompt.codecs) <= limits.codecs_max
        and 0 < len(prompt.request.encode()) <= limits.request_bytes_max
    )


def storable(codecs: Sequence[str], books: Books) -> tuple[str, ...]:
    """Return those of a client's codecs that anything can be stored in. Another node takes a question
    that names others for nonsense, and who asks would take that node to be ill."""
    return tuple(codec for codec in codecs if len(codec) <= books.limits.name_bytes_max)


def route_of(
    shelf: Shelf, layout: Layout, prompt: Prompt, seat: tuple[int, int] = (0, 0), whole: int = 0
) -> Route:
    """Return the route of a sound prompt. `seat`: the ranks that count, from one up to before another,
    (0, 0): all. Who asks has all blocks of the first `whole` tokens."""
    route = Route(shelf, layout)
    route.here = seat
    if whole:
        route.given = whole - _start(shelf, layout, prompt.digests)
    plan = PlanAsked(
        0,
        0,
        prompt.request,
        "",
        "",
        prompt.digests,
        len(prompt.digests) * layout.block_tokens,
        prompt.limit,
        [],
        tuple(prompt.codecs),
        Capture(0, 1),
        all_ranks=True,
        reshard=prompt.reshard,
    )
    route.walk(plan, prompt.limit)
    return route


def in_place(layout: Layout, entries: Iterable[Entry], items: Iterable[Item]) -> list[Item]:
    """Return what a prompt could go on from, as far as it is in memory or on its way there: all blocks of
    parts that need all of theirs, at these entries, and those of `items`."""
    runs = {part.name for part in layout.parts if part.window is None}
    found = dict.fromkeys(item for item in items if item.host or item.target)
    for entry in entries:
        there = entry.host | entry.coming
        found |= dict.fromkeys(
            item for bit, item in entry.items.items() if there >> bit & 1 and item.slot.part in runs
        )
    return list(found)


def _start(shelf: Shelf, layout: Layout, digests: Sequence[bytes]) -> int:
    """Return how many tokens come before these blocks, as the first object that lies at one of them
    says."""
    for number, digest in enumerate(digests, 1):
        entry = shelf.entries.get(digest)
        if entry is not None and entry.items:
            return next(iter(entry.items.values())).end - number * layout.block_tokens
    return 0
