"""A picture of replays: saved FLOPs over the budget, one line for each policy."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.replay.cells import Row


def draw(rows: list["Row"], path: Path) -> None:
    """Write a picture; its ending says which format. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for policy in dict.fromkeys(row.policy for row in rows):
        points = sorted(
            (row.budget_bytes / 1e9, row.saved_flops_fraction)
            for row in rows
            if row.policy == policy
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    bounds = sorted({(row.budget_bytes / 1e9, row.upper_bound) for row in rows if row.upper_bound})
    if bounds:
        axes.plot(*zip(*bounds, strict=True), "k--", label="upper bound")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget, GB")
    axes.set_ylabel("saved FLOPs, fraction of all prefill")
    axes.set_title(f"{rows[0].trace}, {rows[0].model}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
