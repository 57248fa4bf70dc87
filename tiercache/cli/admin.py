"""An operator's conversation with a node: one question at a time, each with a deadline."""

import itertools
import os
import socket
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from tiercache.cli.exits import UsageError
from tiercache.cli.replies import (
    Asked,
    Cleared,
    Evicted,
    Members,
    PinRows,
    Rows,
    Shared,
    ShareRows,
    Stats,
    Verified,
    parse,
)
from tiercache.errors import ProtocolError, RefusedError, TiercacheError, UnavailableError
from tiercache.wire import clustering, guarding, sharing
from tiercache.wire import messages as wire
from tiercache.wire.connection import ClientSide

WELCOME_BYTES_MAX = 65_536
"""Largest answer to `Hello`; the answer itself says what may come after."""

RECEIVE_BYTES = 262_144
LIST_ROWS = 1_000
ROW_BYTES_MAX = 4_096
"""What one object takes in a report, names included; bounds how many are asked for at a time."""

VERIFY_OBJECTS = 64
INSPECT_ROWS = 64
CLIENT = f"tiercache-cli/{os.getpid()}"

Question = (
    wire.Stats
    | wire.List
    | wire.Inspect
    | wire.Evict
    | wire.Clear
    | wire.Verify
    | guarding.Pins
    | guarding.Shares
    | clustering.ClearAll
    | clustering.Members
    | clustering.ShareAll
)
Pinning = guarding.PinKeys | guarding.Unpin


