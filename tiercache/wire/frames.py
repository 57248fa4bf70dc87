"""Splits a byte stream into frames: four bytes of length (little-endian), then a body."""

import struct
from typing import Final

from tiercache.errors import ProtocolError

HEADER_BYTES: Final = 4
_LENGTH = struct.Struct("<I")


def frame(body: bytes) -> bytes:
    """Return `body` with its length in front. Bounding its size is the caller's part."""
    return _LENGTH.pack(len(body)) + body


class Frames:
    """The receiving end of one stream, fed with slices of any size.

    A body is handed out in place where one chunk holds all of it. Otherwise its bytes are gathered
    in a buffer that never holds more than one frame, and never grows for a frame that is too large.
    """

    __slots__ = ("_at", "_chunk", "_gathered", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._chunk = memoryview(b"")
        self._at = 0  # How much of the chunk is used up.
        self._gathered = bytearray()  # The start of a frame that began in an earlier chunk.

    def feed(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add received bytes; they must not change until `next` has returned None.

        Raises RuntimeError when `next` has not returned None since the last call.
        """
        if self._at < len(self._chunk):
            raise RuntimeError("take every frame with `next` before feeding more bytes")
        self._chunk = memoryview(chunk)
        self._at = 0

    def next(self) -> memoryview | None:
        """Return the next body, or None when it takes more bytes. Valid until the next `feed`.

        Raises ProtocolError, now and ever after, when a frame is larger than `frame_bytes_max`.
        """
        if self._gathered:
            return self._resume()
        chunk, at = self._chunk, self._at
        body = at + HEADER_BYTES
        if body <= len(chunk):
            stop = body + self._checked(_LENGTH.unpack_from(chunk, at)[0])
            if stop <= len(chunk):
                self._at = stop
                return chunk[body:stop]
        self._gathered += chunk[at:]
        self._at = len(chunk)
        return None

    def _resume(self) -> memoryview | None:
        if not self._gather(HEADER_BYTES):
            return None
        nbytes = self._checked(_LENGTH.unpack_from(self._gathered)[0])
        if not self._gather(HEADER_BYTES + nbytes):
            return None
        whole, self._gathered = self._gathered, bytearray()
        return memoryview(whole)[HEADER_BYTES:]

    def _gather(self, nbytes: int) -> bool:
        """Bring the gathered bytes up to `nbytes`; False when the chunk does not hold enough."""
        missing = nbytes - len(self._gathered)
        if missing > 0:
            more = self._chunk[self._at : self._at + missing]
            self._gathered += more
            self._at += len(more)
        return len(self._gathered) >= nbytes

    def _checked(self, nbytes: int) -> int:
        if nbytes > self.frame_bytes_max:
            raise ProtocolError(
                f"a frame of {nbytes} bytes; this side takes {self.frame_bytes_max} at most"
            )
        return nbytes
