"""The `tiercache` command: runs a node, and asks a running one what it holds.

See `docs/cli.md` for every command, its JSON and its exit codes.
"""

import io
import sys


def main() -> None:
    """Run the command line and exit with its code; never returns."""
    from tiercache.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding cannot say is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="tiercache")
