"""How many descriptors a process has open, for tests of what leaves none behind."""

import os
from pathlib import Path


def open_descriptors() -> int:
    """Return how many descriptors this process has open, TCP connections left out.

    Those come and go while nobody asks: libraries that a test loaded keep theirs for a while, and close
    them in threads of their own.
    """
    connections = _connections()
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # The one that lists them, or closed since.
            continue
    connections |= _connections()  # Of those made meanwhile.
    return sum(target not in connections for target in targets)


def _connections() -> set[str]:
    """Return what descriptors of TCP sockets lead to."""
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net") / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        found.update(f"socket:[{line.split()[9]}]" for line in lines)
    return found
