"""What lies here of a prompt for some of the ranks that another node asks about: what the others need may
lie elsewhere."""

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from tiercache.core.catalog import Item
from tiercache.core.cluster.walking import Asker
from tiercache.core.route import Route
from tiercache.state import Shard

RANKS_MAX: Final = 16
"""Ranks that are looked at one by one."""

LOOKS_MAX: Final = 131_072
"""Positions that are looked at for all of those together; one rank's way is looked at whole."""

SPLIT_MAX: Final = 256
"""Finer ways to split than into so many are not looked for."""

TIMES_MAX: Final = 8
"""With resharding, the ranks of engines with so many times as many of them, or as few, are looked at, too:
what some of those have is of use."""


class Found(NamedTuple):
    """The deepest position that can be resumed, -1 for none, and the objects that it rests on."""

    position: int
    items: list[Item]


def for_all(route: Route, ranks: int, *, in_host: bool) -> Found:
    """Return what all ranks that count could resume; `in_host`: from memory."""
    asker = Asker(ranks)
    position = route.deepest(asker, in_host=in_host, all_ranks=True)
    return Found(position, route.chosen(asker, position, all_ranks=True))


def for_some(route: Route, ranks: int, *, in_host: bool) -> Found:
    """Return what is deepest of what any of the ranks that count could resume, and all that those rest on
    that can resume there. Afterwards no ranks count on the route."""
    looks = LOOKS_MAX // max(1, len(route.positions))
    ways = list(islice(_ways(route, ranks), max(1, min(RANKS_MAX, looks))))
    best, items = -1, dict[Item, None]()
    for asker in ways:
        route.here = (asker.rank, asker.rank + 1)
        found = for_all(route, asker.ranks, in_host=in_host)
        if found.position > best:
            best, items = found.position, {}
        if found.position == best:
            items |= dict.fromkeys(found.items)
    return Found(best, list(items))


def _ways(route: Route, ranks: int) -> Iterator[Asker]:
    """Yield the ranks that anything was ever stored for here of every part; those of other ways to split
    last."""
    parts, (first, stop) = route.layout.parts, route.here
    stop = stop or ranks
    times = [1 << power for power in range(1, TIMES_MAX.bit_length())] if route.reshard else []
    finer = [(ranks * by, first * by, stop * by) for by in times]
    coarser = [(ranks // by, first // by, -(-stop // by)) for by in times if ranks % by == 0]
    for split, low, high in [(ranks, first, stop), *finer, *coarser]:
        odd = any(part.units % split and split % part.units for part in parts)
        if odd or split > max(ranks, SPLIT_MAX):
            continue
        shards = [part.shards(split) for part in parts]
        for rank in range(low, high):
            own = zip(parts, shards, strict=True)
            if all(_is_known(route, part.name, each[rank]) for part, each in own):
                yield Asker(split, rank)


def _is_known(route: Route, part: str, shard: Shard) -> bool:
    return any((part, shard, codec) in route.shelf.slots for codec in route.codecs)
