"""`make replay`: the policies on the traces in tests/data/traces, beside what they should reach.

    python -m tests.bench.replay [--quick] [--jobs N] [--made SEED]

Deterministic: the same figures on every machine. Fractions are of all prefill FLOPs. With `--made` traces
are made up (`workloads.py`), and what counts is that `auto` is nowhere more than 0.005 below LRU.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.workloads import all_made, footprint
from tiercache.models import MODELS
from tiercache.replay.cells import Plan, Row, replay
from tiercache.replay.engine import Cell, run, shape_of

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
K3, QWEN = "kimi-k3", "qwen3-next-80b"
BELOW_MAX = 0.005
PARTS = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Budgets for made-up traces, as parts of what everything would take."""

WRITES_TIGHT_MAX = 0.55
WRITES_MAX = 1.10
FIDELITY = 0.002


@dataclass(frozen=True, slots=True)
class Table:
    """A trace and a model: budgets in GB with the goal (None: none), and what a simulator that keeps every
    page by itself gives for LRU over objects and for Marconi with alpha 0.5."""

    trace: str
    page: int
    model: str
    cells: tuple[tuple[float, float | None, float, float], ...]
    big: bool = True


TABLES = (
    Table("mooncake_conversation", 512, K3, (
        (78.25604419584, 0.13, 0.0522, 0.0569), (234.76813258752, 0.20, 0.1497, 0.0971),
        (782.5604419584, 0.30, 0.2809, 0.1976), (2347.6813258752, 0.346, 0.3465, 0.3055),
    )),
    Table("mooncake_conversation", 512, QWEN, (
        (30.80005681152, 0.095, 0.0380, 0.0431), (92.40017043456, 0.16, 0.1161, 0.0667),
        (308.0005681152, 0.273, 0.2550, 0.1452), (924.0017043456, 0.334, 0.3335, 0.2614),
    )),
    Table("claudecode_dev", 256, K3, (
        (34.994256961536, 0.33, 0.1964, 0.1971), (116.64752320512, 0.80, 0.7345, 0.3729),
        (349.94256961536, 0.935, 0.9183, 0.5773),
    )),
    Table("claudecode_dev", 256, QWEN, (
        (11.15789819904, 0.13, 0.0274, 0.0386), (37.1929939968, 0.43, 0.2929, 0.2739),
        (111.5789819904, 0.845, 0.8184, 0.4487),
    )),
    Table("agents_dev", 64, K3, (
        (3.72708974592, None, 0.9201, 0.9190), (11.18126923776, None, 0.9209, 0.9214),
    ), big=False),
    Table("agents_dev", 64, QWEN, (
        (0.6743556096, None, 0.7663, 0.7457), (2.0230668288, None, 0.9176, 0.9173),
    ), big=False),
)  # fmt: skip


def main() -> int:
    """Print every cell, then what was missed; the exit code says whether anything was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the small traces only")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--made", type=int, metavar="SEED", help="traces that are made up instead")
    options = parser.parse_args()
    if options.made is not None:
        return _made(options.made)
    missed: list[str] = []
    for table in TABLES:
        if options.quick and table.trace.startswith("claude"):
            continue
        rows = _rows(table, options.jobs)
        print(f"\n{table.trace}, {table.model}, pages of {table.page} tokens")
        print("   GB      goal   auto  index   LRU  Marconi  bound | written GB auto / LRU")
        for number, cell in enumerate(table.cells):
            found = {name: rows[name][number] for name in rows}
            _show(cell, found)
            missed.extend(_missed(table, number, found))
    for line in missed:
        print("missed:", line)
    print(f"\n{len(missed)} missed" if missed else "\nEverything was reached.")
    return bool(missed)


def _made(seed: int) -> int:
    """Replay every made-up trace at five budgets; return whether `auto` was below LRU anywhere."""
    worst, gains = 1.0, []
    for trace in all_made(range(seed, seed + 1)):
        for name in (K3, QWEN):
            model = MODELS[name]
            shape = shape_of(model, trace.page)
            whole = footprint(trace, shape.block_bytes, shape.state_bytes)
            for part in PARTS:
                budget = whole * part
                auto = run(trace, Cell(model, budget, "auto")).saved_flops_fraction
                lru = run(trace, Cell(model, budget, "lru")).saved_flops_fraction
                gains.append(auto - lru)
                worst = min(worst, auto - lru)
                print(f"{trace.name:14} {name:14} {budget / 1e9:8.1f} GB", end=" ")
                print(f"auto {auto:.4f} LRU {lru:.4f} {auto - lru:+.4f}", flush=True)
    print(f"{len(gains)} cells, mean {sum(gains) / len(gains):+.4f}, worst {worst:+.4f}")
    return worst < -BELOW_MAX


def _rows(table: Table, jobs: int) -> dict[str, list[Row]]:
    names = ("auto", "index", "lru", "marconi@0.5")
    budgets = tuple(cell[0] * 1e9 for cell in table.cells)
    path = TRACES / f"{table.trace}.ptrace.gz"
    plan = Plan(path, table.page, table.model, budgets, names)
    rows = replay(plan, jobs, lambda done: print(end=".", file=sys.stderr, flush=True))
    return {name: [row for row in rows if row.policy == name] for name in names}


def _show(cell: tuple[float, float | None, float, float], found: dict[str, Row]) -> None:
    budget, goal, _, _ = cell
    auto, lru = found["auto"], found["lru"]
    saved = [found[name].saved_flops_fraction for name in ("auto", "index", "lru", "marconi@0.5")]
    print(
        f"{budget:8.1f} {goal if goal is not None else '-':>7} "
        + " ".join(f"{value:6.4f}" for value in saved)
        + f"  {auto.upper_bound or 0:6.4f} | {auto.bytes_written / 1e9:,.0f} / "
        f"{lru.bytes_written / 1e9:,.0f} = {auto.bytes_written / lru.bytes_written:.2f}"
    )


def _missed(table: Table, number: int, found: dict[str, Row]) -> Iterator[str]:
    budget, goal, lru_known, marconi_known = table.cells[number]
    where = f"{table.trace} {table.model} {budget:.1f} GB"
    auto, lru = found["auto"], found["lru"]
    saved = auto.saved_flops_fraction
    if goal is not None and saved < goal:
        yield f"{where}: saves {saved:.4f}, should {goal}"
    if saved < lru.saved_flops_fraction - BELOW_MAX:
        yield f"{where}: {saved:.4f} is below LRU's {lru.saved_flops_fraction:.4f}"
    ratio = auto.bytes_written / lru.bytes_written
    most = WRITES_TIGHT_MAX if table.big and number == 0 else WRITES_MAX
    if ratio > most:
        yield f"{where}: writes {ratio:.2f} of what LRU does, at most {most}"
    for name, known in (("lru", lru_known), ("marconi@0.5", marconi_known)):
        value = found[name].saved_flops_fraction
        if abs(value - known) > FIDELITY:
            yield f"{where}: {name} saves {value:.4f}, in the reference {known:.4f}"


if __name__ == "__main__":
    sys.exit(main())
