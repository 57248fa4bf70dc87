"""`verify`: reads everything back, page by page, with a bar on a terminal."""

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tiercache.cli import views
from tiercache.cli.admin import Admin
from tiercache.cli.documents import TIERS, BadCopy, Verification, statistics_of
from tiercache.cli.text import size


def run(node: Admin) -> Verification:
    """Have the node check every copy it holds now."""
    console = Console(stderr=True)
    checked = nbytes = 0
    failed: list[BadCopy] = []
    statistics = statistics_of(node.stats())
    copies = sum(int(statistics.gauge("objects", tier)) for tier in TIERS)
    with Progress(
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[done]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=copies, done="")
        for page in node.verify():
            checked += page.checked
            nbytes += page.nbytes
            failed += [BadCopy(*copy) for copy in page.failed]
            # Objects come and go meanwhile: the bar never runs past its end.
            progress.update(task, completed=checked, total=max(copies, checked), done=size(nbytes))
    return Verification(checked, nbytes, failed)


def show(verified: Verification) -> None:
    """Print the outcome for people."""
    if verified.failed:
        views.console(whole=True).print(views.failures(verified.failed))
    typer.echo(
        f"Checked {verified.checked:,} copies, {size(verified.nbytes)}: "
        f"{len(verified.failed):,} failed."
    )
