"""An object store of a test's own that speaks S3, and a gate in front of it that misbehaves."""

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tiercache.testing.etcd import free_port

HOST = "127.0.0.1"
BUCKET = "pool"
START_S = 30.0
SIGNED = (
    "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, "
    "SignedHeaders=host, Signature=0"
)
"""It tells moto which service is meant; who signed does not matter."""


def why_not() -> str:
    """Return why such a store cannot be started here, "" when it can."""
    missing = [name for name in ("moto", "flask", "obstore") if not importlib.util.find_spec(name)]
    return f"not installed: {', '.join(missing)}" if missing else ""


class S3Server:
    """moto's server, in a process of its own, with one empty bucket."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        """Start it, and make the bucket. After a kill it begins with nothing."""
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]
        with (self._folder / "moto.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self._has_bucket():
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)

    def kill(self) -> None:
        """End it with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(START_S)

    def _has_bucket(self) -> bool:
        request = urllib.request.Request(
            f"{self.url}/{BUCKET}", method="PUT", headers={"Authorization": SIGNED}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


Change = Callable[[bytes], bytes | None]
"""What becomes of a whole answer of the server: other bytes, or None to say nothing at all."""


class Gate:
    """A way to the server on which answers can be changed. One request per connection.

    `change` may be set at any time, and holds for answers from then on.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self.change: Change | None = None
        self.seen: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._done = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._port = 0
        self._thread = threading.Thread(target=self._run, name="gate")
        self._thread.start()
        assert self._listening.wait(START_S)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self._port}"

    def close(self) -> None:
        """End it and all connections."""
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(START_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._enter, HOST, 0)
        self._port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._done.wait()
        server.close()
        while self._open:  # One may come while others end.
            for task in self._open:
                task.cancel()
            await asyncio.wait(self._open)

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        # Cancelled only at the end of the gate, where a cancelled task would be reported as an error.
        ends = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with contextlib.suppress(*ends), contextlib.closing(writer):
            request = await _whole_request(reader)
            self.seen.append(request)
            there, back = await asyncio.open_connection(HOST, self._to)
            with contextlib.closing(back):
                back.write(request)
                answer = await there.read(-1)
            changed = self.change(answer) if self.change else answer
            if changed is None:
                await self._done.wait()
                return
            writer.write(changed)
            await writer.drain()


async def _whole_request(reader: asyncio.StreamReader) -> bytes:
    """Return a request, changed to ask for a connection of its own."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    body = await reader.readexactly(length)
    return head[:-2] + b"Connection: close\r\n\r\n" + body
