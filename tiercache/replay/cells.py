"""Many replays of one trace at once: every policy against every budget, one process for each core."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import msgspec

from tiercache.core.policy.retention import Retention
from tiercache.models import MODELS
from tiercache.replay.bound import Bound, runs_of
from tiercache.replay.engine import Cell, Outcome, run, shape_of
from tiercache.replay.traces import Trace, read_trace

JOBS_MAX = 64

_Bounds: TypeAlias = tuple[tuple[float, ...], float]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to replay: a trace in pages of `page` tokens, a model by name, budgets in bytes, policies."""

    trace: Path
    page: int
    model: str
    budgets: tuple[float, ...]
    policies: tuple[str, ...]
    retention: Retention = "marconi"
    bound: bool = True


class Row(msgspec.Struct, frozen=True):
    """One cell of the table. Bytes, and fractions of all FLOPs and tokens; `upper_bound` is what no policy
    can exceed at this budget, `infinite` the same without a budget (None: not asked for)."""

    trace: str
    model: str
    page: int
    budget_bytes: int
    policy: str
    retention: str
    requests: int
    saved_flops_fraction: float
    token_hit_rate: float
    request_hit_rate: float
    bytes_written: int
    kv_bytes_written: int
    state_bytes_written: int
    resident_bytes: int
    resident_bytes_max: int
    evictions: int
    upper_bound: float | None
    infinite: float | None


@lru_cache(maxsize=2)
def _trace(path: Path, page: int) -> Trace:
    return read_trace(path, page)


def _replay(plan: Plan, budget: float, policy: str) -> Outcome:
    cell = Cell(MODELS[plan.model], budget, policy, plan.retention)
    return run(_trace(plan.trace, plan.page), cell)


def _bounds(plan: Plan) -> _Bounds:
    trace = _trace(plan.trace, plan.page)
    bound = Bound(trace, shape_of(MODELS[plan.model], trace.page), runs_of(trace))
    return tuple(bound.of(budget) for budget in plan.budgets), bound.infinite()


def replay(plan: Plan, jobs: int, progress: Callable[[int], None]) -> list[Row]:
    """Return a row for each budget and policy. `progress` is told how many of `steps(plan)` are done.

    Raises what `read_trace` raises, and ValueError for an unknown policy.
    """
    trace = _trace(plan.trace, plan.page)
    cells = [(budget, policy) for budget in plan.budgets for policy in plan.policies]
    bounds: _Bounds | None = None
    outcomes: dict[tuple[float, str], Outcome] = {}
    for done, (number, value) in enumerate(_all(plan, cells, min(jobs, JOBS_MAX)), 1):
        if isinstance(value, Outcome):
            outcomes[cells[number]] = value
        else:
            bounds = value
        progress(done)
    rows = []
    for budget, policy in cells:
        at = plan.budgets.index(budget)
        rows.append(
            Row(
                trace=plan.trace.name,
                model=plan.model,
                page=trace.page,
                budget_bytes=round(budget),
                policy=policy,
                retention=plan.retention,
                requests=len(trace.requests),
                upper_bound=bounds[0][at] if bounds else None,
                infinite=bounds[1] if bounds else None,
                **asdict(outcomes[budget, policy]),
            )
        )
    return rows


def steps(plan: Plan) -> int:
    """Return how many steps a plan has."""
    return len(plan.budgets) * len(plan.policies) + plan.bound


def _all(
    plan: Plan, cells: Sequence[tuple[float, str]], jobs: int
) -> Iterator[tuple[int, Outcome | _Bounds]]:
    if jobs <= 1:
        if plan.bound:
            yield -1, _bounds(plan)
        for number, cell in enumerate(cells):
            yield number, _replay(plan, *cell)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures: dict[Future[Outcome | _Bounds], int] = {}
        if plan.bound:
            futures[pool.submit(_bounds, plan)] = -1
        for number, cell in enumerate(cells):
            futures[pool.submit(_replay, plan, *cell)] = number
        for future in as_completed(futures):
            yield futures[future], future.result()
