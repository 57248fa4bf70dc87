"""How a command ends: exit codes, and the one line on stderr that says what to do."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NoReturn

import typer
from typer.core import TyperGroup

from tiercache.cli.text import plain
from tiercache.errors import (
    ConfigError,
    LayoutError,
    ProtocolError,
    RefusedError,
    TiercacheError,
    UnavailableError,
)


class Exit(IntEnum):
    """Exit codes; scripts may rely on them."""

    OK = 0
    CONTENT = 1  # Something is damaged, or what was named is not there.
    USAGE = 2  # The command line or a setting is wrong.
    UNREACHABLE = 3  # No node, or no answer in time.
    REFUSED = 4  # The node will not talk to this caller, or not in this protocol.
    PIPE_CLOSED = 141  # As a program ends that SIGPIPE ended.


class ContentError(TiercacheError):
    """Something is damaged, or what was named is not there."""


class UsageError(TiercacheError):
    """The command line asks for what cannot be asked, as it or the node says."""


def exit_code(error: TiercacheError) -> Exit:
    """Return the code that a command which failed with `error` ends with."""
    match error:
        case ConfigError() | LayoutError() | UsageError():
            return Exit.USAGE
        case UnavailableError():
            return Exit.UNREACHABLE
        case RefusedError() | ProtocolError():
            return Exit.REFUSED
        case _:
            return Exit.CONTENT


class Commands(TyperGroup):
    """The group of all commands; every way in which one can fail ends here, as one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: object,
    ) -> NoReturn:
        """Run one command line and exit. Of typer's parameters, the last three do not matter."""
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False)
        except TiercacheError as error:
            _complain(str(error))
            code = exit_code(error)
        except typer.TyperException as error:
            _complain(f"{error.format_message()} (see `tiercache --help`)")
            code = Exit.USAGE
        except SystemExit as end:
            # typer and rich answer a closed pipe with code 1, which means something else here.
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            code = Exit.PIPE_CLOSED
        except OSError as error:
            _complain(f"{error.filename or 'output'}: {error.strerror or error}")
            code = Exit.CONTENT
        raise SystemExit(code if isinstance(code, int) else Exit.OK)


def _complain(text: str) -> None:
    typer.echo(f"tiercache: {plain(' '.join(text.split()))}", err=True)
