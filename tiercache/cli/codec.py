"""`tiercache codec`: the record of which models are kept compressed, since when, and by whose choice."""

import os
import pwd
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.exits import UsageError
from tiercache.cli.text import as_json, plain, when
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.device.journal import Change, Read

NEEDED = frozenset({"numba", "numpy", "tiercache_kernels", "torch", "triton"})


def codec(
    record: Annotated[
        str,
        typer.Argument(
            metavar="RECORD", help="The file that says it all; made by the first choice."
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]", help="As the engine calls it in its namespace.", show_default=False
        ),
    ] = "",
    chosen: Annotated[
        str,
        typer.Argument(
            metavar="[CODEC]", help="What to keep its states in from now on.", show_default=False
        ),
    ] = "",
    who: Annotated[
        str,
        typer.Option(
            "--who", metavar="NAME", help="Who decides [default: this user].", show_default=False
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the changes of codec in a record, or a model's, or choose a codec for it."""
    try:
        from tiercache.device import CODECS, CodecJournal
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        raise ConfigError(
            f"codecs are the GPU tier's, which needs {error.name}: install tiercache from its checkout "
            f"with the extra `gpu`"
        ) from error

    if chosen and not model:
        raise UsageError("a codec is chosen for a model, which must have a name")
    if chosen and chosen not in CODECS:
        raise UsageError(f"no codec {chosen!r}; there are {', '.join(CODECS)}")
    journal = CodecJournal(Path(record))
    if chosen:
        change = journal.choose(model, chosen, who=who or _user(), at=time.time())
        already = f"{plain(model)} is kept in {chosen} already."
        typer.echo(as_json(change) if json else already if change is None else _line(change))
    else:
        _show(journal.read(), model, json=json)


def _show(found: "Read", model: str, *, json: bool) -> None:
    """Print all changes, or those of one model and what holds for it."""
    if found.torn:
        typer.echo(
            f"The last line was cut off while it was written: {len(found.torn)} bytes do not count.",
            err=True,
        )
    changes = [change for change in found.changes if model in {"", change.model}]
    if json:
        typer.echo(as_json(changes))
        return
    for change in changes:
        typer.echo(_line(change))
    if model:
        typer.echo(f"{plain(model)} is kept in {plain(found.codec_of(model))}.")


def _line(change: "Change") -> str:
    who, model, was, now = map(plain, (change.who, change.model, change.was, change.now))
    return f"{when(change.at)}  {who}: {model} from {was} to {now}"


def _user() -> str:
    """Return the name of the user whose process this is; its number when it has none."""
    number = os.getuid()
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"uid {number}"
