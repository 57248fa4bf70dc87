"""The processes of the demo: a node and engines, started, killed and stopped."""

import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tiercache.errors import TiercacheError, UnavailableError
from tiercache_transformers.demo_engine import Answer, Ask, Flush, Flushed, Open, Opened, Touch

START_S = 60.0
ANSWER_S = 120.0
STOP_S = 10.0
POLL_S = 0.02

_CONFIG = """\
[node]
socket = "{socket}"
[host]
bytes = "128MiB"
segment_bytes = "64MiB"
[nvme]
path = "{nvme}"
cap_bytes = "1GiB"
segment_bytes = "16MiB"
write_back = "{write_back}"
[metrics]
bind = ""
"""

Reply = Opened | Answer | Flushed


class NodeProcess:
    """A node, `tiercache serve`, with all it owns under `directory`, whose path must be short: it
    holds the socket. `write_back`: see the settings."""

    def __init__(self, directory: Path, write_back: str = "earned") -> None:
        self.socket = directory / "node.sock"
        self._config = directory / "node.toml"
        self._log = directory / "node.log"
        nvme = directory / "nvme"
        settings = _CONFIG.format(socket=self.socket, nvme=nvme, write_back=write_back)
        self._config.write_text(settings)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it and wait until it accepts connections; return how many seconds that took."""
        started = time.monotonic()
        command = [sys.executable, "-m", "tiercache", "serve", "--config", str(self._config)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        while not self._accepts():
            if not self.runs_for(POLL_S) or time.monotonic() - started > START_S:
                raise UnavailableError(f"the node did not start:\n{self._log.read_text()[-2000:]}")
        return time.monotonic() - started

    def runs_for(self, seconds: float) -> bool:
        """Wait that long; return whether it still runs, at once when it does not."""
        if self._process is None:
            return False
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return True
        return False

    def kill(self) -> None:
        """End it with SIGKILL: it can tidy nothing up."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(STOP_S)
            self._process = None

    def stop(self) -> None:
        """Ask it to end; kill it when it does not."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _accepts(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True


class EngineProcess:
    """One engine in its own process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tiercache_transformers.demo_engine"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._decoder = msgspec.json.Decoder[Reply](Reply)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def open(self, order: Open) -> str:
        """Open a session; return its client's status."""
        return self._status(self._call(order))

    def touch(self, session: str) -> str:
        """Call the session's node; return its client's status."""
        return self._status(self._call(Touch(session)))

    def ask(self, session: str, prompt: tuple[int, ...], count: int) -> Answer:
        """Run a prompt."""
        reply = self._call(Ask(session, prompt, count))
        if not isinstance(reply, Answer):
            raise TiercacheError(f"the engine answered {type(reply).__name__}")
        return reply

    def flush(self, session: str) -> Flushed:
        """Wait until what has earned it is on NVMe."""
        reply = self._call(Flush(session, START_S))
        if not isinstance(reply, Flushed):
            raise TiercacheError(f"the engine answered {type(reply).__name__}")
        return reply

    def stop(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _call(self, order: Open | Ask | Flush | Touch) -> Reply:
        orders, replies = self._process.stdin, self._process.stdout
        if orders is None or replies is None:
            raise TiercacheError("the engine has no pipes")
        orders.write(msgspec.json.encode(order) + b"\n")
        orders.flush()
        if not select.select([replies], [], [], ANSWER_S)[0]:
            raise UnavailableError(f"the engine did not answer within {ANSWER_S} s")
        line = replies.readline()
        if not line:
            raise UnavailableError(f"the engine ended with code {self._process.wait(STOP_S)}")
        return self._decoder.decode(line)

    @staticmethod
    def _status(reply: Reply) -> str:
        if not isinstance(reply, Opened):
            raise TiercacheError(f"the engine answered {type(reply).__name__}")
        return reply.status
