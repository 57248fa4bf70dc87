"""The two ends of the handshake, without any I/O: bodies of messages in, bodies out.

    dials                                     listens
    Hello(versions, method, nonce)     ->
                                       <-     Challenge(version, nonce, limits, proof)
    Answer(proof)                      ->
                                       <-     Ready
                 or, at any time,      <-     Refused(kind, text)

A proof is HMAC-SHA256 with the shared key over who proves it and all that was said before, both nonces
among it: so it fits one connection, one end and one choice of version and limits, and nothing
that was heard elsewhere. Without a shared key it is empty.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.transport import messages as said
from tiercache.transport.base import Limits
from tiercache.transport.messages import encode
from tiercache.transport.security import Security, SharedKey

VERSIONS: Final = (said.PROTOCOL,)
"""Versions of the protocol that this code speaks."""

_FAULTS: Final = {fault.value: fault for fault in PeerFault}


@dataclass(frozen=True, slots=True)
class End:
    """What one end of every connection brings along. `node` is its name."""

    node: str
    security: Security
    limits: Limits = field(default_factory=Limits)
    versions: Sequence[int] = VERSIONS


@dataclass(frozen=True, slots=True)
class Agreed:
    """What both ends hold to after the handshake. `session` (32 bytes) is the same at both ends and of
    this connection only, `peer` the name that the other one gave."""

    version: int
    session: bytes
    peer: str
    window_bytes: int
    chunk_bytes_max: int
    frame_bytes_max: int
    batch_max: int
    calls_max: int


def _proof(security: Security, who: bytes, *parts: bytes) -> bytes:
    if not isinstance(security, SharedKey):
        return b""
    transcript = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hmac.digest(security.key, b"tiercache peer " + who + b"\0" + transcript, "sha256")


def _unproved(challenge: said.Challenge) -> bytes:
    return encode(msgspec.structs.replace(challenge, proof=b""))


def _session(hello: bytes, challenge: said.Challenge) -> bytes:
    return hashlib.sha256(hello + encode(challenge)).digest()


def _check(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise TransportFault(PeerFault.REFUSED, "the other end does not have the shared key")


def refused(said_so: said.Refused) -> TransportFault:
    """Return the fault that the other end states."""
    return TransportFault(_FAULTS.get(said_so.kind, PeerFault.REFUSED), said_so.text)


class Dialling:
    """The end that dials. `nonce` is 32 random bytes, new for every connection."""

    def __init__(self, end: End, nonce: bytes) -> None:
        self._end = end
        self._nonce = nonce
        self._challenge: said.Challenge | None = None
        limits = end.limits
        self._hello = encode(
            said.Hello(
                list(end.versions), end.security.method, end.node, nonce, limits.window_bytes
            )
        )

    def hello(self) -> bytes:
        """Return the first body to be sent."""
        return self._hello

    def challenged(self, body: memoryview) -> bytes:
        """Take the first answer and return the second body. Raises TransportFault, ProtocolError."""
        challenge = said.decoded_challenge(body)
        if isinstance(challenge, said.Refused):
            raise refused(challenge)
        if challenge.version not in self._end.versions:
            raise ProtocolError(f"version {challenge.version} was not offered")
        if challenge.nonce == self._nonce:
            raise ProtocolError("a nonce came back")
        security = self._end.security
        _check(challenge.proof, _proof(security, b"listens", self._hello, _unproved(challenge)))
        self._challenge = challenge
        proof = _proof(security, b"dials", self._hello, encode(challenge))
        return encode(said.Answer(proof))

    def ready(self, body: memoryview) -> Agreed:
        """Take the second answer. Raises TransportFault, ProtocolError."""
        ready = said.decoded_ready(body)
        if isinstance(ready, said.Refused):
            raise refused(ready)
        challenge, limits = self._challenge, self._end.limits
        assert challenge is not None
        return Agreed(
            version=challenge.version,
            session=_session(self._hello, challenge),
            peer=challenge.node,
            window_bytes=limits.window_bytes,
            chunk_bytes_max=limits.chunk_bytes_max,
            frame_bytes_max=min(limits.frame_bytes_max, challenge.frame_bytes_max),
            batch_max=min(limits.batch_max, challenge.batch_max),
            calls_max=min(limits.calls_max, challenge.calls_max),
        )


class Listening:
    """The end that listens. `nonce` is 32 random bytes, new for every connection."""

    def __init__(self, end: End, nonce: bytes) -> None:
        self._end = end
        self._nonce = nonce
        self._hello = b""
        self._greeting: said.Hello | None = None
        self._challenge: said.Challenge | None = None

    def greeted(self, body: memoryview) -> bytes:
        """Take the first message and return the answer. Raises TransportFault, ProtocolError."""
        hello = said.decoded_hello(body)
        security, limits = self._end.security, self._end.limits
        common = set(hello.versions) & set(self._end.versions)
        if not common:
            raise TransportFault(
                PeerFault.REFUSED,
                f"{hello.node!r} speaks versions {hello.versions} of the protocol between nodes, "
                f"{self._end.node!r} speaks {list(self._end.versions)}",
            )
        if hello.method != security.method:
            text = f"{self._end.node!r} asks for {security.method!r}, not {hello.method!r}"
            raise TransportFault(PeerFault.REFUSED, text)
        if hello.nonce == self._nonce:
            raise ProtocolError("a nonce came back")
        self._hello, self._greeting = bytes(body), hello
        challenge = said.Challenge(
            max(common),
            self._end.node,
            self._nonce,
            limits.frame_bytes_max,
            limits.batch_max,
            limits.calls_max,
            b"",
        )
        proof = _proof(security, b"listens", self._hello, encode(challenge))
        self._challenge = msgspec.structs.replace(challenge, proof=proof)
        return encode(self._challenge)

    def answered(self, body: memoryview) -> tuple[bytes, Agreed]:
        """Take the second message; return the last answer, and what was agreed on. Raises
        TransportFault, ProtocolError."""
        answer = said.decoded_answer(body)
        hello, challenge, limits = self._greeting, self._challenge, self._end.limits
        assert hello is not None
        assert challenge is not None
        expected = _proof(self._end.security, b"dials", self._hello, encode(challenge))
        _check(answer.proof, expected)
        agreed = Agreed(
            version=challenge.version,
            session=_session(self._hello, challenge),
            peer=hello.node,
            window_bytes=min(hello.window_bytes, limits.window_bytes),
            chunk_bytes_max=min(limits.chunk_bytes_max, hello.window_bytes),
            frame_bytes_max=limits.frame_bytes_max,
            batch_max=limits.batch_max,
            calls_max=limits.calls_max,
        )
        return encode(said.Ready()), agreed


def refusal(fault: TransportFault | ProtocolError) -> bytes:
    """Return the body that says why a connection ends."""
    kind = fault.fault if isinstance(fault, TransportFault) else PeerFault.PROTOCOL
    detail = fault.detail if isinstance(fault, TransportFault) else str(fault)
    return encode(said.Refused(kind.value, detail[: said.TEXT_CHARS_MAX]))
