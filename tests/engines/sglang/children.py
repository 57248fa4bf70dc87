"""Other processes: nodes, and engines that are scripts of this folder."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tiercache.testing.nodes import NodeProcess

CHILD_S = 240

Child = Callable[..., str]
"""Runs a script of this folder in another process to its end: `child("restoring.py", argument, ...)`."""

NewNode = Callable[..., NodeProcess]
"""Starts a node, with settings by table."""


def start_child(script: str, *arguments: object) -> "subprocess.Popen[str]":
    """Start a script of this folder in another process."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
