"""Real nodes in processes of their own, for tests that kill them."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import tiercache
from tiercache.client import Client
from tiercache.tables import toml_text
from tiercache.testing.speaker import Figures, Speaker

START_S = 20.0
"""How long a start, an end or a condition may take on a busy machine before it is a failure."""

LOOK_S = 0.002
Value = str | int | float | bool | tuple[int, ...] | tuple[str, ...] | dict[str, float]
Table = Mapping[str, Value]


class Launcher:
    """Starts nodes quickly; all of them end with it, for certain. One thread at a time.

    `inside`: a command that runs the command given to it, such as `unshare`.
    """

    def __init__(self, inside: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tiercache.testing.launcher"],
            cwd=Path(tiercache.__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, settings: Path, log: Path) -> int:
        """Start a node; return its process id."""
        return self._ask("start", str(settings), str(log))

    def wait(self, pid: int) -> int:
        """Return how a node that has ended ended: its exit code, or minus the signal."""
        return self._ask("wait", pid)

    def close(self) -> None:
        """Kill everything that was started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(START_S)
        self._process.stdout.close()

    def _ask(self, *command: str | int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


class NodeProcess:
    """One node with a directory of its own, which outlives the process.

    `tables` are settings by table; where it listens and where it stores are set here. It may be
    started and ended any number of times. Leaving it as a context manager kills it.
    """

    def __init__(self, launcher: Launcher, folder: Path, **tables: Table) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.nvme = folder / "nvme"
        self.log = folder / "log"
        self.pid = 0
        self._launcher = launcher
        self._pidfd = -1
        self._tables = {name: dict(table) for name, table in tables.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.running:
            self.kill()

    @property
    def running(self) -> bool:
        """Whether a process that was started has not been waited for."""
        return self._pidfd >= 0

    def start(self, *, crash_at: str = "", listening: bool = True) -> None:
        """Start it, and wait until clients can connect unless told not to."""
        settings = self.folder / "settings.toml"
        settings.write_text(self._settings(crash_at))
        self.pid = self._launcher.start(settings, self.log)
        self._pidfd = os.pidfd_open(self.pid)
        if listening:
            self.wait_until(self.listens)

    def set(self, **tables: Table) -> None:
        """Change settings; they hold from the next start on."""
        for name, table in tables.items():
            self._tables.setdefault(name, {}).update(table)

    def listens(self) -> bool:
        """Whether clients can connect."""
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        signal.pidfd_send_signal(self._pidfd, number)

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for its end and return how it ended: its exit code, or minus the signal."""
        ended, _, _ = select.select([self._pidfd], [], [], timeout_s)
        if not ended:
            raise AssertionError(f"the node did not end within {timeout_s} s\n{self.said()}")
        os.close(self._pidfd)
        self._pidfd = -1
        return self._launcher.wait(self.pid)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, self.said()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it with a signal that it may take its time for; return its exit code."""
        self.send(number)
        return self.wait()

    def said(self) -> str:
        """Return its log, of all starts."""
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Return once `condition()` holds; AssertionError when the node ends or time is up."""
        until = time.monotonic() + timeout_s
        while not condition():
            ended, _, _ = select.select([self._pidfd], [], [], LOOK_S)
            if ended:
                raise AssertionError(f"the node ended by itself\n{self.said()}")
            if time.monotonic() > until:
                raise AssertionError(f"not so within {timeout_s} s\n{self.said()}")

    def figures(self) -> Figures:
        """Return what it counts. Asking is traffic, and a connection."""
        with Speaker(self.socket) as speaker:
            return speaker.figures()

    def counter(self, name: str, label: str = "") -> int:
        """Return one counter."""
        return self.figures().counters[name][label]

    def gauge(self, name: str, label: str = "") -> float:
        """Return one gauge."""
        return self.figures().gauges[name][label]

    def wait_scanned(self) -> None:
        """Wait until it found all that was on its disk when it started."""
        self.wait_until(lambda: self.figures().node.nvme == "ready")

    def open_files(self) -> int:
        """Return how many descriptors it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_s(self) -> float:
        """Return the processor time it has used, in seconds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _settings(self, crash_at: str) -> str:
        tables: dict[str, dict[str, Value]] = {
            "node": {"socket": str(self.socket), "log": "debug", "crash_at": crash_at},
            "host": {"bytes": "8MiB", "segment_bytes": "4MiB"},
            "nvme": {"path": str(self.nvme), "cap_bytes": "64MiB", "segment_bytes": "1MiB"},
            "metrics": {"bind": ""},
        }
        for name, table in self._tables.items():
            tables.setdefault(name, {}).update(table)
        lines: list[str] = []
        for name, table in tables.items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {toml_text(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"


NewNode = Callable[..., NodeProcess]
"""Makes a node that was not started, with settings by table."""

NewClient = Callable[..., Client]
"""Makes a client of a node: `new_client(node, deadline_s=1.0)`."""


def eventually(condition: Callable[[], bool], timeout_s: float = START_S) -> bool:
    """Whether `condition()` comes to hold within `timeout_s`."""
    until = time.monotonic() + timeout_s
    rest = threading.Event()
    while not condition():
        if time.monotonic() > until:
            return False
        rest.wait(LOOK_S)
    return True
