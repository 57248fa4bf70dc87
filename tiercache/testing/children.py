"""Client processes that a test can kill."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tiercache
from tiercache.testing.nodes import START_S

BEGIN = """
import os, sys
from tiercache.client import Client, Options
from tiercache.testing import toy
from tiercache.testing.speaker import Speaker
from tiercache.wire import messages as wire
path, number = sys.argv[1], int(sys.argv[2])
options = Options(name=f"child-{number}", deadline_s=20, retry_s=0)
"""
"""What every script starts with."""

READY = """
print("ready", flush=True)
sys.stdin.read()
"""
"""Says that it is ready, and then waits for its end."""


class Child:
    """A process that runs a script of a client, which must say "ready"."""

    def __init__(self, path: Path, script: str, number: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + script, str(path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(tiercache.__file__).parents[1],
        )

    def reads(self, line: str) -> None:
        """Wait for a line; AssertionError when it says something else, or ends."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == line + "\n", said

    def tell(self, line: str) -> None:
        """Give it a line to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.wait(START_S)


@contextlib.contextmanager
def children(path: Path, script: str, count: int = 1) -> Iterator[list[Child]]:
    """Run `count` clients of the node at `path` until each has said "ready"; none outlives the
    block."""
    made = [Child(path, script, number) for number in range(1, count + 1)]
    try:
        for child in made:
            child.reads("ready")
        yield made
    finally:
        for child in made:
            child.kill()
            child.process.communicate()
