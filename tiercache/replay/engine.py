"""One replay: a trace, a model, a budget and a policy, and what came of it.

A resume is possible at the deepest boundary that has all its pages and a checkpoint, short of the prompt's
last token. What is stored counts as written when it outlives the request it came with. Running requests
take no memory, and output counts once it comes back in a prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from tiercache.core.events import Capture
from tiercache.core.policy.base import Prompt
from tiercache.core.policy.marconi_order import Marconi, Tuner
from tiercache.core.policy.meta import (
    AUTO,
    CANDIDATES,
    HYPER,
    INDEX,
    MARCONI,
    RECENT,
    Choice,
    ranking,
)
from tiercache.core.policy.retention import Retention, checkpoints_of
from tiercache.core.policy.reuse import Reuse
from tiercache.core.policy.shadow import Shadow, Tally
from tiercache.core.policy.visits import Path, Shape, Tree, Visit
from tiercache.core.sights import Sights
from tiercache.models import ModelShape
from tiercache.replay.objects import Objects
from tiercache.replay.traces import Request, Trace

ENGINE_LRU = "lru"
POLICIES = (AUTO, INDEX, HYPER, MARCONI, RECENT, ENGINE_LRU)
"""What a replay can compare. `lru` is what engines ship: over objects. `marconi@0.5` fixes alpha."""

GHOSTS_MAX = 1 << 16
REMEMBERED_MAX = 1 << 24
"""Blocks whose sight is remembered; all of any trace that fits in memory."""

INTERVAL_TOKENS = 8192
CHECKPOINTS_MAX = 64


class Cache(Protocol):
    """What is replayed against. The caller has told `Reuse` of a request before."""

    tally: Tally

    def visit(self, visit: Visit) -> int:
        """Take in one request; return after how many pages it could resume."""
        ...

    def resident(self, tree: Tree, path: Path) -> int:
        """Return how many pages of a path are held."""
        ...


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: budget in bytes."""

    model: ModelShape
    budget: float
    policy: str
    retention: Retention = "marconi"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it. Fractions are of all prompts' FLOPs and tokens; bytes as held and written."""

    saved_flops_fraction: float
    token_hit_rate: float
    request_hit_rate: float
    bytes_written: int
    kv_bytes_written: int
    state_bytes_written: int
    resident_bytes: int
    resident_bytes_max: int
    evictions: int


class Adaptive:
    """`auto`: shadows of every candidate, and a cache that follows the one ahead."""

    def __init__(self, budget: float, reuse: Reuse) -> None:
        self._choice = Choice(budget, reuse)
        self._reuse = reuse
        rankings = {name: ranking(name, reuse) for name in CANDIDATES}
        self._cache = Shadow(budget, rankings, self._choice.current, reuse)
        self.tally = self._cache.tally

    @property
    def used(self) -> float:
        """Bytes held."""
        return self._cache.used

    def resident(self, tree: Tree, path: Path) -> int:
        """See `Cache`."""
        return self._cache.resident(tree, path)

    def visit(self, visit: Visit) -> int:
        """See `Cache`."""
        self._choice.visit(visit, self._reuse.talk)
        self._cache.chosen = self._choice.current
        return self._cache.visit(visit)


class Tuned(Shadow):
    """`marconi`: alpha is found by replaying the first requests."""

    def __init__(self, budget: float, reuse: Reuse, order: Marconi, *, tune: bool) -> None:
        super().__init__(budget, {MARCONI: order}, MARCONI, reuse)
        self._tuner = Tuner(order, budget, reuse) if tune else None

    def visit(self, visit: Visit) -> int:
        """See `Cache`."""
        if self._tuner is not None:
            self._tuner.visit(visit, self.tally.evictions)
        return super().visit(visit)


def cache_of(policy: str, budget: float, reuse: Reuse) -> Shadow | Adaptive | Objects:
    """Return an empty cache by the name of its policy; ValueError for an unknown one."""
    name, _, alpha = policy.partition("@")
    if name == MARCONI:
        return Tuned(budget, reuse, Marconi(float(alpha or 0)), tune=not alpha)
    if alpha or policy not in POLICIES:
        raise ValueError(f"no policy {policy!r}: one of {', '.join(POLICIES)}, marconi@ALPHA")
    if policy == ENGINE_LRU:
        return Objects(budget)
    if policy == AUTO:
        return Adaptive(budget, reuse)
    return Shadow(budget, {policy: ranking(policy, reuse)}, policy, reuse)


def shape_of(model: ModelShape, page: int) -> Shape:
    """Return what a page and a checkpoint of a model weigh."""
    return Shape(page, page * model.kv_bytes, model.state_bytes, model.work)


def run(trace: Trace, cell: Cell, progress: Callable[[int], None] | None = None) -> Outcome:
    """Replay a trace. `progress` is told how many requests are done, now and then."""
    reuse = Reuse(GHOSTS_MAX)
    cache = cache_of(cell.policy, cell.budget, reuse)
    tree = Tree(trace.name, shape_of(cell.model, trace.page))
    forks = cell.policy.partition("@")[0] not in {ENGINE_LRU, MARCONI}
    hits = requests = tokens = 0
    most = area = total = 0.0
    for visit, request in visits(trace, cell, tree, None if forks else cache):
        reuse.visit(visit)
        hits += cache.visit(visit) * trace.page
        tokens += request.tokens
        total += cell.model.work.flops(request.tokens)
        requests += 1
        most = max(most, cache.used)
        area += cache.used
        if progress is not None and requests % 256 == 0:
            progress(requests)
    tally = cache.tally
    return Outcome(
        saved_flops_fraction=tally.saved / total,
        token_hit_rate=hits / tokens,
        request_hit_rate=tally.hits / requests,
        bytes_written=round(tally.kv_bytes + tally.state_bytes),
        kv_bytes_written=round(tally.kv_bytes),
        state_bytes_written=round(tally.state_bytes),
        resident_bytes=round(area / requests),
        resident_bytes_max=round(most),
        evictions=tally.evictions,
    )


def visits(
    trace: Trace, cell: Cell, tree: Tree, cache: Cache | None
) -> Iterator[tuple[Visit, Request]]:
    """Yield every request's visit. Forks come from what was seen; from what `cache` holds if there is one:
    engines and Marconi remember nothing else."""
    page = trace.page
    sights = Sights(REMEMBERED_MAX, 1)
    placing = checkpoints_of(cell.retention, interval_tokens=INTERVAL_TOKENS, most=CHECKPOINTS_MAX)
    capture = Capture(page, page)
    for number, request in enumerate(trace.requests):
        path = request.pages
        usable = (request.tokens - 1) // page
        if cache is not None:
            forked = reached = cache.resident(tree, path)
        else:
            reached, forked = sights.see((b"", "", str(number)), path)  # type: ignore[arg-type]
        prompt = Prompt(
            tokens=min(request.tokens, (len(path) + 1) * page - 1),
            resumed=0,
            block_tokens=page,
            reached=reached * page,
            fork=forked * page,
        )
        places = placing.place(prompt, capture) if path else []
        ends = tuple(end // page for end in places)
        yield Visit(tree, path, usable, ends, request.at), request
