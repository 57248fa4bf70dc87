"""An etcd of a test's own."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

START_S = 30.0
ASK = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1] + "/health", timeout=1).read())
"""


def free_port() -> int:
    """Return a port of the loopback that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class EtcdServer:
    """One etcd, with leases that may be as short as a second: on loopback, or at `host` of what `inside`
    leads into, a command that runs the command given to it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", inside: Sequence[str] = ()) -> None:
        self.port, self._peer_port = free_port(), free_port()
        self._host = host
        self._inside = inside
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"http://{self._host}:{self.port}"

    def start(self) -> None:
        """Start it, on what it had stored, and wait until it answers."""
        peer = f"http://{self._host}:{self._peer_port}"
        self._process = subprocess.Popen(
            [
                *self._inside,
                "etcd",
                f"--data-dir={self._folder}",
                f"--listen-client-urls={self.url}",
                f"--advertise-client-urls={self.url}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--heartbeat-interval=20",  # The shortest lease is some of these.
                "--election-timeout=200",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + START_S
        pause = 0.01
        while not self._answers():
            assert self._process.poll() is None, "etcd ended"
            assert time.monotonic() < until, "etcd does not answer"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(pause)

    def _answers(self) -> bool:
        if self._inside:
            asked = subprocess.run(
                [*self._inside, sys.executable, "-c", ASK, self.url],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            return b'"true"' in asked.stdout
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return b'"true"' in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
