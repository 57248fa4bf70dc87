"""What every command that asks a node has in common."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tiercache.cli.admin import Admin

Socket = Annotated[
    str,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="The node's socket [default: node.socket].",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Deadline = Annotated[
    float,
    typer.Option(
        "--deadline", metavar="SECONDS", min=0.01, max=86_400, help="Longest wait per answer."
    ),
]


def ask(socket: str, deadline_s: float) -> "Admin":
    """Connect to the node at `socket`, "" for the one that the settings name."""
    from tiercache.cli.admin import Admin
    from tiercache.config import load

    return Admin(socket or load().node.socket, deadline_s)
