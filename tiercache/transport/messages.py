"""What nodes say to each other: this file is the protocol between them.

`Hello` and `Refused` are the same in all versions to come, but for fields added at their end.
"""

from typing import Annotated, Final, TypeVar

import msgspec

from tiercache.errors import ProtocolError
from tiercache.transport.base import CHECKSUM_BYTES, OBJECT_BYTES_MAX, Asked, Count

PROTOCOL: Final = 1
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
NAME_CHARS_MAX: Final = 200
TEXT_CHARS_MAX: Final = 500
VERSIONS_MAX: Final = 16
WAIT_MS_MAX: Final = 1 << 31

Call = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
Some = Annotated[int, msgspec.Meta(ge=1, le=OBJECT_BYTES_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Proof = Annotated[bytes, msgspec.Meta(max_length=PROOF_BYTES)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    pass


# --- the handshake


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello", gc=False):
    """Opens every connection. `method` is "plain", "key" or "tls"; `window_bytes` what may be under
    way to the one who dials."""

    versions: Annotated[list[int], msgspec.Meta(max_length=VERSIONS_MAX)]
    method: Name
    node: Name
    nonce: Nonce
    window_bytes: Some


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", gc=False):
    """Ends a connection. `kind` is a `PeerFault`."""

    kind: Name
    text: Text


class Challenge(_Message, frozen=True, tag="challenge"):
    """Answers `Hello` in the version chosen. `proof` shows that the listener has the key."""

    version: int
    node: Name
    nonce: Nonce
    frame_bytes_max: Some
    batch_max: Some
    calls_max: Some
    proof: Proof


class Answer(_Message, frozen=True, tag="answer"):
    """Answers `Challenge`. `proof` shows that the one who dials has the key."""

    proof: Proof


class Ready(_Message, frozen=True, tag="ready"):
    """Answers `Answer`: from here on requests are served."""


# --- requests and notices of the one who dials


class Fetch(_Message, frozen=True, tag="fetch"):
    """Asks for ranges, in `wait_ms`. `credit` bytes have arrived since the last message that said
    so."""

    call: Call
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]
    credit: Count
    wanted: list[Asked]


class Cancel(_Message, frozen=True, tag="cancel"):
    """Nobody waits for this call any more."""

    call: Call


class Credit(_Message, frozen=True, tag="credit"):
    """So many bytes have arrived since the last message that said so."""

    credit: Some


class Ask(_Message, frozen=True, tag="ask"):
    """Asks something, in `wait_ms`. What `body` means is no matter of this protocol."""

    call: Call
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)]
    credit: Count
    body: bytes


class Ping(_Message, frozen=True, tag="ping"):
    """Asks for a `Pong`."""

    call: Call
    credit: Count


# --- what the listener says


class Chunk(_Message, frozen=True, tag="chunk"):
    """`nbytes` raw bytes follow: the next ones of the range `index` of `call`. `checksum` is of the
    whole range, on its last chunk; b"" on the others."""

    call: Call
    index: Count
    nbytes: Count
    checksum: Annotated[bytes, msgspec.Meta(max_length=CHECKSUM_BYTES)]


class Failed(_Message, frozen=True, tag="failed"):
    """The range `index` of `call` will not come; `fault` is a `PeerFault`."""

    call: Call
    index: Count
    fault: Name


class Dropped(_Message, frozen=True, tag="dropped"):
    """No more comes of `call`: it was cancelled, or it is late."""

    call: Call


class Told(_Message, frozen=True, tag="told"):
    """Answers `Ask`."""

    call: Call
    body: bytes


class Pong(_Message, frozen=True, tag="pong"):
    """Answers `Ping`: `unpaid` bytes were sent for which no credit came."""

    call: Call
    unpaid: Count


FromDialler = Fetch | Ask | Cancel | Credit | Ping
FromListener = Chunk | Failed | Dropped | Told | Pong | Refused

encode = msgspec.msgpack.Encoder().encode
_from_dialler = msgspec.msgpack.Decoder(FromDialler)
_from_listener = msgspec.msgpack.Decoder(FromListener)
_hello = msgspec.msgpack.Decoder(Hello)
_challenge = msgspec.msgpack.Decoder(Challenge | Refused)
_answer = msgspec.msgpack.Decoder(Answer)
_ready = msgspec.msgpack.Decoder(Ready | Refused)

_T = TypeVar("_T")


def decoded_request(body: memoryview) -> FromDialler:
    """Return a message of the one who dialled; raises ProtocolError."""
    return _decoded(_from_dialler, body)


def decoded_reply(body: memoryview) -> FromListener:
    """Return a message of the listener; raises ProtocolError."""
    return _decoded(_from_listener, body)


def decoded_hello(body: memoryview) -> Hello:
    """Return the first message of a connection; raises ProtocolError."""
    return _decoded(_hello, body)


def decoded_challenge(body: memoryview) -> Challenge | Refused:
    """Return the first answer; raises ProtocolError."""
    return _decoded(_challenge, body)


def decoded_answer(body: memoryview) -> Answer:
    """Return the second message; raises ProtocolError."""
    return _decoded(_answer, body)


def decoded_ready(body: memoryview) -> Ready | Refused:
    """Return the second answer; raises ProtocolError."""
    return _decoded(_ready, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], body: memoryview) -> _T:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as fault:
        raise ProtocolError(f"not a message between nodes: {fault}") from None
