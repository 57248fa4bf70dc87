"""Files read and written past the page cache, whole pages at a time.

Cached state is read once and then lives in our own memory: a second copy in the page cache would
only push out other people's. Where a filesystem refuses direct I/O, the same calls go through it.
"""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeAlias

from tiercache.errors import Fault, StorageFault
from tiercache.tiers.base import ALIGNMENT

IOV_BUFFERS_MAX = 1024
"""Buffers in one vectored call: the kernel's limit."""

BOUNCE_BYTES = 1 << 20
BOUNCES_MAX = 4
"""Unaligned calls at once, in the whole process; more wait for one to end."""

_Call: TypeAlias = "Callable[[int, list[memoryview], int], int]"
_Bounced: TypeAlias = "Callable[[int, memoryview], Moved]"

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Moved(NamedTuple):
    """How far a transfer came, and what stopped it.

    No error and fewer bytes than asked for: the file ends there.
    """

    nbytes: int
    error: OSError | None


class DirectFile:
    """One open file. Offsets and sizes are multiples of `ALIGNMENT`. Safe for several threads."""

    def __init__(self, path: Path) -> None:
        """Open an existing file; raises OSError."""
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.fd = os.open(path, flags | os.O_DIRECT)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = os.open(path, flags)
            self.direct = False

    def read(self, offset: int, buffers: Sequence[memoryview]) -> Moved:
        """Fill `buffers`, one after the other, from the file at `offset`."""
        return self._each(offset, buffers, os.preadv, self._read_bounced)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> Moved:
        """Write `buffers`, one after the other, to the file at `offset`."""
        moved = self._each(offset, buffers, os.pwritev, self._write_bounced)
        if moved.error is None and moved.nbytes < sum(map(len, buffers)):
            return moved._replace(error=OSError(errno.EIO, "the device took fewer bytes"))
        return moved

    def sync(self) -> None:
        """Make what was written durable against loss of power; raises OSError."""
        os.fdatasync(self.fd)

    def size(self) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Let go of the file. Call once."""
        os.close(self.fd)

    def _each(
        self, offset: int, buffers: Sequence[memoryview], call: _Call, bounced: _Bounced
    ) -> Moved:
        done = 0
        for straight, group in itertools.groupby(buffers, key=self._goes_straight):
            pieces = [list(group)] if straight else [[piece] for piece in _pieces(group)]
            for piece in pieces:
                here = offset + done
                moved = self._vectored(here, piece, call) if straight else bounced(here, piece[0])
                done += moved.nbytes
                if moved.error is not None or moved.nbytes < sum(map(len, piece)):
                    return Moved(done, moved.error)
        return Moved(done, None)

    def _goes_straight(self, buffer: memoryview) -> bool:
        return not self.direct or is_aligned(buffer)

    def _vectored(self, offset: int, buffers: list[memoryview], call: _Call) -> Moved:
        pending = list(buffers)
        done = 0
        while pending:
            try:
                moved = call(self.fd, pending[:IOV_BUFFERS_MAX], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._give_up_direct():
                    continue
                return Moved(done, error)
            # Direct I/O goes on only from a page edge: a torn page is moved again, whole.
            moved -= moved % ALIGNMENT
            if not moved:
                break
            done += moved
            while pending and moved >= len(pending[0]):
                moved -= len(pending.pop(0))
            if moved:
                pending[0] = pending[0][moved:]
        return Moved(done, None)

    def _give_up_direct(self) -> bool:
        """Some filesystems accept the flag and refuse the call."""
        if not self.direct:
            return False
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        return True

    def _read_bounced(self, offset: int, target: memoryview) -> Moved:
        with _bounce(len(target)) as buffer:
            moved = self._vectored(offset, [buffer], os.preadv)
            target[: moved.nbytes] = buffer[: moved.nbytes]
        return moved

    def _write_bounced(self, offset: int, source: memoryview) -> Moved:
        with _bounce(len(source)) as buffer:
            buffer[:] = source
            return self._vectored(offset, [buffer], os.pwritev)


def is_aligned(buffer: memoryview) -> bool:
    """True when direct I/O can use the buffer. A read-only one cannot be asked, and is copied."""
    if buffer.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % ALIGNMENT == 0


def storage_fault(error: OSError, what: str) -> StorageFault:
    """Return the fault that an operating system error on `what` means for a tier."""
    detail = f"{what}: {error.strerror or error}"
    if error.errno in _NO_SPACE:
        return StorageFault(Fault.NO_SPACE, detail)
    if error.errno == errno.ENOENT:
        return StorageFault(Fault.MISSING, detail)
    return StorageFault(Fault.IO, detail)


def _pieces(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    for buffer in buffers:
        for start in range(0, len(buffer), BOUNCE_BYTES):
            yield buffer[start : start + BOUNCE_BYTES]


_bounces: queue.LifoQueue[mmap.mmap | None] = queue.LifoQueue(BOUNCES_MAX)
for _ in range(BOUNCES_MAX):
    _bounces.put(None)  # Made at first need: aligned callers never pay for them.


@contextmanager
def _bounce(nbytes: int) -> Iterator[memoryview]:
    region = _bounces.get() or mmap.mmap(-1, BOUNCE_BYTES)
    try:
        with memoryview(region) as whole, whole[:nbytes] as buffer:
            yield buffer
    finally:
        _bounces.put(region)
