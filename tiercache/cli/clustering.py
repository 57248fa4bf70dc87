"""`members`, and `clear --cluster`: what concerns all nodes of a cluster."""

from typing import TYPE_CHECKING

import typer

from tiercache.cli.asking import Deadline, Json, Socket, ask
from tiercache.cli.exits import UsageError
from tiercache.cli.text import as_json, plain
from tiercache.errors import UnavailableError

if TYPE_CHECKING:
    from tiercache.cli.admin import Admin

DIGITS = 64
"""Of a namespace's whole digest."""

SPARE_S = 1.0
"""How much sooner than the command's deadline the node answers."""


def members(socket: Socket = "", json: Json = False, deadline: Deadline = 5.0) -> None:
    """List the nodes of the cluster, and the pool, as this one sees them."""
    from tiercache.cli import views

    with ask(socket, deadline) as node:
        found = node.members()
    if json:
        typer.echo(as_json(found))
        return
    if found.cluster:
        views.console(whole=True).print(views.members(found))
    if found.pool is not None:
        views.console(whole=True).print(views.pool(found.pool))
    for namespace, names in found.behind.items():
        typer.echo(f"The last clear of {namespace[:12]} is not done by {plain(', '.join(names))}.")
    if found.cluster and found.standing_s <= 0:
        typer.echo(
            "This node is isolated: it does not reach etcd, and gives nothing out until it does.",
            err=True,
        )


def clear(node: "Admin", digits: str, deadline_s: float, *, json: bool) -> None:
    """Have all nodes drop a namespace; raises UnavailableError when some have not said so in time."""
    namespace = whole_digest(node, digits)
    done = node.clear_all(namespace, max(0.0, deadline_s - SPARE_S))
    if json:
        typer.echo(as_json(done))
    if done.behind:
        raise UnavailableError(
            f"not done yet by {', '.join(done.behind)}: one that is down or cut off gives nothing out "
            f"once it was silent for {done.ttl_s} s, and drops it when it is back; run this again, "
            f"with --deadline {done.ttl_s + 10} or more, to be told when all is done"
        )
    if not json:
        typer.echo(f"Every node has dropped {namespace}.")


def whole_digest(node: "Admin", digits: str) -> str:
    """Return the one namespace whose digest starts so, as this node knows it."""
    if len(digits) == DIGITS:
        return digits  # Other nodes may hold what this one does not.
    known = {label.digest.hex() for label, _ in node.stats().namespaces}
    found = sorted(name for name in known if name.startswith(digits)) if digits else []
    if len(found) != 1:
        what = f"{len(found)} namespaces of this node start with {digits}" if digits else "no name"
        raise UsageError(f"{what}: give one namespace's whole digest, see `tiercache stats --json`")
    return found[0]
