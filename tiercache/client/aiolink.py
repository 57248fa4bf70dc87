"""One connection to a node, on an event loop.

Everything happens on the loop's thread, except that a thread which copied bytes may be the last to
need the connection; it then asks the loop to close it.
"""

import asyncio
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from tiercache.client.attempts import Silence
from tiercache.client.checks import Form
from tiercache.client.handshake import Handshake
from tiercache.client.link import RECEIVE_BYTES, receive_some
from tiercache.client.parting import part_from
from tiercache.client.session import Call, Session
from tiercache.client.values import Options
from tiercache.errors import ProtocolError, UnavailableError
from tiercache.wire import messages as wire


async def connect(path: str, form: Form, options: Options) -> "AsyncLink":
    """Attach over a new connection. Raises RefusedError, ProtocolError or OSError."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    handshake = Handshake(form, options)
    try:
        sock.connect(path)  # A Unix socket connects at once, or says that it cannot.
        answer = handshake.hello()
        while handshake.session is None:
            await loop.sock_sendall(sock, answer)
            await _readable(loop, sock)
            try:
                chunk, descriptors = receive_some(sock)
            except BlockingIOError:
                answer = b""
            else:
                answer = handshake.feed(chunk, descriptors)
        return AsyncLink(loop, sock, handshake.session, options)
    except BaseException:
        sock.close()
        raise
    finally:
        handshake.close()


async def _readable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = loop.create_future()
    loop.add_reader(sock, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class AsyncLink:
    """A socket, its session, and the coroutines that wait on them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        session: Session,
        options: Options,
    ) -> None:
        self.loop = loop
        self.session = session
        self._sock = sock
        self._thread = threading.get_ident()
        self._silence = Silence(options.deadline_s, monotonic())
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._waiters: dict[Call, asyncio.Future[None]] = {}
        self._room = asyncio.Event()  # Set while nothing waits to be sent.
        self._room.set()
        self._shut = False
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)
        session.alive = self.alive
        session.flush = self.flush
        session.settle = self._settle
        loop.add_reader(sock, self._read)

    def alive(self) -> bool:
        """Whether the node is still connected; notices when it is not."""
        if not self.session.ended and self._hung_up.poll(0):
            self.session.end("the node closed the connection")
        return not self.session.ended

    @property
    def silent(self) -> bool:
        """Whether the node left a call unanswered, and was not heard since."""
        return self._silence.lasts(monotonic())

    async def call(self, call: Call, deadline: float) -> wire.Reply:
        """As `Link.call`."""
        if self.silent:
            self._read()
            if self.silent:
                raise UnavailableError("unavailable: the node does not answer")
        try:
            async with asyncio.timeout(max(0.0, deadline - monotonic())):
                while not self._room.is_set():
                    await self._room.wait()
                self._check()
                self.session.open(call)
                self._drain()
                if call.reply is None and not self.session.ended:
                    self._waiters[call] = self.loop.create_future()
                    await self._waiters[call]
        except TimeoutError as fault:
            if call.reply is None:
                self._silence.missed(monotonic())
                raise UnavailableError("deadline") from fault
        finally:
            self._waiters.pop(call, None)
        if call.reply is None:
            self._check()
            raise AssertionError("woken without a reply")
        if isinstance(call.reply, wire.Failed):
            raise UnavailableError(f"unavailable: {call.reply.text}")
        return call.reply

    def flush(self) -> None:
        """Send what is queued, as far as it goes without waiting."""
        self._on_loop(self._drain)

    def after_fork(self) -> None:
        """In a forked child: connection and loop are the parent's; leave them as they are."""
        self._shut = True
        self.session.after_fork()
        self._sock.close()

    def _on_loop(self, act: Callable[[], object]) -> None:
        if threading.get_ident() == self._thread:
            act()
        else:
            with suppress(RuntimeError):  # The loop is closed, and nobody waits on it any more.
                self.loop.call_soon_threadsafe(act)

    def _check(self) -> None:
        if self.session.ended:
            raise UnavailableError(f"unavailable: {self.session.ended}")

    def _drain(self) -> None:
        session = self.session
        try:
            while session.queued and not session.ended:
                session.sent(self._sock.send(session.outgoing()))
                if not self._room.is_set():  # It has read something.
                    self._silence.heard(monotonic())
        except BlockingIOError:
            if session.crowded:
                session.end("the node does not read what it is sent")
            elif self._room.is_set():
                self._room.clear()
                self.loop.add_writer(self._sock, self._drain)
            return
        except OSError as fault:
            session.end(f"the connection broke: {fault.strerror}")
        if not self._room.is_set() and not session.ended:
            self._room.set()
            self.loop.remove_writer(self._sock)

    def _read(self) -> None:
        if self.session.ended:
            return
        try:
            nbytes = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError as fault:
            self.session.end(f"the connection broke: {fault.strerror}")
            return
        if not nbytes:
            self.session.end("the node closed the connection")
            return
        self._silence.heard(monotonic())
        try:
            for call in self.session.feed(self._buffer[:nbytes]):
                waiter = self._waiters.get(call)
                if waiter is not None:
                    _wake(waiter)
        except ProtocolError as fault:
            self.session.end(f"the node broke the protocol: {fault}")
        self._drain()
        if self._hung_up.poll(0):
            # uvloop calls once after an error, such as a node that died with calls unread.
            self.loop.call_soon(self._read)

    def _settle(self) -> None:
        self._on_loop(self._settle_now)

    def _settle_now(self) -> None:
        """After the end: wake everybody; let the node know once no thread writes, and close."""
        for waiter in self._waiters.values():
            _wake(waiter)
        self._room.set()
        if self._shut:
            return
        self.loop.remove_reader(self._sock)
        self.loop.remove_writer(self._sock)
        if self.session.writers:
            return
        self._shut = True
        part_from(self._sock, self.session.farewell())
        self._sock.close()
        self.session.part()
