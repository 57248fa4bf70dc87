"""One connection's socket and buffers. It knows how to talk, not what to say."""

import select
import socket
from collections import deque
from collections.abc import Sequence

from tiercache.runtime.peercred import Peer
from tiercache.runtime.translate import Caller
from tiercache.wire import messages as wire
from tiercache.wire.connection import ServerSide

RECEIVE_BYTES = 256 * 1024
"""Read from one connection before the next one's turn."""

JOINED_BYTES_MAX = 256 * 1024
"""Small answers leave together up to this size."""


class SlowReaderError(Exception):
    """The client asks faster than it reads the answers."""


class Session:
    """One connected client.

    Answers are gathered by `answer` and leave with `flush`: several in one system call. What the
    socket does not take waits here, up to `pending_bytes_max`. A client that reads no more is heard to
    its end: it may have said goodbye.
    """

    __slots__ = (
        "_buffer",
        "_ends",
        "_hung_up",
        "_pending",
        "_pending_bytes",
        "_pending_bytes_max",
        "_side",
        "_sock",
        "attaching",
        "caller",
        "detached",
        "number",
        "peer",
    )

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        peer: Peer,
        buffer: bytearray,
        *,
        frame_bytes_max: int,
        pending_bytes_max: int,
    ) -> None:
        self.number = number
        self.peer = peer
        self.caller = Caller(number, "")
        self.attaching: wire.Attach | None = None  # Asked, and not answered yet.
        self.detached = False
        self._hung_up = False
        self._sock = sock
        self._ends = select.poll()
        self._ends.register(sock, select.POLLRDHUP)
        self._buffer = memoryview(buffer)
        self._side = ServerSide(frame_bytes_max)
        self._pending: deque[tuple[bytes | memoryview, Sequence[int]]] = deque()
        self._pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max

    @property
    def sock(self) -> socket.socket:
        """The socket, for whoever watches it."""
        return self._sock

    def receive(self) -> bool:
        """Take in what has arrived; False at the end of the stream. Raises OSError."""
        try:
            count = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return True
        if count:
            self._side.receive(self._buffer[:count])
        return count > 0

    def ends(self) -> bool:
        """Whether the other end hung up: what is left can be received, and nothing will follow."""
        return bool(self._ends.poll(0))

    def next(self) -> wire.FromClient | None:
        """Return the next message of what has arrived. Raises ProtocolError."""
        return self._side.next()

    def answer(self, reply: wire.Reply, descriptors: Sequence[int] = ()) -> None:
        """Say `reply`, with `descriptors` (253 at most) riding on it. Raises SlowReaderError."""
        try:
            packed = self._side.send(reply)
        except ValueError as error:
            packed = self._side.send(wire.Failed(reply.call, "invalid", f"ask for less: {error}"))
        if self._hung_up:
            return
        self._pending_bytes += len(packed)
        if self._pending_bytes > self._pending_bytes_max:
            raise SlowReaderError
        self._pending.append((packed, descriptors))

    def farewell(self) -> None:
        """Say why the connection ends, if the client broke the protocol and still listens."""
        try:
            self._sock.send(self._side.farewell())
        except OSError:
            return  # It does not: nothing is lost.

    def flush(self) -> bool:
        """Send what waits; False when the socket takes no more for now. Raises OSError."""
        pending = self._pending
        while pending:
            chunk, descriptors = pending[0]
            if not descriptors and len(pending) > 1:
                chunk = self._joined()
            try:
                if descriptors:
                    sent = socket.send_fds(self._sock, [chunk], list(descriptors))
                else:
                    sent = self._sock.send(chunk)
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError):
                self._hung_up = True
                pending.clear()
                return True
            self._pending_bytes -= sent
            if sent < len(chunk):
                pending[0] = (memoryview(chunk)[sent:], ())
                return False
            pending.popleft()
        return True

    def close(self) -> None:
        """Close the socket."""
        self._pending.clear()
        self._sock.close()

    def _joined(self) -> bytes | memoryview:
        """Make the chunks at the front that carry no descriptors one chunk, and return it."""
        pending = self._pending
        chunks: list[bytes | memoryview] = []
        nbytes = 0
        while pending and not pending[0][1] and nbytes < JOINED_BYTES_MAX:
            chunks.append(pending.popleft()[0])
            nbytes += len(chunks[-1])
        joined = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        pending.appendleft((joined, ()))
        return joined


def refuse(sock: socket.socket, text: str) -> None:
    """Tell a client that was not let in why, and close its connection."""
    side = ServerSide(65536)
    try:
        sock.send(side.send(wire.Failed(0, "refused", text)))
    except OSError:
        pass
    finally:
        sock.close()
