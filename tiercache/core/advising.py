"""Which checkpoints a request should take, and which of those that it offers are stored.

Recurrent state exists only while the forward pass goes through it, so advice comes first, with the plan.
Engines that choose boundaries themselves are asked nothing: what they offer is judged when they save.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from tiercache.core.books import Books, Session
from tiercache.core.catalog import Shelf
from tiercache.core.events import Offer, PlanAsked, Tail
from tiercache.core.policy.base import Checkpoints, Prompt, Sort, Stop
from tiercache.core.policy.places import ends, floor
from tiercache.core.policy.retention import checkpoints_of
from tiercache.core.route import Ranked, Route
from tiercache.core.sights import Request, Trail
from tiercache.state import Layout

SECOND: Final = 2


class Advice:
    """What one request was told, and what it made of it.

    `advised` are the boundaries named by its last plan, `open` those of them that it has not offered yet.
    `met`: of its prompt's ends inside blocks, whether an earlier request reached them. `way`: the digest of
    the deepest block that an earlier request reached too. `passed`: the eviction policies know of the
    request from the node that planned it.
    """

    __slots__ = (
        "advised",
        "ends",
        "fork",
        "fork_taken",
        "met",
        "offered",
        "open",
        "passed",
        "tokens",
        "trail",
        "way",
    )

    def __init__(self, trail: Trail, way: list[bytes]) -> None:
        self.trail = trail
        self.way = way
        self.tokens = 0
        self.ends = (0, 0)
        self.fork = 0
        self.fork_taken = False
        self.met: dict[int, bool] = {}
        self.advised: frozenset[int] = frozenset()
        self.open: set[int] = set()
        self.offered = False
        self.passed = False

    def reached(self, layout: Layout) -> int:
        """Return the tokens of whole blocks that an earlier request had in common with its prompt."""
        return self.trail.reached * layout.block_tokens


class Verdict(NamedTuple):
    """What is to be known of a request that saves. `planned`: tokens of the prompt that it planned, 0 when
    it planned none. `refused`: boundaries whose checkpoints are not stored."""

    request: Request
    planned: int
    refused: Collection[int]


class Advising:
    """Places checkpoints, judges offers, and counts what became of the advice."""

    def __init__(self, books: Books) -> None:
        self._books = books
        retaining = books.limits.retaining
        self._policy: Checkpoints = checkpoints_of(
            retaining.mode,
            interval_tokens=retaining.interval_tokens,
            decode_interval_tokens=retaining.decode_interval_tokens,
            most=retaining.checkpoints_per_path_max,
        )
        self._thins_out = retaining.mode in {"interval", "chunk", "dense"}
        self._of: OrderedDict[Request, Advice] = OrderedDict()
        self._open = 0

    @property
    def open(self) -> int:
        """Checkpoints that were advised and may still be offered."""
        return self._open

    def check(self) -> None:
        """Raise AssertionError if the sum is wrong or a limit is passed."""
        assert self._open == sum(len(advice.open) for advice in self._of.values())
        assert len(self._of) <= self._books.limits.advice_max

    # --- before the run

    def meet(self, request: Request, asked: PlanAsked, block_tokens: int) -> Advice:
        """Count the request's sight of what it has not seen before; return what is known of it."""
        sights = self._books.sights
        advice = self._of.get(request)
        last = ends(Prompt(asked.tokens, 0, block_tokens), asked.capture)
        named: list[Tail] = [*asked.tails, *asked.ends]
        met = {
            tail.tokens: sights.count(request[0], tail.digest) > 0
            for tail in named
            if tail.tokens in last
        }
        trail = Trail(0, 0)
        stores = not self._books.protection.refuses(request, asked.care)
        if stores and sights.first_time(request):
            # The identical prompt goes the same way inside its last block.
            goes_on = last[1] > len(asked.digests) * block_tokens and not any(met.values())
            trail = sights.see(request, asked.digests, goes_on=goes_on)
        if advice is None:
            way = asked.digests[max(trail.reached - 1, 0) : trail.reached]
            advice = self._of[request] = Advice(trail, way)
            if len(self._of) > self._books.limits.advice_max:
                self._end(next(iter(self._of)))
        reached = advice.trail.reached
        if advice.way != asked.digests[max(reached - 1, 0) : reached]:
            advice.trail = Trail(0, 0)  # Planned anew, for another prompt.
        advice.tokens, advice.ends = asked.tokens, last
        advice.fork = floor(advice.trail.forked * block_tokens, asked.capture)
        # What was found first counts: by now this request was there too.
        advice.met = {end: m for end, m in (met | advice.met).items() if end in last}
        if stores:
            sights.see_beyond(request, [tail.digest for tail in named])
        return advice

    def place(
        self, advice: Advice, session: Ranked, route: Route, asked: PlanAsked, boundary: int
    ) -> list[int]:
        """Return where a request that resumes at `boundary` should take checkpoints."""
        if not asked.care.store:
            return []
        block = route.layout.block_tokens
        prompt = Prompt(
            tokens=asked.tokens,
            resumed=boundary,
            block_tokens=block,
            reached=advice.reached(route.layout),
            fork=advice.trail.forked * block,
            met=frozenset(end for end, met in advice.met.items() if met),
            held=route.checkpoints(session) if self._thins_out else 0,
        )
        places = self._policy.place(prompt, asked.capture)
        there = route.resumable_after(session, boundary)
        found = [end for end in places if end not in there]
        self._open -= len(advice.open)
        advice.open = {end for end in found if end not in advice.advised or end in advice.open}
        self._open += len(advice.open)
        advice.advised = frozenset(found)
        return found

    # --- when it saves

    def judge(
        self, session: Session, shelf: Shelf, request: Request, offers: Iterable[Offer]
    ) -> Verdict:
        """Say which boundaries are not stored. `offers` are valid, and serve one boundary each."""
        advice = self._of.get(request)
        planned = 0 if advice is None else advice.tokens
        layout = shelf.layout
        assert layout is not None
        if not session.write or not any(part.is_snapshot for part in layout.parts):
            return Verdict(request, planned, ())
        digests = {offer.end: offer.digest for offer in offers}
        if not digests:
            return Verdict(request, planned, ())
        sights = self._books.sights
        beyond = [d for end, d in digests.items() if end > planned or end % layout.block_tokens]
        sights.see_beyond(request, beyond)
        counts = {end: sights.count(request[0], digest) for end, digest in digests.items()}
        stops = _stops(counts, advice)
        advised: Collection[int] = ()
        if advice is not None:
            advised = advice.advised
            self._heard(advice, stops)
        refused = {
            stop.tokens
            for stop in stops
            if stop.tokens not in advised and not self._policy.keeps(stop)
        }
        return Verdict(request, planned, refused)

    def _heard(self, advice: Advice, stops: list[Stop]) -> None:
        counters = self._books.counters
        advice.offered = True
        for stop in stops:
            if stop.tokens in advice.open:
                advice.open.remove(stop.tokens)
                self._open -= 1
                counters.add("checkpoints", "followed")
            elif stop.tokens not in advice.advised and stop.sort is not Sort.OUTPUT:
                counters.add("checkpoints", "unadvised")
            advice.fork_taken |= stop.sort is Sort.FORK

    # --- the end

    def release(self, request: Request) -> None:
        """Nobody takes part in a request any more. One that has saved is over; another may save yet."""
        advice = self._of.get(request)
        if advice is not None and advice.offered:
            self._end(request)

    def forget(self, namespace: bytes) -> None:
        """A namespace is cleared: what was advised in it is void."""
        for request in [request for request in self._of if request[0] == namespace]:
            self._end(request)

    def _end(self, request: Request) -> None:
        advice = self._of.pop(request)
        self._open -= len(advice.open)
        self._books.counters.add("checkpoints", "unfollowed", len(advice.open))


def _stops(counts: dict[int, int], advice: Advice | None) -> list[Stop]:
    """Return what each boundary offered in one call is to its request; `counts` are its sights.

    Engines that choose boundaries themselves seldom hit a fork exactly: the deepest one before it that a
    second request reached stands for it, once.
    """
    deepest = max(counts)
    known = {deepest: Sort.PROMPT}  # Of a request that planned nothing, no more can be told.
    before = deepest - 1
    if advice is not None:
        known = {advice.fork: Sort.FORK, advice.ends[1]: Sort.END, advice.ends[0]: Sort.PROMPT}
        before = 0 if advice.fork_taken or advice.fork in counts else advice.fork
        known.update((end, Sort.OUTPUT) for end in counts if end > advice.tokens)
    near = [end for end, count in counts.items() if end <= before and count >= SECOND]
    if near:
        known.setdefault(max(near), Sort.FORK)
    return [
        Stop(end, known.get(end, Sort.INSIDE), count, end == deepest)
        for end, count in counts.items()
    ]
