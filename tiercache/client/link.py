"""One blocking connection to a node, shared by the threads of a process.

Strategy: nothing blocks under the lock. Sending is always non-blocking, and what does not go out at
once stays in the outbox. Of the threads that wait for a reply one reads, outside the lock, and wakes
the others; whoever got its reply passes the reading on. The socket is shut down only when no thread
copies into reserved memory (the node would give it to somebody else), and closed only when no thread
waits on it (its number would be reused under that thread).
"""

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from time import monotonic
from typing import Final

from tiercache.client.attempts import Silence
from tiercache.client.checks import Form
from tiercache.client.handshake import Handshake
from tiercache.client.parting import part_from
from tiercache.client.session import Call, Session
from tiercache.client.values import Options
from tiercache.errors import ProtocolError, UnavailableError
from tiercache.wire import messages as wire

RECEIVE_BYTES: Final = 1 << 18
DESCRIPTORS_PER_MESSAGE: Final = 253
"""What Linux passes along with one message at most (SCM_MAX_FD)."""


def connect(path: str, form: Form, options: Options, deadline: float) -> "Link":
    """Attach over a new connection.

    Raises RefusedError, ProtocolError, or OSError; TimeoutError is the deadline.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    handshake = Handshake(form, options)
    try:
        _until(sock, deadline)
        sock.connect(path)
        answer = handshake.hello()
        while handshake.session is None:
            _until(sock, deadline)
            with suppress(BrokenPipeError):
                # A node that refuses says why and hangs up, maybe before it was asked anything: what
                # it said is still there to be read, and without it the reading fails.
                sock.sendall(answer)
            chunk, descriptors = receive_some(sock)
            answer = handshake.feed(chunk, descriptors)
        return Link(sock, handshake.session, options)
    except BaseException:
        sock.close()
        raise
    finally:
        handshake.close()


def receive_some(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive bytes and the descriptors that came along; ConnectionResetError at the end."""
    flags = socket.MSG_CMSG_CLOEXEC
    chunk, descriptors, _, _ = socket.recv_fds(sock, 1 << 16, DESCRIPTORS_PER_MESSAGE, flags)
    if not chunk:
        raise ConnectionResetError("the node closed the connection")
    return chunk, descriptors


def _until(sock: socket.socket, deadline: float) -> None:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


