"""Splits a byte stream into messages and raw bytes, without any I/O and without copying the latter.

Strategy: receive into what `space` returns, say so with `filled`, and take bodies with `next` until it
returns None. After a message that announces raw bytes, `land` says where they go: `space` is
then that memory itself.
"""

import struct
from collections.abc import Sequence
from typing import Final, Protocol

from tiercache.errors import ProtocolError

HEADER_BYTES: Final = 4
HEAD_BYTES: Final = 8 << 10
"""What is received at once while messages are expected: raw bytes behind a message are copied once,
so it is small."""

SCRATCH_BYTES: Final = 64 << 10
_LENGTH = struct.Struct("<I")


def framed(body: bytes) -> bytes:
    """Return `body` with its length in front."""
    return _LENGTH.pack(len(body)) + body


class Landing(Protocol):
    """Where raw bytes go: `left` of them."""

    @property
    def left(self) -> int:
        """How many are still to come."""
        ...

    def space(self) -> memoryview:
        """Return memory for the next ones: not empty, and at most `left` bytes."""
        ...

    def filled(self, nbytes: int) -> None:
        """Say that so many bytes of `space` were filled."""
        ...


class Inlet:
    """The receiving end of one stream. `frame_bytes_max` may be raised later."""

    __slots__ = ("_at", "_frame", "_frame_have", "_have", "_head", "_landing", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._at = 0  # Head bytes taken.
        self._have = 0  # Head bytes received.
        self._frame: memoryview | None = None  # The body of a frame that is larger than the head.
        self._frame_have = 0
        self._landing: Landing | None = None

    def space(self) -> memoryview:
        """Return where the next bytes must be received. Never empty."""
        if self._landing is not None:
            return self._landing.space()
        if self._frame is not None:
            return self._frame[self._frame_have :]
        if self._at == self._have:
            self._at = self._have = 0
        elif self._at > 0:
            rest = bytes(self._head[self._at : self._have])
            self._head[: len(rest)] = rest
            self._at, self._have = 0, len(rest)
        return self._head[self._have :]

    @property
    def landing(self) -> Landing | None:
        """Where the next bytes of the stream go, if not to a message."""
        return self._landing

    @property
    def missing(self) -> int:
        """How many bytes the next message needs at least, where it can be known; never more."""
        if self._frame is not None:
            return len(self._frame) - self._frame_have
        have = self._have - self._at
        if have < HEADER_BYTES:
            return HEADER_BYTES - have
        nbytes: int = _LENGTH.unpack_from(self._head, self._at)[0]
        return HEADER_BYTES + nbytes - have

    def filled(self, nbytes: int) -> None:
        """Say that `nbytes` of `space` were received."""
        if self._landing is not None:
            self._landing.filled(nbytes)
            if not self._landing.left:
                self._landing = None
        elif self._frame is not None:
            self._frame_have += nbytes
        else:
            self._have += nbytes

    def next(self) -> memoryview | None:
        """Return the next body, or None when it takes more bytes. Valid until the next call.

        Raises ProtocolError when a frame is larger than `frame_bytes_max`.
        """
        if self._landing is not None:
            return None
        if self._frame is not None:
            if self._frame_have < len(self._frame):
                return None
            whole, self._frame = self._frame, None
            return whole
        have = self._have - self._at
        if have < HEADER_BYTES:
            return None
        nbytes: int = _LENGTH.unpack_from(self._head, self._at)[0]
        if nbytes > self.frame_bytes_max:
            raise ProtocolError(f"a frame of {nbytes} bytes; at most {self.frame_bytes_max}")
        start = self._at + HEADER_BYTES
        if start + nbytes <= self._have:
            self._at = start + nbytes
            return self._head[start : self._at]
        if HEADER_BYTES + nbytes > HEAD_BYTES:
            self._frame = memoryview(bytearray(nbytes))
            rest = self._head[start : self._have]
            self._frame[: len(rest)] = rest
            self._frame_have = len(rest)
            self._at = self._have
        return None

    def land(self, landing: Landing) -> None:
        """Send the next `landing.left` bytes of the stream there. Call it before `next`."""
        assert self._landing is None
        while landing.left and self._at < self._have:
            space = landing.space()
            piece = self._head[self._at : min(self._have, self._at + len(space))]
            space[: len(piece)] = piece
            self._at += len(piece)
            landing.filled(len(piece))
        self._landing = landing if landing.left else None


def gathered(bodies: Sequence[bytes]) -> bytes:
    """Return frames of all `bodies`, one after the other."""
    return b"".join([framed(body) for body in bodies])
