"""The two ends of one connection, without any I/O: bytes in, messages out, and back.

Strategy: feed what was received to `receive`, take messages with `next` until it returns None, and
send the bytes that `send` returns, in that order. Two kinds of wrong. The peer's (not a message,
too large, out of turn) raises ProtocolError from `next`: a node sends `farewell`, both close. Our
own (a second reply, a message before the handshake) raises RuntimeError, and ValueError for a
message too large to send; then nothing is sent and the connection is as it was.

The order that both ends enforce: `Hello` first, answered with `Welcome` before anything else; every
request has its own `call` (from 1 up) and exactly one reply of its type, or `Failed`; a `Failed`
with call 0 is about the connection itself.
"""

from enum import Enum
from typing import Final, TypeVar

import msgspec

from tiercache.errors import LayoutError, ProtocolError
from tiercache.wire import clustering, guarding, sharing, surveying
from tiercache.wire import messages as wire
from tiercache.wire.frames import Frames, frame

CALLS_MAX: Final = 4096
"""Requests that may wait for their reply on one connection."""

ANSWERS: Final[dict[type, type]] = {
    wire.Hello: wire.Welcome,
    wire.Attach: wire.Attached,
    wire.Plan: wire.Planned,
    surveying.Survey: surveying.Surveyed,
    wire.Load: wire.Loaded,
    sharing.Push: sharing.Pushed,
    sharing.Where: sharing.Places,
    wire.Reserve: wire.Reserved,
    wire.Fetch: wire.Fetched,
    wire.Flush: wire.Flushed,
    wire.Stats: wire.Report,
    wire.List: wire.Report,
    wire.Inspect: wire.Report,
    wire.Evict: wire.Report,
    wire.Clear: wire.Report,
    wire.Verify: wire.Report,
    guarding.Pin: guarding.Pinned,
    guarding.Unpin: guarding.Pinned,
    guarding.PinKeys: guarding.Pinned,
    guarding.Pins: wire.Report,
    guarding.Shares: wire.Report,
    clustering.ClearAll: wire.Report,
    clustering.Members: wire.Report,
    clustering.ShareAll: wire.Report,
}
"""The reply type of each request."""

_NOTICES: Final = (wire.Commit, wire.Cancel, wire.Release, wire.Detach)


class _AnyHello(msgspec.Struct, array_like=True, tag="hello", gc=False):
    """What the `Hello` of every version starts with, so that a newer one is refused by name."""

    call: int
    protocol: int


class _Turn(Enum):
    HELLO = "hello"  # Nothing was said yet.
    WELCOME = "welcome"  # Hello was said, and not answered.
    OPEN = "open"


_encode = msgspec.msgpack.Encoder().encode
_from_client: msgspec.msgpack.Decoder[wire.FromClient] = msgspec.msgpack.Decoder(wire.FromClient)
_reply: msgspec.msgpack.Decoder[wire.Reply] = msgspec.msgpack.Decoder(wire.Reply)
_any_hello = msgspec.msgpack.Decoder(_AnyHello)

_Message = TypeVar("_Message")


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: memoryview) -> _Message:
    try:
        return decoder.decode(body)
    except (ValueError, LayoutError, RecursionError) as fault:
        raise ProtocolError(f"not a message of protocol {wire.PROTOCOL}: {fault}") from None


def _check_call(call: int, open_calls: dict[int, type], error: type[Exception]) -> None:
    if call < 1 or call in open_calls:
        raise error(f"call {call} is in use or below 1")
    if len(open_calls) >= CALLS_MAX:
        raise error(f"more than {CALLS_MAX} calls wait for their reply")


def _packed(message: wire.FromClient | wire.Reply, frame_bytes_max: int) -> bytes:
    body = _encode(message)
    if len(body) > frame_bytes_max:
        name = type(message).__name__
        raise ValueError(f"{name} takes {len(body)} bytes, the limit is {frame_bytes_max}")
    return frame(body)


