"""One attachment to one node, without I/O: calls in flight, leases, notices, bytes to send.

Strategy: whoever does the I/O calls `open`, `outgoing`/`sent` and `feed` one at a time, under a lock
of its own. Everything else may be called from any thread.

A lease belongs to a request, and a request may be asked about several times. So what counts is how
many callers still hold it: the last one to let go sends `Release`. A reply that nobody waits for any
more is undone when it comes (its lease released, its reservations cancelled), unless somebody else
holds the same request by then.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from typing import Final

from tiercache.client.arena import Arena
from tiercache.errors import ProtocolError, UnavailableError
from tiercache.wire import CALLS_MAX, ClientSide, surveying
from tiercache.wire import messages as wire

NOTICES_MAX: Final = 65_536
"""Notices that may wait for a node that does not read; beyond, the attachment is given up."""

OFFER_BYTES_MAX: Final = 512
"""Assumed size of one offer on the wire, to fit a batch into a frame."""


OUTBOX_BYTES: Final = 4096
"""Bytes of notices that are packed at once; the others stay queued, where they are counted."""

_LEASING: Final = (wire.Plan, surveying.Survey, wire.Load, wire.Fetch)


class Call:
    """One request and, once it came, its reply."""

    __slots__ = ("abandoned", "message", "reply")

    def __init__(self, message: wire.Request) -> None:
        self.message = message
        self.abandoned = False
        self.reply: wire.Reply | None = None


class Lease:
    """One caller's hold on what the node leased to a request."""

    __slots__ = ("_released", "_session", "request", "viewed")

    def __init__(self, session: "Session", request: str) -> None:
        self.request = request
        self.viewed = False  # Whether views were handed out, which may outlive the hold's owner.
        self._session = session
        self._released = False

    @property
    def held(self) -> bool:
        """Whether the node still keeps its promise, as far as this process can tell."""
        return not self._released and self._session.alive()

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def release(self) -> None:
        """Let go. Idempotent; never blocks."""
        self._session.unhold(self)

    def __del__(self) -> None:
        # A plan that was lost on its way (a cancelled gather) has no other owner. A collector may
        # run anywhere, even under our own lock: append and leave.
        if not self._released and not self.viewed:
            self._session.orphans.append(self.request)


def _gone() -> bool:
    return False