class Admin:
    """A connection to the node at one socket; blocking, for one thread, closed on exit.

    No call takes longer than `deadline_s`; iterators take that for each page. Every method, and
    making one, raises UnavailableError when the node is not there or does not answer in time,
    RefusedError when it will not, ProtocolError when it does not speak this protocol, UsageError
    for a question it cannot make sense of. After any of them only `close` is of use.
    """

    def __init__(self, path: str, deadline_s: float) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._calls = itertools.count(1)
        self._side = ClientSide(WELCOME_BYTES_MAX)
        self._socket = _connect(path, deadline_s)
        try:
            welcome = self._exchange(wire.Hello(next(self._calls), wire.PROTOCOL, CLIENT))
        except TiercacheError:
            self.close()
            raise
        assert isinstance(welcome, wire.Welcome)
        self._rows = max(1, min(LIST_ROWS, welcome.frame_bytes_max // ROW_BYTES_MAX))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._socket.close()

    def stats(self) -> Stats:
        """Return what the node counts."""
        return self._ask(wire.Stats(next(self._calls)), Stats)

    def objects(self, prefix: str) -> Iterator[Rows]:
        """Yield all objects whose key starts with `prefix`, in pages; a page may be empty."""
        cursor = 0
        while True:
            question = wire.List(next(self._calls), cursor, self._rows, prefix)
            page = self._ask(question, Rows)
            yield page
            if not page.cursor:
                return
            cursor = _further(cursor, page.cursor)

    def inspect(self, key: str) -> Rows:
        """Return the first objects whose key starts with `key`, `INSPECT_ROWS` at most; `cursor` is 0
        when there are no more."""
        page = self._ask(wire.Inspect(next(self._calls), key), Rows)
        rows, cursor = page.rows, page.cursor
        # A node looks through some of its objects at a time, and may have found none among them.
        while cursor and len(rows) < INSPECT_ROWS:
            question = wire.List(next(self._calls), cursor, INSPECT_ROWS - len(rows), key)
            page = self._ask(question, Rows)
            rows = [*rows, *page.rows]
            cursor = page.cursor and _further(cursor, page.cursor)
        return Rows(rows, cursor)

    def evict(self, prefix: str, tier: str, nbytes: int) -> Evicted:
        """Drop objects nobody uses; parameters as in the message."""
        return self._ask(wire.Evict(next(self._calls), prefix, tier, nbytes), Evicted)

    def clear(self, namespace: str) -> Evicted:
        """Drop namespaces whose hexadecimal digest starts with `namespace`."""
        return self._ask(wire.Clear(next(self._calls), namespace), Evicted)

    def clear_all(self, namespace: str, wait_s: float) -> Cleared:
        """Drop the namespace of that whole digest from every node of the cluster; wait so long for it."""
        wait_ms = int(wait_s * 1000)
        return self._ask(clustering.ClearAll(next(self._calls), namespace, wait_ms), Cleared)

    def members(self) -> Members:
        """Return the nodes of the cluster."""
        return self._ask(clustering.Members(next(self._calls)), Members)

    def share_all(self, tenant: str, host: float | None, nvme: float | None) -> Shared:
        """Set what a tenant may take on every node of the cluster; with neither, unset it."""
        return self._ask(clustering.ShareAll(next(self._calls), tenant, host, nvme), Shared)

    def verify(self) -> Iterator[Verified]:
        """Have every copy read back and checked; yield the outcome of each page."""
        cursor = 0
        while True:
            page = self._ask(wire.Verify(next(self._calls), cursor, VERIFY_OBJECTS), Verified)
            yield page
            if not page.cursor:
                return
            cursor = _further(cursor, page.cursor)

    def pin(self, prefix: str, owner: str, age_s: float) -> guarding.Pinned:
        """Pin all objects whose key starts with `prefix`."""
        return self._pinned(guarding.PinKeys(next(self._calls), prefix, owner, int(age_s * 1000)))

    def unpin(self, number: int, owner: str) -> guarding.Pinned:
        """End one pin, or with number 0 all of an owner's that operators made."""
        return self._pinned(guarding.Unpin(next(self._calls), number, owner))

    def pins(self) -> PinRows:
        """Return every pin."""
        return self._ask(guarding.Pins(next(self._calls)), PinRows)

    def shares(
        self, tenant: str, host: float | None = None, nvme: float | None = None
    ) -> ShareRows:
        """Return what tenants ("" all) may take and do, after setting what is given."""
        return self._ask(guarding.Shares(next(self._calls), tenant, host, nvme), ShareRows)

    def where(
        self, namespace: bytes, chain: bytes, limit: int, codecs: list[str]
    ) -> sharing.Places:
        """Return where a prompt could be resumed; `chain` is the digests of its whole blocks."""
        call = next(self._calls)
        question = sharing.Where(call, namespace, "", "", chain, 0, limit, codecs, True)
        reply = self._exchange(question)
        assert isinstance(reply, sharing.Places)
        if not reply.places:
            raise ProtocolError("the node leaves itself out: is it of this version?")
        return reply

    def _pinned(self, asked: Pinning) -> guarding.Pinned:
        reply = self._exchange(asked)
        assert isinstance(reply, guarding.Pinned)
        return reply

    def rest(self, seconds: float) -> None:
        """Ask nothing for a while; raises as soon as the node hangs up or ends the conversation."""
        self._receive(time.monotonic() + seconds)

    def _ask(self, question: Question, kind: type[Asked]) -> Asked:
        report = self._exchange(question)
        assert isinstance(report, wire.Report)
        return parse(report.body, kind)

    def _exchange(
        self, request: wire.Hello | Question | Pinning | sharing.Where
    ) -> wire.Welcome | wire.Report | guarding.Pinned | sharing.Places:
        """Send one request and return its answer, of the type that belongs to it."""
        until = time.monotonic() + self._deadline_s
        try:
            packed = self._side.send(request)
        except ValueError as error:  # Too large for a message, or text that is none.
            raise UsageError(f"the question cannot be sent: {error}") from error
        try:
            self._socket.settimeout(self._deadline_s)
            self._socket.sendall(packed)
        except OSError:
            pass  # Silent, or gone: then its last words, if any, say why.
        reply = self._receive(until)
        if reply is None:
            raise UnavailableError(
                f"the node at {self._path} did not answer within {self._deadline_s:g} s: it is "
                f"stopped or very busy; wait longer with --deadline"
            )
        # ClientSide lets nothing else through in answer to these requests.
        assert isinstance(reply, wire.Welcome | wire.Report | guarding.Pinned | sharing.Places)
        return reply

    def _receive(self, until: float) -> wire.Reply | None:
        """Return the next reply, None when there is none in time; raise what `Failed` means."""
        reply = self._next()
        while reply is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            try:
                self._socket.settimeout(left_s)
                chunk = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise self._broken(error) from error
            if not chunk:
                raise UnavailableError(
                    f"the node at {self._path} hung up: see its log, and try again"
                )
            self._side.receive(chunk)
            reply = self._next()
        if isinstance(reply, wire.Failed):
            raise _failure(reply)
        return reply

    def _next(self) -> wire.Reply | None:
        try:
            return self._side.next()
        except ProtocolError as error:
            raise ProtocolError(
                f"{error}; is {self._path} the socket of a node of this version?"
            ) from error

    def _broken(self, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"the connection to the node at {self._path} broke ({error.strerror}): try again"
        )


def _connect(path: str, deadline_s: float) -> socket.socket:
    # A name without a path, or one that starts with a null byte, would mean something else.
    if not path or "\0" in path:
        raise UsageError("the socket's path is empty: name it with --socket")
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        link.settimeout(deadline_s)
        link.connect(path)
    except OSError as error:
        link.close()
        raise unconnected(path, error) from error
    return link


def unconnected(path: str, error: OSError) -> TiercacheError:
    """Return what it means that the socket at `path` could not be connected to."""
    match error:
        case PermissionError():
            return RefusedError(
                f"this user may not open {path}: run this as the node's user, or add your user id "
                f"to node.admin_uids"
            )
        case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
            return UnavailableError(
                f"no node listens at {path}: start one with `tiercache serve`, or name its socket "
                f"with --socket"
            )
        case TimeoutError() | BlockingIOError():
            return UnavailableError(f"the node at {path} is too busy to listen: try again")
        case _:
            return UsageError(f"{path} cannot be a socket: {error.strerror or error}")


def _failure(reply: wire.Failed) -> TiercacheError:
    match reply.kind:
        case "refused":
            return RefusedError(f"the node refuses: {reply.text}")
        case "invalid":
            return UsageError(f"the node cannot serve this: {reply.text}")
        case _:
            return ProtocolError(f"the node reports a broken protocol: {reply.text}")


def _further(cursor: int, offered: int) -> int:
    """A page that does not lead on would be asked for for ever."""
    if offered <= cursor:
        raise ProtocolError(f"the node's pages do not advance: {offered} after {cursor}")
    return offered
