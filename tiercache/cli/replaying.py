"""`tiercache replay`: what would a policy, a model and a budget have saved on a recorded trace?"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from tiercache.cli.asking import Json
from tiercache.cli.exits import ContentError, UsageError
from tiercache.cli.text import as_json, size
from tiercache.errors import ConfigError
from tiercache.tables import parse_size

if TYPE_CHECKING:
    from rich.table import Table

    from tiercache.replay.cells import Plan, Row

CELLS_MAX = 4096
Retentions = Literal["marconi", "strict", "minimal", "interval", "chunk", "dense"]


def replay(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A ptrace1 or Mooncake file.", show_default=False),
    ],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="Whose state it is.")],
    budget: Annotated[
        list[str], typer.Option("--budget", metavar="SIZE", help="Such as 110GB; may be repeated.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="NAME", help="May be repeated, or `all` [default: auto and lru]."
        ),
    ] = None,
    retention: Annotated[
        str, typer.Option("--retention", metavar="NAME", help="Which checkpoints are taken.")
    ] = "marconi",
    page: Annotated[
        int, typer.Option("--page", metavar="N", help="Tokens of a page [default: the trace's].")
    ] = 0,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Processes [default: one for each core].")
    ] = 0,
    bound: Annotated[
        bool, typer.Option("--bound/--no-bound", help="Reckon what no policy can exceed.")
    ] = True,
    plot: Annotated[
        str, typer.Option("--plot", metavar="FILE", help="Draw it too.", show_default=False)
    ] = "",
    json: Json = False,
) -> None:
    """Replay a request trace against policies, a model and budgets."""
    from tiercache.replay.cells import replay as run
    from tiercache.replay.cells import steps
    from tiercache.replay.traces import TraceError

    plan = _plan(trace, (model, budget, policy or ["auto", "lru"]), retention, page, bound=bound)
    if plot:
        _need_matplotlib()
    processes = min(jobs if jobs > 0 else len(os.sched_getaffinity(0)), steps(plan))
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=steps(plan))
            rows = run(plan, processes, lambda done: bar.update(task, completed=done))
    except (TraceError, FileNotFoundError) as error:
        raise ContentError(str(error)) from error
    if plot:
        from tiercache.replay.plot import draw

        draw(rows, Path(plot))
    if json:
        typer.echo(as_json(rows))
        return
    Console().print(_table(rows))


def _plan(
    trace: Path, what: tuple[str, list[str], list[str]], retention: str, page: int, *, bound: bool
) -> "Plan":
    from tiercache.core.policy.marconi_order import ALPHAS
    from tiercache.models import MODELS
    from tiercache.replay.cells import Plan
    from tiercache.replay.engine import POLICIES

    model, budgets, policies = what
    if model not in MODELS:
        raise UsageError(f"no model {model!r}: one of {', '.join(MODELS)}")
    if "all" in policies:
        policies = list(POLICIES)
    for policy in policies:
        name, _, alpha = policy.partition("@")
        if policy not in POLICIES and (name != "marconi" or alpha not in map(str, ALPHAS)):
            raise UsageError(
                f"no policy {policy!r}: one of {', '.join(POLICIES)}, all, marconi@0.5"
            )
    retentions = Retentions.__args__  # type: ignore[attr-defined]
    if retention not in retentions:
        raise UsageError(f"no retention {retention!r}: one of {', '.join(retentions)}")
    try:
        sizes = tuple(dict.fromkeys(_budget(text) for text in budgets))
    except ValueError as error:
        raise UsageError(f"--budget: {error}") from error
    if min(sizes) <= 0 or page < 0:
        raise UsageError("a budget and a page are more than nothing")
    named = tuple(dict.fromkeys(policies))
    if len(sizes) * len(named) > CELLS_MAX:
        raise UsageError(f"at most {CELLS_MAX} cells at once")
    return Plan(trace, page, model, sizes, named, cast("Retentions", retention), bound=bound)


def _need_matplotlib() -> None:
    try:
        import matplotlib as _  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed: install tiercache from its checkout "
            "with the extra `plot`"
        ) from error


def _budget(text: str) -> float:
    """Return bytes: "110GB" is decimal, as memory is sold, "102GiB" binary."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([KMGT])B", text.strip())
    if found is None:
        return float(parse_size(text))
    return float(found[1]) * 1000.0 ** (" KMGT".index(found[2]))


def _table(rows: list["Row"]) -> "Table":
    from rich.table import Table

    first = rows[0]
    title = (
        f"{first.trace}: {first.requests:,} requests, {first.model}, pages of {first.page} tokens"
    )
    table = Table(title=title, title_justify="left")
    for name in ("budget", "policy"):
        table.add_column(name)
    for name in ("saved FLOPs", "of the bound", "token hits", "written", "resident"):
        table.add_column(name, justify="right")
    for row in rows:
        part = row.saved_flops_fraction / row.upper_bound if row.upper_bound else None
        table.add_row(
            size(row.budget_bytes),
            row.policy,
            f"{row.saved_flops_fraction:.1%}",
            "-" if part is None else f"{part:.0%}",
            f"{row.token_hit_rate:.1%}",
            size(row.bytes_written),
            size(row.resident_bytes),
        )
    return table
