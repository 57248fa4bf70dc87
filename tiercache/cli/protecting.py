"""`pin`, `unpin`, `pins` and `quota`: what is kept, and who may take how much."""

import getpass
import re
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiercache.cli.asking import Deadline, Json, Socket, ask
from tiercache.cli.exits import ContentError, UsageError
from tiercache.cli.text import as_json, plain, size

if TYPE_CHECKING:
    from tiercache.cli.replies import Shared, ShareRows

REFUSALS = {
    "nothing": "no key starts with {prefix}: see `tiercache ls`",
    "too_many": "{owner} holds as many pins as one owner may: end some, see `tiercache pins`",
    "over_budget": "that is more than may be pinned: see `tiercache pins` and "
    "protection.pinned_share_max",
    "invalid": "a pin lasts for {age_s:g} s at most: see protection.pin_s_max",
}
Owner = Annotated[
    str, typer.Option("--owner", metavar="NAME", help="Whose pin it is [default: this user].")
]
Share = Annotated[
    float | None, typer.Option(metavar="SHARE", min=0, max=1, help="0 to 1; 1 is no limit.")
]
Tenant = Annotated[
    str, typer.Argument(help="Eight digits, as `tiercache stats` shows them; - is nobody's salt.")
]

quota = typer.Typer(help="Show and set what each tenant may take.", no_args_is_help=True)


def pin(
    prefix: Annotated[str, typer.Argument(help="A key, or the start of some.")],
    age: Annotated[
        float, typer.Option("--age", metavar="SECONDS", min=0.001, help="How long it lasts.")
    ] = 3600.0,
    owner: Owner = "",
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 60.0,
) -> None:
    """Keep objects in memory for a while, whoever else needs room."""
    if not prefix:
        raise UsageError("name a key, or the start of one: see `tiercache ls`")
    owner = owner or _user()
    with ask(socket, deadline) as node:
        done = node.pin(prefix, owner, age)
    if json:
        told = msgspec.structs.asdict(done)
        typer.echo(as_json({name: told[name] for name in told if name != "call"}))
    if done.outcome == "invalid":
        raise UsageError(REFUSALS["invalid"].format(age_s=done.age_ms / 1000))
    if done.outcome != "pinned":
        raise ContentError(REFUSALS[done.outcome].format(prefix=prefix, owner=owner))
    if not json:
        typer.echo(
            f"Pin {done.number}: {done.objects:,} objects, {size(done.nbytes)} of memory, for "
            f"{done.age_ms / 1000:g} s."
        )


def unpin(
    pin: Annotated[
        int | None, typer.Argument(min=1, help="A pin's number, see `tiercache pins`.")
    ] = None,
    owner: Annotated[
        str, typer.Option("--owner", metavar="NAME", help="All that operators pinned as NAME.")
    ] = "",
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 60.0,
) -> None:
    """End a pin, or all of an owner's that operators made."""
    if (pin is None) == (not owner):
        raise UsageError("name one pin, or --owner")
    with ask(socket, deadline) as node:
        done = node.unpin(pin or 0, owner)
    if json:
        typer.echo(as_json({"objects": done.objects, "nbytes": done.nbytes}))
    elif done.outcome == "unpinned":
        typer.echo(f"No longer pinned: {done.objects:,} objects, {size(done.nbytes)}.")
    if done.outcome != "unpinned":
        raise ContentError(f"there is no pin of {owner or pin}: see `tiercache pins`")


def pins(socket: Socket = "", json: Json = False, deadline: Deadline = 5.0) -> None:
    """List every pin, and how much of the budget they take."""
    from tiercache.cli import views

    with ask(socket, deadline) as node:
        found = node.pins()
    if json:
        typer.echo(as_json(found))
        return
    if found.pins:
        views.console(whole=True).print(views.pins(found.pins))
    if found.count > len(found.pins):
        typer.echo(f"These are the first {len(found.pins):,} of {found.count:,}.", err=True)
    typer.echo(f"Pinned: {size(found.nbytes)} of {size(found.nbytes_max)} that may be.")


@quota.command("get")
def get(
    tenant: Tenant = "",
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """Show what tenants may take, what they take, and what became of their offers."""
    with ask(socket, deadline) as node:
        found = node.shares(_tenant(tenant) if tenant else "")
    _show(found, json=json)
    if tenant and not found.tenants:
        raise ContentError(
            f"tenant {tenant} holds nothing and has no share of its own: it may take {found.host:g} "
            f"of memory and {found.nvme:g} of the disk, like all that are not named"
        )


@quota.command("set")
def put(
    tenant: Tenant,
    host: Share = None,
    nvme: Share = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="On every node of the cluster, until it is unset.")
    ] = False,
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """Set a tenant's share: on this node until its next start, or on all of its cluster. A lower one
    takes effect as the tenant saves, or others need the room."""
    if host is None and nvme is None:
        raise UsageError("say --host or --nvme, each with a share from 0 to 1")
    with ask(socket, deadline) as node:
        if cluster:
            _tell(node.share_all(_tenant(tenant), host, nvme), json=json)
        else:
            _show(node.shares(_tenant(tenant), host, nvme), json=json)


@quota.command("unset")
def unset(
    tenant: Tenant,
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """Forget what the cluster says of a tenant: from now on each node's own settings count."""
    with ask(socket, deadline) as node:
        _tell(node.share_all(_tenant(tenant), None, None), json=json)


@quota.command("label")
def label() -> None:
    """Read a salt from stdin, and print the tenant's eight digits; the salt is told to nobody."""
    from tiercache.state.keys import tenant_of

    typer.echo(tenant_of(sys.stdin.read().rstrip("\n")))


def _show(found: "ShareRows", *, json: bool) -> None:
    from tiercache.cli import views

    if json:
        typer.echo(as_json(found))
        return
    if found.tenants:
        views.console(whole=True).print(views.shares(found.tenants))
    typer.echo(f"Others may take {found.host:g} of memory and {found.nvme:g} of the disk each.")


def _tell(found: "Shared", *, json: bool) -> None:
    if json:
        typer.echo(as_json(found))
        return
    said = [
        f"{share:g} of {what}"
        for share, what in ((found.host, "memory"), (found.nvme, "the disk"))
        if share is not None
    ]
    what = " and ".join(said) or "what its own settings say"
    typer.echo(f"On every node {plain(found.tenant)} may take {what}.")


def _tenant(name: str) -> str:
    if not re.fullmatch(r"-|[0-9a-f]{8}", name):
        raise UsageError(
            "a tenant is - or eight hexadecimal digits: see `tiercache stats`, or "
            "`tiercache quota label`"
        )
    return name


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"