class ServerSide:
    """The node's end. `frame_bytes_max` bounds what it takes and what it sends."""

    __slots__ = ("_fault", "_frames", "_open", "_turn")

    def __init__(self, frame_bytes_max: int) -> None:
        self._frames = Frames(frame_bytes_max)
        self._turn = _Turn.HELLO
        self._open: dict[int, type] = {}
        self._fault: wire.Failed | None = None

    def receive(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add received bytes; they must not change until `next` has returned None."""
        self._frames.feed(chunk)

    def next(self) -> wire.FromClient | None:
        """Return the next message, or None when it takes more bytes.

        Raises ProtocolError, now and ever after, once the client broke the protocol.
        """
        if self._fault is not None:
            raise ProtocolError(self._fault.text)
        try:
            body = self._frames.next()
            return None if body is None else self._accept(body)
        except ProtocolError as fault:
            if self._fault is None:
                self._fault = wire.Failed(0, "protocol", str(fault))
            raise

    def _accept(self, body: memoryview) -> wire.FromClient:
        if self._turn is _Turn.HELLO:
            self._check_version(body)
        elif self._turn is _Turn.WELCOME:
            raise ProtocolError("the client must wait for the answer to Hello")
        message = _decoded(_from_client, body)
        if isinstance(message, _NOTICES):
            return message
        if isinstance(message, wire.Hello):
            if self._turn is not _Turn.HELLO:
                raise ProtocolError("Hello comes once")
            self._turn = _Turn.WELCOME
        _check_call(message.call, self._open, ProtocolError)
        self._open[message.call] = ANSWERS[type(message)]
        return message

    def _check_version(self, body: memoryview) -> None:
        try:
            hello = _decoded(_any_hello, body)
        except ProtocolError as fault:
            raise ProtocolError(f"a connection starts with Hello; {fault}") from None
        if hello.protocol != wire.PROTOCOL:
            text = f"the client speaks protocol {hello.protocol}, this node {wire.PROTOCOL}"
            self._fault = wire.Failed(hello.call, "refused", text)
            raise ProtocolError(text)

    def send(self, reply: wire.Reply) -> bytes:
        """Return the bytes of a reply."""
        expected = self._open.get(reply.call)
        if isinstance(reply, wire.Failed):
            if expected is None and reply.call:
                raise RuntimeError(f"no call {reply.call} waits for a reply")
        elif expected is not type(reply):
            raise RuntimeError(f"{type(reply).__name__} does not answer call {reply.call}")
        packed = _packed(reply, self._frames.frame_bytes_max)
        self._open.pop(reply.call, None)
        if expected is wire.Welcome:
            self._turn = _Turn.OPEN if isinstance(reply, wire.Welcome) else _Turn.HELLO
        return packed

    def farewell(self) -> bytes:
        """Return the last words to a client that broke the protocol, b"" if it did not."""
        return b"" if self._fault is None else frame(_encode(self._fault))


class ClientSide:
    """The client's end. `frame_bytes_max` holds until `Welcome` names the node's own limit, which
    bounds what either sends from then on."""

    __slots__ = ("_fault", "_frames", "_open", "_turn")

    def __init__(self, frame_bytes_max: int) -> None:
        self._frames = Frames(frame_bytes_max)
        self._turn = _Turn.HELLO
        self._open: dict[int, type] = {}
        self._fault = ""

    @property
    def waiting(self) -> int:
        """Requests that wait for their reply; `send` takes no more than CALLS_MAX."""
        return len(self._open)

    def receive(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add received bytes; they must not change until `next` has returned None."""
        self._frames.feed(chunk)

    def next(self) -> wire.Reply | None:
        """Return the next reply, or None when it takes more bytes.

        Raises ProtocolError, now and ever after, once the node broke the protocol.
        """
        if self._fault:
            raise ProtocolError(self._fault)
        try:
            body = self._frames.next()
            return None if body is None else self._accept(body)
        except ProtocolError as fault:
            self._fault = str(fault)
            raise

    def _accept(self, body: memoryview) -> wire.Reply:
        reply = _decoded(_reply, body)
        expected = self._open.get(reply.call)
        if isinstance(reply, wire.Failed):
            if expected is None and reply.call:
                raise ProtocolError(f"a reply to call {reply.call}, which does not wait for one")
        elif expected is not type(reply):
            raise ProtocolError(f"{type(reply).__name__} does not answer call {reply.call}")
        if isinstance(reply, wire.Welcome):
            if reply.protocol != wire.PROTOCOL:
                raise ProtocolError(
                    f"the node speaks protocol {reply.protocol}, this client {wire.PROTOCOL}"
                )
            if reply.frame_bytes_max < 1 or reply.batch_max < 1:
                raise ProtocolError("the node names a limit below 1")
            self._turn = _Turn.OPEN
            self._frames.frame_bytes_max = reply.frame_bytes_max
        self._open.pop(reply.call, None)
        return reply

    def send(self, message: wire.FromClient) -> bytes:
        """Return the bytes of a request or a notice."""
        if isinstance(message, wire.Hello) != (self._turn is _Turn.HELLO) or (
            self._turn is _Turn.WELCOME
        ):
            raise RuntimeError(f"{type(message).__name__} is out of turn")
        if isinstance(message, _NOTICES):
            return _packed(message, self._frames.frame_bytes_max)
        _check_call(message.call, self._open, RuntimeError)
        packed = _packed(message, self._frames.frame_bytes_max)
        self._open[message.call] = ANSWERS[type(message)]
        if self._turn is _Turn.HELLO:
            self._turn = _Turn.WELCOME
        return packed