class Link:
    """A socket, its session, and the threads that use them."""

    def __init__(self, sock: socket.socket, session: Session, options: Options) -> None:
        sock.setblocking(False)
        self.session = session
        self._sock = sock
        self._silence = Silence(options.deadline_s, monotonic())
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._lock = threading.RLock()  # A signal's handler may release or close in its middle.
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._sending = False
        self._blocked = False
        self._reading = False
        self._taking = False
        self._polling = 0  # Threads that wait until they can send.
        self._shut = False
        self._readable = _poll(sock, select.POLLIN)
        self._hung_up = _poll(sock, select.POLLRDHUP)
        session.alive = self.alive
        session.flush = self.flush
        session.settle = self._settle

    def alive(self) -> bool:
        """Whether the node is still connected; notices when it is not."""
        with self._lock:
            if not self.session.ended and self._hung_up(0):
                self.session.end("the node closed the connection")
            return not self.session.ended

    @property
    def silent(self) -> bool:
        """Whether the node left a call unanswered, and was not heard since."""
        return self._silence.lasts(monotonic())

    def call(self, call: Call, deadline: float) -> wire.Reply:
        """Send a request and wait for its reply.

        Raises UnavailableError, with "deadline" when the time is up; the call may then still be
        answered, so whoever made it must `abandon` it.
        """
        if self._silence.until and self.silent and not self._heard():
            raise UnavailableError("unavailable: the node does not answer")
        self._send(call, deadline)
        reply = self._await(call, deadline)
        if isinstance(reply, wire.Failed):
            raise UnavailableError(f"unavailable: {reply.text}")
        return reply

    def flush(self) -> None:
        """Send what is queued, as far as it goes without waiting."""
        with self._lock:
            self._drain()

    def after_fork(self) -> None:
        """In a forked child: the connection is the parent's; leave it, and never come back."""
        self.session.after_fork()
        self._sock.close()

    # --- sending

    def _send(self, call: Call, deadline: float) -> None:
        opened = False
        while True:
            with self._lock:
                self._check()
                if not opened and self._drain():
                    self.session.open(call)
                    opened = True
                if opened and self._drain():
                    return
                self._check()
                self._polling += 1
                writable = _poll(self._sock, select.POLLOUT)
            try:
                writable(_left_ms(deadline))
            finally:
                self._unpoll()
            if monotonic() >= deadline:
                self._miss()

    def _drain(self) -> bool:
        """Send without waiting; True when nothing is left to send."""
        session = self.session
        if self._sending:
            return False
        try:
            while session.queued and not session.ended:
                self._sending = True
                session.sent(self._sock.send(session.outgoing()))
                self._sending = False
                if self._blocked:  # It has read something.
                    self._blocked = False
                    self._silence.heard(monotonic())
        except BlockingIOError:
            self._sending = False
            self._blocked = True
            if session.crowded:
                session.end("the node does not read what it is sent")
            return False
        except OSError as fault:
            self._sending = False
            session.end(f"the connection broke: {fault.strerror}")
        finally:
            if self._sending:  # Interrupted: nobody can say how much went out.
                self._sending = False
                session.torn = True
                session.end("interrupted while sending")
            elif session.ended:
                self._settle()
        return True

    # --- receiving

    def _await(self, call: Call, deadline: float) -> wire.Reply:
        while call.reply is None:
            mine = False
            try:
                with self._lock:
                    if self._reading:
                        self._watch(call, deadline)
                    if call.reply is not None:
                        break
                    self._check()
                    if monotonic() >= deadline:
                        self._miss()
                    if self._reading:
                        continue
                    self._reading = mine = True
                self._read(_left_ms(deadline))
            finally:
                if mine:
                    self._pass_on()
        return call.reply

    def _watch(self, call: Call, deadline: float) -> None:
        """Wait while another thread reads."""
        self._waiting += 1
        try:
            while self._reading and call.reply is None and not self.session.ended:
                if not self._changed.wait(deadline - monotonic()):
                    return
        finally:
            self._waiting -= 1

    def _read(self, timeout_ms: int) -> None:
        """As the reader, wait, receive once, and hand out replies."""
        if not self._readable(timeout_ms):
            return
        try:
            self._taking = True
            nbytes = self._sock.recv_into(self._buffer)
        except BlockingIOError:
            self._taking = False
            return
        except OSError as fault:
            self._taking = False
            self.session.end(f"the connection broke: {fault.strerror}")
            return
        with self._lock:
            if nbytes:
                self._take(nbytes)
            else:
                self.session.end("the node closed the connection")
            self._taking = False

    def _pass_on(self) -> None:
        """Stop being the reader."""
        with self._lock:
            self._reading = False
            if self._taking:  # Interrupted: bytes may be gone.
                self._taking = False
                self.session.end("interrupted while receiving")
            elif self.session.ended:
                self._settle()
            if self._waiting:
                self._changed.notify_all()

    def _take(self, nbytes: int) -> None:
        self._silence.heard(monotonic())
        try:
            self.session.feed(self._buffer[:nbytes])
        except ProtocolError as fault:
            self.session.end(f"the node broke the protocol: {fault}")
        self._drain()

    def _heard(self) -> bool:
        """Whether a silent node has spoken meanwhile."""
        with self._lock:
            self._drain()
            self._check()
            if self._reading:
                return not self.silent
            try:
                self._reading = True
                self._read(0)
            finally:
                self._pass_on()
        return not self.silent

    # --- ending

    def _check(self) -> None:
        if self.session.ended:
            raise UnavailableError(f"unavailable: {self.session.ended}")

    def _miss(self) -> None:
        self._silence.missed(monotonic())
        raise UnavailableError("deadline")

    def _unpoll(self) -> None:
        with self._lock:
            self._polling -= 1
            if self.session.ended:
                self._settle()

    def _settle(self) -> None:
        """After the end: let the node know once nobody writes, close once nobody polls."""
        with self._lock:
            # A signal's handler may end it in the middle of sending: whoever sends settles then.
            if not (self._shut or self.session.writers or self._sending):
                self._shut = True
                part_from(self._sock, self.session.farewell())
            if self._shut and not (self._reading or self._polling):
                self._sock.close()
                self.session.part()
            self._changed.notify_all()


def _poll(sock: socket.socket, events: int) -> Callable[[int], list[tuple[int, int]]]:
    poller = select.poll()
    poller.register(sock, events)
    return poller.poll


def _left_ms(deadline: float) -> int:
    return max(0, ceil((deadline - monotonic()) * 1000))
