"""Whether getting state back from a slower tier is faster than computing it anew.

Both sides are measured: what the tier gave back by the node, how fast prompts are computed by the engine.
As long as either is unknown, everything is worth it.
"""

from itertools import islice
from typing import Final

from tiercache.core.books import Books
from tiercache.core.catalog import Shelf
from tiercache.core.pace import Pace
from tiercache.core.route import Ranked, Route
from tiercache.state import Layout

TRIED_MAX: Final = 8
"""Boundaries that are compared for one request, the deepest ones."""

PROBE_EVERY: Final = 16
"""Of this many requests that would be declined, one is not: a tier may have become faster."""


class Worth:
    """Compares restoring with computing. Deterministic: it knows only what it was told."""

    def __init__(self, books: Books) -> None:
        self._nvme = books.nvme_pace
        self._declined = 0

    def of(self, route: Route, session: Ranked, position: int, ready: int) -> int:
        """Return the position on a route that gets a request going soonest: `position`, the deepest,
        or one that needs less from the slower tier; `ready`, which needs nothing of it, at worst. Nothing
        deeper is given out on the route any more."""
        if ready == position or not _is_known(route.shelf, self._nvme):
            return position
        best, most = ready, self._gain(route, session, ready)
        others = (at for at in route.resumable(session, position) if route.agrees(at))
        for other in islice(others, TRIED_MAX):
            gain = self._gain(route, session, other)
            if gain > most or (gain == most and other > best):
                best, most = other, gain
        if best == position:
            return position
        self._declined += 1
        if self._declined % PROBE_EVERY == 0:
            return position
        route.cut(route.positions[best] if best >= 0 else 0)
        return best

    def pays(self, shelf: Shelf, tokens: int) -> bool:
        """Return whether a prefix of so many tokens could ever come back from NVMe sooner than it is
        computed."""
        if shelf.layout is None or not _is_known(shelf, self._nvme):
            return True
        restore_s = self._nvme.seconds(prefix_bytes(shelf.layout, tokens), queued=False)
        return restore_s < recompute_s(shelf, tokens)

    def _gain(self, route: Route, session: Ranked, position: int) -> float:
        if position < 0:
            return 0.0
        items = route.chosen(session, position, all_ranks=route.all_ranks)
        absent = [item for item in items if item.host is None]
        new = sum(item.nbytes for item in absent if item.target is None)
        wait_s = self._nvme.seconds(new) if absent else 0.0
        return recompute_s(route.shelf, route.positions[position]) - wait_s


def recompute_s(shelf: Shelf, tokens: int) -> float:
    """Return how long the engines of a namespace take to compute a prompt of so many tokens.

    Their rate is that of a short prompt, in which every token costs `work.linear`.
    """
    work = shelf.work
    return work.flops(tokens) / work.linear / shelf.prefill_tokens_per_s


def is_slower(shelf: Shelf, pace: Pace, nbytes: int, tokens: tuple[int, int]) -> bool:
    """Return whether so many bytes come from elsewhere more slowly than a prompt is computed from the first
    of these token counts to the second. As long as anything is unknown, they do not."""
    if not _is_known(shelf, pace):
        return False
    here, there = tokens
    return pace.seconds(nbytes) > recompute_s(shelf, there) - recompute_s(shelf, here)


def prefix_bytes(layout: Layout, tokens: int) -> int:
    """Return the native size of all that a boundary rests on, over all shards."""
    total = 0
    for part in layout.parts:
        (whole,) = part.shards(1)
        if part.is_snapshot:
            total += part.nbytes(0, whole)
            continue
        window = tokens if part.window is None else part.window * part.block_tokens
        total += part.nbytes(min(tokens, window), whole)
    return total


def _is_known(shelf: Shelf, pace: Pace) -> bool:
    return shelf.prefill_tokens_per_s > 0 and pace.is_known
