"""`ls`: pages of objects as one table, or as one JSON array written while it is read."""

import time
from collections.abc import Iterator
from itertools import islice

import typer

from tiercache.cli.documents import Object, object_of
from tiercache.cli.replies import Rows
from tiercache.cli.text import as_json


def as_json_array(pages: Iterator[Rows], limit: int | None) -> int:
    """Print `limit` objects at most (None: all), one per line of one JSON array; return how many."""
    found = 0
    typer.echo("[", nl=False)
    for item in islice(_objects(pages), limit):
        typer.echo(("," if found else "") + "\n" + as_json(item), nl=False)
        found += 1
    typer.echo("\n]" if found else "]")
    return found


def as_table(pages: Iterator[Rows], limit: int, *, long: bool) -> int:
    """Print `limit` objects at most, one per line; return how many."""
    from tiercache.cli import views

    objects = _objects(pages)
    shown = list(islice(objects, limit))
    if not shown:
        return 0
    # One line per object even where the terminal is narrow: keys are there to be copied.
    views.console(whole=True).print(views.objects(shown, time.time(), long=long))
    if next(objects, None) is not None:
        typer.echo(
            f"These are the first {limit:,}: name a longer PREFIX, or raise --limit.", err=True
        )
    return len(shown)


def _objects(pages: Iterator[Rows]) -> Iterator[Object]:
    return (object_of(row) for page in pages for row in page.rows)
