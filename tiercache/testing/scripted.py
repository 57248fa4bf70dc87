"""A node in a thread: a real socket, a real arena, and answers that a test chooses.

It speaks the wire protocol through the same code as a real node, passes the descriptors of a real
memfd, and answers from a `Shelf` unless told otherwise. For tests of clients; not for use.
"""

import contextlib
import mmap
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from tiercache.errors import ProtocolError
from tiercache.state import Layout
from tiercache.testing.shelf import Shelf
from tiercache.wire import ServerSide
from tiercache.wire import messages as wire

FRAME_BYTES_MAX: Final = 1 << 20
PATIENCE_S: Final = 20.0
"""How long a test waits for something to arrive before it fails."""

M = TypeVar("M")
Script = Callable[[wire.Request], wire.Reply | None]


class ScriptedNode:
    """Listens at `path` from construction to `stop`.

    `script(request)` may return another reply than the shelf's, or None to leave it to the shelf.
    While `mute` is set, requests are noted but not answered; `speak` answers them, in order.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        *,
        boot: str = "boot-1",
        segments: tuple[int, ...] = (1 << 20,),
        batch_max: int = 64,
    ) -> None:
        self.path = path
        self.boot = boot
        self.batch_max = batch_max
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.script: Script = lambda _: None
        self.mute = False
        self.received: list[wire.FromClient] = []
        self.connections = 0
        self._segments = segments
        self._arena = [_memfd(size) for size in segments]
        self.memory = [mmap.mmap(fd, size) for fd, size in zip(self._arena, segments, strict=True)]
        self.shelf = Shelf(layout, self.memory)
        self._kept: list[tuple[socket.socket, ServerSide, wire.Request]] = []
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._sides: dict[socket.socket, ServerSide] = {}
        self._hearing = threading.Event()
        self._hearing.set()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="scripted node", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Die: close everything. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._hearing.set()
        self._wake.send(b"x")
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        for sock in (*self._sides, self._listener, self._woken, self._wake):
            sock.close()
        self._selector.close()
        for descriptor in self._arena:
            os.close(descriptor)
        self.path.unlink(missing_ok=True)

    def freeze(self) -> None:
        """Stop reading, as a stopped process does; `thaw` goes on."""
        self._hearing.clear()
        self._wake.send(b"x")

    def thaw(self) -> None:
        """Read again."""
        self._hearing.set()

    def speak(self) -> None:
        """Answer what was kept while `mute`, and from now on."""
        with self._changed:
            self.mute = False
            kept, self._kept = self._kept, []
            for sock, side, request in kept:
                if sock in self._sides:
                    self._reply(sock, side, request)

    def drop_clients(self) -> None:
        """Close every connection."""
        with self._changed:
            for sock in list(self._sides):
                sock.shutdown(socket.SHUT_RDWR)

    def wait(self, kind: type[M], count: int = 1) -> list[M]:
        """Return the messages of a kind, once there are `count` of them."""
        found: list[M] = []

        def enough() -> bool:
            found[:] = [message for message in self.received if isinstance(message, kind)]
            return len(found) >= count

        with self._changed:
            assert self._changed.wait_for(enough, PATIENCE_S), f"{len(found)} of {count} {kind}"
        return found

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once `holds()`, looked at after everything that arrives."""
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S)

    # --- the thread

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                self._hearing.wait()
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._woken:
                    sock.recv(64)
                elif sock is self._listener:
                    accepted, _ = sock.accept()
                    self._selector.register(accepted, selectors.EVENT_READ)
                    with self._changed:
                        self.connections += 1
                        self._sides[accepted] = ServerSide(self.frame_bytes_max)
                        self._changed.notify_all()
                else:
                    self._read(sock)

    def _read(self, sock: socket.socket) -> None:
        try:
            chunk = sock.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        with self._changed:
            side = self._sides[sock]
            try:
                side.receive(chunk)
                while (message := side.next()) is not None:
                    self._hear(sock, side, message)
            except ProtocolError:
                sock.send(side.farewell())
                chunk = b""
            if not chunk:
                self._selector.unregister(sock)
                del self._sides[sock]
                sock.close()
                if not self._sides:
                    self.shelf.forget_session()
            self._changed.notify_all()

    def _hear(self, sock: socket.socket, side: ServerSide, message: wire.FromClient) -> None:
        self.received.append(message)
        if isinstance(message, wire.Commit | wire.Cancel | wire.Release | wire.Detach):
            self.shelf.hear(message)
        elif self.mute:
            self._kept.append((sock, side, message))
        else:
            self._reply(sock, side, message)

    def _reply(self, sock: socket.socket, side: ServerSide, request: wire.Request) -> None:
        reply = self.script(request)
        if reply is None and isinstance(request, wire.Hello):
            reply = wire.Welcome(
                request.call,
                wire.PROTOCOL,
                self.boot,
                "scripted",
                self.frame_bytes_max,
                self.batch_max,
            )
        elif reply is None and isinstance(request, wire.Attach):
            reply = wire.Attached(request.call, list(self._segments))
        packed = side.send(reply if reply is not None else self.shelf.answer(request))
        # It may have hung up before its answer; what it said before that is read all the same.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if isinstance(reply, wire.Attached):
                assert isinstance(request, wire.Attach)
                self._pass(sock, packed, write=request.write)
            else:
                sock.sendall(packed)

    def _pass(self, sock: socket.socket, packed: bytes, *, write: bool) -> None:
        """Send a message with the arena's descriptors: read-only ones, then writable ones."""
        readers = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY) for fd in self._arena]
        try:
            socket.send_fds(sock, [packed], readers + (self._arena if write else []))
        finally:
            for descriptor in readers:
                os.close(descriptor)


def _memfd(size: int) -> int:
    descriptor = os.memfd_create("scripted")
    os.ftruncate(descriptor, size)
    return descriptor
