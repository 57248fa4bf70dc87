"""`where`: how deep a prompt could be resumed, on which node, and what that would take."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tiercache.cli.asking import Deadline, Json, Socket, ask
from tiercache.cli.clustering import whole_digest
from tiercache.cli.exits import ContentError, UsageError
from tiercache.cli.text import as_json, plain, size

if TYPE_CHECKING:
    from tiercache.wire import sharing

PROMPT_BYTES_MAX = 64 << 20
"""Longest file of tokens or digests that is read."""

DIGEST_DIGITS = 64
EVERY = 1 << 62
"""A limit beyond every prompt."""

REASONS = {
    "unknown_prefix": "nothing of it is held here",
    "no_state": "blocks of it are held here, and no state to go on from",
    "incomplete": "what is held of it here is not enough at any boundary",
    "beyond_limit": "all that is held here is deeper than the limit",
    "isolated": "this node is cut off from its cluster, and gives nothing out",
}


def where(
    namespace: Annotated[str, typer.Argument(help="A namespace's digest, or the start of one.")],
    prompt: Annotated[
        str,
        typer.Argument(help="File with the prompt's tokens as numbers; - reads them from stdin."),
    ] = "-",
    digests: Annotated[
        bool,
        typer.Option("--digests", help="The file holds digests of whole blocks, in hexadecimal."),
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="TOKENS",
            min=0,
            help="Deepest boundary of use [default: one token less than the prompt].",
            show_default=False,
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option("--codec", help="Accept this encoding too; may be repeated."),
    ] = None,
    socket: Socket = "",
    json: Json = False,
    deadline: Deadline = 5.0,
) -> None:
    """Show where a prompt could be resumed; changes nothing."""
    words = _words(prompt)
    codecs = list(dict.fromkeys(["native", *(codec or [])]))
    with ask(socket, deadline) as node:
        digest = bytes.fromhex(whole_digest(node, namespace.lower()))
        if digests:
            chain, most = _digests(words), EVERY
        else:
            # The node knows how its blocks are cut.
            step = node.where(digest, b"", 0, codecs).block_tokens
            chain, most = _chain(words, step)
        found = node.where(digest, chain, most if limit is None else limit, codecs)
    if json:
        rows = [msgspec.structs.asdict(place) for place in found.places]
        told = {"block_tokens": found.block_tokens, "reason": found.reason, "places": rows}
        typer.echo(as_json(told))
    else:
        _show(found)
    if not any(place.boundary for place in found.places):
        raise ContentError(f"this prompt can be resumed nowhere: {_reason(found)}")


def _reason(found: "sharing.Places") -> str:
    return REASONS.get(found.reason, plain(found.reason))


def _words(prompt: str) -> list[str]:
    try:
        if prompt == "-":
            text = sys.stdin.read(PROMPT_BYTES_MAX + 1)
        else:
            with Path(prompt).open(encoding="ascii") as file:
                text = file.read(PROMPT_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{plain(prompt)} cannot be read: {error}") from error
    if len(text) > PROMPT_BYTES_MAX:
        raise UsageError(f"{plain(prompt)} is longer than {PROMPT_BYTES_MAX >> 20} MiB")
    return re.findall(r"[^\s,\[\]]+", text)


def _digests(words: list[str]) -> bytes:
    for word in words:
        if not re.fullmatch(rf"[0-9a-fA-F]{{{DIGEST_DIGITS}}}", word):
            raise UsageError(f"{plain(word[:80])} is no digest: {DIGEST_DIGITS} hexadecimal digits")
    return bytes.fromhex("".join(words))


def _chain(words: list[str], block_tokens: int) -> tuple[bytes, int]:
    """Return the digests of the whole blocks of these tokens, and one less than there are."""
    from tiercache.state import Chain

    for word in words:
        if not re.fullmatch(r"\d{1,10}", word) or int(word) >= 1 << 32:
            raise UsageError(f"{plain(word[:80])} is no token: a number below 2**32")
    tokens = [int(word) for word in words]
    return Chain(tokens, block_tokens).blocks(), max(0, len(tokens) - 1)


def _show(found: "sharing.Places") -> None:
    from tiercache.cli import views

    views.console(whole=True).print(views.places(found))
    here = found.places[0]
    if not here.boundary:
        typer.echo(f"Not on this node: {_reason(found)}.")
    elif here.compute_s >= 0 and here.seconds >= here.compute_s:
        typer.echo(
            f"Bringing {size(here.absent_bytes)} to memory takes longer than computing the tokens."
        )
