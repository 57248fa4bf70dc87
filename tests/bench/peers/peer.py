"""What a store must do to be measured, and the small things that every peer needs.

A peer that an operation means nothing to leaves it out of `ops`. All sizes are bytes.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[np.uint8]
Context: TypeAlias = Mapping[str, str]

MIB = 1 << 20
DISK = os.environ.get("TIERCACHE_BENCH_DISK", "/var/tmp")
"""A folder on the disk that is measured."""

PAGE_BYTES = 4096
START_S_MAX = 120.0
STOP_S_MAX = 15.0
LOOK_S = 0.02


class Peer:
    """One store. `start`, `stop` and `version` run in the parent, all else in a client process.

    Keys come in lists, as many as the batch says; `batches` are the batch sizes worth measuring.
    Nothing a peer returns may be served from a copy that its own client process keeps.
    """

    name = "peer"
    ops: tuple[str, ...] = ("put", "get_into", "exists")
    batches: tuple[int, ...] = (1,)
    objects_max = 2000
    check = True
    """Whether what one client wrote can be read by another."""

    def start(self) -> Context:
        """Start the servers; what is returned is given to `connect`."""
        return {}

    def stop(self) -> None:
        """Stop them, and leave nothing behind."""

    def version(self) -> str:
        """Return what was measured."""
        return ""

    def connect(self, context: Context, rank: int) -> None:
        """Become client number `rank`."""

    def allocate(self, nbytes: int) -> Buffer:
        """Return a buffer as the peer likes it best, touched."""
        return aligned(nbytes)

    def prepare(self, size: int) -> None:
        """Objects are of `size` from here on. Not timed."""

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        """Store new objects."""
        raise NotImplementedError

    def get(self, keys: Sequence[str]) -> object:
        """Return objects the way the store likes best; dropped at once."""
        raise NotImplementedError

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        """Have the bytes in buffers of the caller: what an engine needs."""
        raise NotImplementedError

    def exists(self, keys: Sequence[str]) -> bool:
        """Return whether all of them are there."""
        raise NotImplementedError

    def settle(self) -> None:
        """Return when all that was put can be read. Counts as part of `put`."""

    def delete(self, keys: Sequence[str]) -> None:
        """Make room. Not timed."""

    def close(self) -> None:
        """The client process ends."""


class Servers:
    """Server processes in a folder of their own."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"tiercache-bench-{name}-"))
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, *command: str, **environment: str) -> None:
        """Start a server; its output goes to a log in the folder."""
        with (self.folder / f"{len(self._started)}.log").open("wb") as log:
            self._started.append(
                subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
            )

    def wait_for(self, address: str | int) -> None:
        """Return once somebody listens: at a TCP port of this host, or at a socket's path."""
        until = time.monotonic() + START_S_MAX
        while not _listens(address):
            for process in self._started:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} ended at once:\n{self.last_words()}")
            if time.monotonic() > until:
                raise TimeoutError(f"nobody listens at {address}:\n{self.last_words()}")
            pause(LOOK_S)

    def last_words(self) -> str:
        """Return the ends of the logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs)

    def stop(self) -> None:
        """End all servers, the last one first, and remove the folder."""
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def aligned(nbytes: int) -> Buffer:
    """Return a page-aligned buffer whose pages are there."""
    whole = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
    whole.fill(0)  # Zeroed pages of the kernel's would come with the first use.
    start = -whole.ctypes.data % PAGE_BYTES
    return whole[start : start + nbytes]


def free_port() -> int:
    """Return a TCP port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def pause(seconds: float) -> None:
    """Let others run, between two looks at something that cannot be waited for."""
    select.select([], [], [], seconds)


def _listens(address: str | int) -> bool:
    if isinstance(address, int):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", address), 1):
            return True
        return False
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.connect(address)
        return True
    return False