class Session:
    """What client and node owe each other. `welcome` and the arena are what attaching brought.
    Its I/O sets `alive` (whether the node is still there), `flush` (send without waiting) and
    `settle` (something may have ended)."""

    def __init__(self, side: ClientSide, welcome: wire.Welcome, arena: Arena, calls: int) -> None:
        """`calls`: how many calls the handshake took."""
        self.boot = welcome.boot
        room = max(1, welcome.frame_bytes_max // OFFER_BYTES_MAX)
        self.offers_max = min(welcome.batch_max, room)
        self.outbox = bytearray()
        self.orphans: deque[str] = deque()
        self.ended = ""
        self.torn = False  # Sending was interrupted: how much of the outbox went out is not known.
        self.writers = 0
        self.alive: Callable[[], bool] = _gone
        self.flush: Callable[[], object] = _gone
        self.settle: Callable[[], object] = _gone
        self._arena: Arena | None = arena
        self._side = side
        self._numbers = count(calls + 1)
        self._calls: dict[int, Call] = {}
        self._notices: deque[wire.Notice] = deque()
        self._holds: dict[str, int] = {}
        self._asked: set[str] = set()  # Held requests that the node was told of.
        self._lock = threading.RLock()  # A signal's handler may release in its middle.

    # --- from any thread

    @property
    def arena(self) -> Arena:
        """The node's memory. Raises UnavailableError after the end."""
        arena = self._arena
        if arena is None:
            raise UnavailableError(f"unavailable: {self.ended}")
        return arena

    def number(self) -> int:
        """Return a fresh call number."""
        return next(self._numbers)

    def notify(self, notice: wire.Notice) -> None:
        """Queue a notice: it goes out before the next request, or with the next `flush`."""
        if not self.ended:
            self._notices.append(notice)

    def hold(self, request: str) -> Lease:
        """Begin to hold what the node leases, or will lease, to `request`."""
        with self._lock:
            self._holds[request] = self._holds.get(request, 0) + 1
        return Lease(self, request)

    def unhold(self, lease: Lease) -> None:
        """Let go of one hold; the last one of a request queues `Release`."""
        with self._lock:
            if not lease._released:
                lease._released = True
                self._let_go(lease.request)

    def abandon(self, call: Call) -> None:
        """Nobody waits for this call any more: undo its reply, now or when it comes."""
        with self._lock:
            if not call.abandoned:
                call.abandoned = True
                if call.reply is not None:
                    self._undo(call.message, call.reply)

    def fail(self, why: str) -> UnavailableError:
        """Give the attachment up for something the node did, and return the error that says so."""
        self.end(why)
        return UnavailableError(f"unavailable: {why}")

    def end(self, why: str) -> None:
        """Everything is void: leases, reservations, calls. Idempotent."""
        if not self.ended:
            self.ended = why
            self._notices.clear()
            self._arena = None  # A dead node's memory stays as long as a plan or a view needs it.
        self.settle()

    def part(self) -> None:
        """Whoever did the I/O is done with it; nothing refers to it from here."""
        self.alive = self.flush = self.settle = _gone

    @contextmanager
    def writing(self) -> Generator[None, None, None]:
        """Keeps the attachment up (so that the node keeps the reservation) while bytes are copied.

        Raises UnavailableError when it is over already.
        """
        with self._lock:
            if self.ended:
                raise UnavailableError(f"unavailable: {self.ended}")
            self.writers += 1
        try:
            yield
        finally:
            with self._lock:
                self.writers -= 1
            if self.ended:
                self.settle()

    def after_fork(self) -> None:
        """In a forked child: the attachment is the parent's, and so may be the lock."""
        self._lock = threading.RLock()
        self.ended = "forked"
        self._arena = None
        self.writers = 0
        self.part()
        self._notices.clear()

    # --- for whoever does the I/O, one at a time

    def open(self, call: Call) -> None:
        """Put a request into the outbox, after all notices.

        Raises UnavailableError when too much is in flight, or the request is too large for a frame.
        """
        if self._notices or self.orphans:
            self._pack_notices(sys.maxsize)
        if self._side.waiting >= CALLS_MAX:
            raise UnavailableError("unavailable: too many calls wait for the node")
        try:
            packed = self._side.send(call.message)
        except ValueError as fault:
            raise UnavailableError(f"too_large: {fault}") from fault
        self._calls[call.message.call] = call
        if isinstance(call.message, _LEASING):
            self._asked.add(call.message.request)
        self.outbox += packed

    def outgoing(self) -> bytearray:
        """Return what is to be sent, notices included; tell `sent` how much of it went out."""
        if self._notices or self.orphans:
            self._pack_notices(OUTBOX_BYTES)
        return self.outbox

    def sent(self, nbytes: int) -> None:
        """The first `nbytes` of the outbox are sent."""
        del self.outbox[:nbytes]

    def farewell(self) -> bytes:
        """Return the last words of a client that will not touch the arena again: what was begun to
        be sent, then the goodbye. b"" when nobody can say where they would land."""
        if self.torn:
            return b""
        words, self.outbox = self.outbox, bytearray()
        return bytes(words + self._side.send(wire.Detach()))

    @property
    def queued(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._notices or self.outbox or self.orphans)

    @property
    def crowded(self) -> bool:
        """Whether more notices wait than may: the node has not read for long."""
        return len(self._notices) > NOTICES_MAX

    def feed(self, chunk: memoryview) -> list[Call]:
        """Take received bytes and return the calls that they answer.

        Raises ProtocolError when the node broke the protocol.
        """
        self._side.receive(chunk)
        answered = []
        while (reply := self._side.next()) is not None:
            call = self._calls.pop(reply.call, None)
            if call is None:
                assert isinstance(reply, wire.Failed)
                raise ProtocolError(reply.text)
            with self._lock:
                if call.abandoned:
                    self._undo(call.message, reply)
                else:
                    call.reply = reply
                    answered.append(call)
        return answered

    def _pack_notices(self, outbox_bytes: int) -> None:
        while self.orphans:
            request = self.orphans.popleft()
            with self._lock:
                self._let_go(request)
        while self._notices and len(self.outbox) < outbox_bytes:
            self.outbox += self._side.send(self._notices.popleft())

    def _let_go(self, request: str) -> None:
        left = self._holds[request] - 1
        if left:
            self._holds[request] = left
        else:
            del self._holds[request]
            if request in self._asked:
                self._asked.discard(request)
                self.notify(wire.Release([request]))

    def _undo(self, message: wire.Request, reply: wire.Reply) -> None:
        match message:
            case wire.Plan() | surveying.Survey() | wire.Load() | wire.Fetch() if (
                message.request not in self._holds
            ):
                self.notify(wire.Release([message.request]))
            case wire.Reserve() if isinstance(reply, wire.Reserved):
                tickets = [g.ticket for g in reply.grants if g.outcome == "granted"]
                if tickets:
                    self.notify(wire.Cancel(tickets))
            case _:
                pass
