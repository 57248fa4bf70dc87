"""What became of a request and of every token of it: resumed, or computed for one reason."""

from typing import NamedTuple

from tiercache.core.counters import Counters
from tiercache.core.events import PlanAsked
from tiercache.core.route import Ranked, Route


class Depths(NamedTuple):
    """How deep a plan goes. `boundary` is given out, `could` is the deepest that could have been; `same`
    tokens an earlier request had in common with the prompt. `ready`: all of it is in memory."""

    boundary: int
    could: int
    same: int
    ready: bool


def note(route: Route, session: Ranked, asked: PlanAsked, depths: Depths) -> str:
    """Return why a plan gives no more, "" when it gives all there is; note in the route what it will be
    counted as."""
    boundary, could, same, ready = depths
    reason = "slower_than_recompute" if boundary < could else ""
    after: set[int] = set()
    if route.agreed is not None or (not route.settled and boundary == route.decided):
        after = route.resumable_after(session, could)
    # What could be resumed here, and not where the other ranks are.
    apart = max((end for end in after if end <= route.cap), default=could)
    if not could:
        reason = (
            "elsewhere" if route.agreed is not None and apart else route.why_not(session, asked)
        )
    if not route.settled and boundary == route.decided:
        beyond = max(after, default=could)
        held = max(beyond, route.way)
        route.planned = boundary
        route.lost = split(
            boundary,
            ("slower_than_recompute", could),
            ("elsewhere", apart if route.agreed is not None else could),
            ("beyond_limit", beyond),
            (route.lacks(session, beyond), held),
            ("not_held", max(held, same)),
            ("unseen", asked.tokens),
        )
        kind = "host" if boundary or not could else "declined"
        route.outcome = (boundary, kind, reason) if ready else None
    return reason


def split(boundary: int, *edges: tuple[str, int]) -> dict[str, int]:
    """Return how many tokens from `boundary` on belong to each reason; each reaches up to its edge."""
    found: dict[str, int] = {}
    last = boundary
    for reason, edge in edges:
        if edge > last:
            found[reason] = edge - last
            last = edge
    return found


def settle(counters: Counters, route: Route) -> None:
    """Count what became of a request, once, if that is known."""
    if route.settled or route.outcome is None:
        return
    route.settled = True
    boundary, kind, reason = route.outcome
    # As many as the plan was of that is counted here: a later one may be on its way by now.
    counters.add("lookup_tokens", amount=route.planned + sum(route.lost.values()))
    for why, lost in route.lost.items():
        counters.add("lost_tokens", why, lost)
    counters.add("lost_tokens", "late", route.planned - boundary)
    if boundary:
        counters.add("lookups", f"hit_{kind}")
        counters.add("hit_tokens", kind, boundary)
    elif kind == "declined":
        counters.add("lookups", "declined")
    else:
        counters.add("lookups", "miss")
        counters.add("misses", reason)


def check_tokens(counters: Counters) -> None:
    """Raise AssertionError unless every token that was looked up has one reason."""
    counts = counters.values
    hit, lost = (sum(counts[name].values()) for name in ("hit_tokens", "lost_tokens"))
    assert hit + lost == counts["lookup_tokens"][""], "tokens without a reason, or with two"
    assert min(counts["lost_tokens"].values()) >= 0


def abort(counters: Counters, route: Route) -> None:
    """Count a request that ended before it was known what became of it."""
    if not route.settled and route.outcome is None:
        route.settled = True
        counters.add("lookups", "aborted")
        counters.add("lookup_tokens", amount=route.tokens)
        counters.add("lost_tokens", "aborted", route.tokens)
