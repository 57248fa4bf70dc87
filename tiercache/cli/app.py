"""The commands. Each asks and shows; `exits` turns what one raises into one line and a code."""

import importlib
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tiercache.cli import advising, clustering, protecting, replaying, whereabouts
from tiercache.cli.asking import Deadline, Json, Socket
from tiercache.cli.asking import ask as _node
from tiercache.cli.codec import codec
from tiercache.cli.exits import Commands, ContentError, Exit, UsageError
from tiercache.cli.quality import quality
from tiercache.cli.text import as_json, size
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.cli.admin import Admin
    from tiercache.cli.replies import Evicted

TABLE_ROWS_MAX = 1_000
INSPECTED_MAX = 16
DEMO_EXTRA = frozenset({"tiercache_transformers", "torch", "transformers", "safetensors"})

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Run a tiercache node, and look after a running one.",
    epilog="Exit codes: 0 done; 1 damaged, or not there; 2 wrong usage or settings; 3 no node, or "
    "no answer in time; 4 refused, or another protocol.",
)

ConfigFile = Annotated[
    str, typer.Option("--config", metavar="FILE", help="Settings file.", show_default=False)
]


def _version(asked: bool) -> None:
    if asked:
        from tiercache import __version__

        typer.echo(f"tiercache {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run a tiercache node, and look after a running one."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(Exit.USAGE)


@app.command()
def serve(config: ConfigFile = "") -> None:
    """Run a node until SIGTERM or SIGINT."""
    from tiercache.config import load

    settings = load(config or None)

    from tiercache.runtime.serve import run

    raise typer.Exit(run(settings))


@app.command("config")
def show_config(
    config: ConfigFile = "",
    document: Annotated[
        bool, typer.Option("--document", help="Print the reference of all settings instead.")
    ] = False,
    json: Json = False,
) -> None:
    """Check the settings and print the ones that hold, as TOML."""
    from tiercache.cli.text import as_toml
    from tiercache.config import document as reference
    from tiercache.config import load

    if document and json:
        raise UsageError("--document is Markdown and has no --json")
    if document:
        typer.echo(reference(), nl=False)
        return
    settings = load(config or None)
    typer.echo(as_json(settings) if json else as_toml(settings), nl=json)


@app.command()
def stats(
    watch: Annotated[
        float,
        typer.Option(
            "--watch", metavar="SECONDS", min=0, max=86_400, help="Repeat every SECONDS; 0: once."
        ),
    ] = 0.0,
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """Show what the node holds and how well it does."""
    with _node(socket, deadline) as node:
        _show_stats(node, json=json, fresh=watch > 0)
        while watch:
            node.rest(watch)
            _show_stats(node, json=json, fresh=True)


@app.command()
def ls(
    prefix: Annotated[str, typer.Argument(help="Only keys that start with this.")] = "",
    long: Annotated[bool, typer.Option("--long", help="Print whole keys.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help=f"Stop after N objects [default: {TABLE_ROWS_MAX} in a table, all with --json].",
            show_default=False,
        ),
    ] = None,
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """List objects."""
    from tiercache.cli import listing

    with _node(socket, deadline) as node:
        if json:
            found = listing.as_json_array(node.objects(prefix), limit)
        else:
            found = listing.as_table(node.objects(prefix), limit or TABLE_ROWS_MAX, long=long)
    if prefix and not found:
        raise ContentError(f"no key starts with {prefix}: see `tiercache ls`")
    if not (found or json):
        typer.echo("Nothing is held.")


@app.command()
def inspect(
    key: Annotated[str, typer.Argument(help="A key, or the start of one.")],
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """Print everything known of an object."""
    from tiercache.cli import views
    from tiercache.cli.documents import object_of

    if not key:
        raise UsageError("name a key, or the start of one: see `tiercache ls`")
    with _node(socket, deadline) as node:
        page = node.inspect(key)
    found = [object_of(row) for row in page.rows]
    if json:
        typer.echo(as_json(found))
    else:
        console = views.console()
        now = time.time()
        for number, item in enumerate(found[:INSPECTED_MAX]):
            if number:
                typer.echo()
            console.print(views.inspection(item, now))
        if len(found) > INSPECTED_MAX or page.cursor:
            typer.echo("There are more: name a longer key, or use `tiercache ls`.", err=True)
    if not found:
        raise ContentError(f"no key starts with {key}: see `tiercache ls`")


@app.command()
def evict(
    prefix: Annotated[str, typer.Argument(help="Only keys that start with this.")] = "",
    tier: Annotated[
        Literal["host", "nvme"] | None, typer.Option("--tier", help="Only from this tier.")
    ] = None,
    nbytes: Annotated[
        str,
        typer.Option(
            "--bytes",
            metavar="N",
            help="Stop once N bytes were dropped, such as 512MiB; copies in both tiers count.",
        ),
    ] = "",
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 60.0,
) -> None:
    """Drop objects that nobody uses; leased ones stay."""
    enough = _size(nbytes) if nbytes else 0
    if not (prefix or tier or nbytes):
        raise UsageError(
            "say what to evict: a PREFIX, --tier or --bytes; `tiercache clear --yes` drops it all"
        )
    with _node(socket, deadline) as node:
        done = node.evict(prefix, tier or "", enough)
    _show_dropped(done, json=json, rest="in use, which stayed")
    if prefix and not (done.objects or done.busy):
        raise ContentError(f"no key starts with {prefix}: see `tiercache ls`")


@app.command()
def clear(
    namespace: Annotated[
        str, typer.Argument(help="A namespace's digest, or the start of one. Default: all.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Yes, drop them.")] = False,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="On every node of the cluster, for certain.")
    ] = False,
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 60.0,
) -> None:
    """Drop a namespace, or everything, from every tier."""
    digits = namespace.lower()
    if len(digits) > 64 or set(digits) - set("0123456789abcdef"):
        raise UsageError(
            f"{namespace} is no namespace: its digest is up to 64 hexadecimal digits, see "
            f"`tiercache stats`"
        )
    if not yes:
        what = f"namespace {digits}" if digits else "everything"
        raise UsageError(f"this drops {what} from every tier: say --yes if that is meant")
    with _node(socket, deadline) as node:
        if cluster:
            clustering.clear(node, digits, deadline, json=json)
            return
        done = node.clear(digits)
    _show_dropped(done, json=json, rest="of them in use until they are released")
    if done.failed == "pool":
        raise ContentError(
            "the pool could not be told: what was cleared is out of sight here, and for others once the "
            "pool answers; clear again then to be sure"
        )
    if done.failed:
        raise ContentError(
            f"the {done.failed} tier failed: what was cleared is out of sight, but may be back after "
            f"the next start; see the node's log, then clear again"
        )
    if digits and not (done.objects or done.busy):
        raise ContentError(f"namespace {digits} holds nothing: see `tiercache stats`")


@app.command()
def verify(
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 60.0,
) -> None:
    """Read everything back and check its sums."""
    from tiercache.cli import verifying

    with _node(socket, deadline) as node:
        verified = verifying.run(node)
    if json:
        typer.echo(as_json(verified))
    else:
        verifying.show(verified)
    if verified.failed:
        raise ContentError(
            f"{len(verified.failed)} of {verified.checked} copies are not what was sealed; they "
            f"are never delivered: check the disk and the memory of this machine"
        )


@app.command()
def demo(json: Json = False) -> None:
    """Watch two processes share the state of a real model; ends with 1 when a check fails."""
    from rich.console import Console

    try:
        module = importlib.import_module("tiercache_transformers.demo")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in DEMO_EXTRA:
            raise
        raise ConfigError(
            f"the demo needs {missing}, which is not installed: run `make demo` in a checkout, or "
            f"install tiercache from it with the extra `transformers`"
        ) from error
    played = module.play(Console(stderr=json))
    if json:
        typer.echo(as_json(played.told()))
    raise typer.Exit(Exit.OK if played.holds else Exit.CONTENT)


app.command()(quality)
app.command()(replaying.replay)
app.command()(advising.advise)
app.command()(codec)
app.command()(clustering.members)
app.command()(whereabouts.where)
app.command()(protecting.pin)
app.command()(protecting.unpin)
app.command()(protecting.pins)
app.add_typer(protecting.quota, name="quota")


def _show_stats(node: "Admin", *, json: bool, fresh: bool) -> None:
    from tiercache.cli import documents, views

    statistics = documents.statistics_of(node.stats())
    if json:
        typer.echo(as_json(statistics))
        return
    console = views.console()
    if fresh:
        console.clear()  # Does nothing unless this is a terminal.
    console.print(views.stats(statistics))


def _show_dropped(done: "Evicted", *, json: bool, rest: str) -> None:
    if json:
        typer.echo(as_json(done))
        return
    busy = f"; {done.busy:,} {rest}" if done.busy else ""
    typer.echo(f"Dropped {done.objects:,} objects, {size(done.nbytes)}{busy}.")


def _size(text: str) -> int:
    from tiercache.tables import parse_size

    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise UsageError(f"--bytes: {error}") from error
    if nbytes < 1:
        raise UsageError("--bytes must be at least 1")
    return nbytes
