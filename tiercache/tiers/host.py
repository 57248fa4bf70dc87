"""The host tier: memory shared with engine processes, in sealed memfd segments.

    memfd (sealed: its size is fixed)
      +-- one read-write mapping here
      +-- a read-only descriptor for engines that only load
      +-- a read-write descriptor for engines that save

A sealed size means that no peer can shrink the file under us, which would be SIGBUS here.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from tiercache.errors import ConfigError
from tiercache.state import Extent
from tiercache.tiers.base import ALIGNMENT

SEGMENTS_MAX = 120
"""All descriptors ride in one message, and the kernel takes 253 there."""

PREFAULT_STEP_BYTES = 16 << 20
DESCRIPTORS_PER_SEGMENT = 3
"""The segment, its mapping's copy, the read-only one."""

DESCRIPTORS_SPARE = 64
"""For everything else that a node has open as it starts."""

_MADV_POPULATE_WRITE = 23


def segment_sizes(total_bytes: int, segment_bytes: int) -> list[int]:
    """Return the sizes of the segments of an arena of `total_bytes`, rounded down to whole pages.

    Segments are larger than `segment_bytes` where more than `SEGMENTS_MAX` would be needed; the
    last may be smaller. Raises ConfigError when there is not even one page.
    """
    total = total_bytes // ALIGNMENT * ALIGNMENT
    if total <= 0 or segment_bytes <= 0:
        raise ConfigError(f"host.bytes {total_bytes}: an arena needs at least {ALIGNMENT} bytes")
    size = max(_round_up(segment_bytes), _round_up(-(-total // SEGMENTS_MAX)))
    whole, rest = divmod(total, size)
    return [size] * whole + ([rest] if rest else [])


class HostArena:
    """An `Arena` that other processes can map.

    Memory is taken from the machine as it is touched, at the latest by `prefault`; nothing here
    reserves it, so the caller checks the sizes against its budget first. Raises ConfigError when
    the machine refuses segments of these `sizes` (whole pages).
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if not 0 < len(sizes) <= SEGMENTS_MAX or any(size % ALIGNMENT for size in sizes):
            raise ValueError(f"1 to {SEGMENTS_MAX} segments of whole pages, not {list(sizes)}")
        _check_descriptors(len(sizes))
        self._sizes = tuple(sizes)
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._writable: list[int] = []
        self._readable: list[int] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                for number, size in enumerate(sizes):
                    self._add(number, size)
            except OSError as error:
                raise ConfigError(
                    f"host.bytes: the machine refused {sum(sizes)} bytes of shared memory in "
                    f"{len(sizes)} segments ({error.strerror}). Make host.bytes smaller"
                ) from error
            undo.pop_all()

    @property
    def segments(self) -> Sequence[int]:
        """See `Arena.segments`."""
        return self._sizes

    def view(self, extent: Extent) -> memoryview:
        """See `Arena.view`. A view stays good after `close`: it holds its mapping."""
        assert extent.offset + extent.size <= self._sizes[extent.segment], extent
        return self._views[extent.segment][extent.offset : extent.offset + extent.size]

    def fds(self, *, write: bool) -> list[int]:
        """Return one descriptor per segment, in order, to be sent to an engine.

        Without `write` they are read-only. They stay the arena's: send them, do not close them.
        """
        return list(self._writable if write else self._readable)

    def prefault(
        self, should_stop: Callable[[], bool], step_bytes: int = PREFAULT_STEP_BYTES
    ) -> int:
        """Touch all memory, a step at a time, and return how many bytes were touched.

        For a background thread: it runs without the interpreter's lock, asks `should_stop` between
        steps (whole pages), and never changes a byte. Stops short, without an error, where the
        machine has no more memory or the arena is closed.
        """
        assert step_bytes % ALIGNMENT == 0, step_bytes
        touched = 0
        for number, size in enumerate(self._sizes):
            for start in range(0, size, step_bytes):
                step = min(step_bytes, size - start)
                if should_stop() or not self._touch(number, start, step):
                    return touched
                touched += step
        return touched

    def close(self) -> None:
        """See `Arena.close`. Views in use keep their memory until they are gone."""
        maps, self._maps, self._views = self._maps, [], []
        for each in maps:
            with suppress(BufferError):  # A view is in use: the last one unmaps it.
                each.close()
        for descriptor in self._writable + self._readable:
            os.close(descriptor)
        self._writable, self._readable = [], []

    def _add(self, number: int, size: int) -> None:
        descriptor = os.memfd_create(f"tiercache-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._writable.append(descriptor)
        os.ftruncate(descriptor, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        # A reader that opens its descriptor anew must not get a writable one.
        os.fchmod(descriptor, 0o400)
        self._readable.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
        mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
        with suppress(OSError):  # A kernel without huge pages.
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(mapping)
        self._views.append(memoryview(mapping))

    def _touch(self, number: int, start: int, nbytes: int) -> bool:
        """Return False when there is no more memory, or the arena is closed."""
        try:
            with self._views[number][start : start + nbytes] as view:
                address = ctypes.addressof(ctypes.c_char.from_buffer(view))
                # Python's own madvise keeps the interpreter's lock for the whole call.
                if not _madvise(address, nbytes, _MADV_POPULATE_WRITE):
                    return True
                if ctypes.get_errno() != errno.EINVAL:
                    return False
            os.posix_fallocate(self._writable[number], start, nbytes)  # A kernel before 5.14.
        except (OSError, IndexError):
            return False
        return True


def _check_descriptors(segments: int) -> None:
    needed = segments * DESCRIPTORS_PER_SEGMENT + DESCRIPTORS_SPARE
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"an arena of {segments} segments needs {needed} open files and the limit is {soft}: "
            f"raise it (ulimit -n, LimitNOFILE=), or make host.segment_bytes larger"
        )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int
