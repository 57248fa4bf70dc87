"""The node's host memory, mapped into this process.

Nothing here unmaps. A view keeps its mapping alive; without views, a mapping goes when the arena is
dropped. So bytes that somebody still looks at never become a segmentation fault, whatever happened
to the node or the client.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from tiercache.errors import ProtocolError


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy `source` into `target`, as flat bytes; other threads run meanwhile.

    Raises ValueError when their sizes differ, or `target` is read-only.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


FAULT_AROUND_BYTES: Final = 64 << 10
"""What Linux maps at once where it meets the first read of a page."""

PIECE_BYTES: Final = 256 << 10
"""Copied and summed in one go: stays in a core's cache in between."""


class Arena:
    """Segments of shared memory: each mapped once to read, and once to write if asked for."""

    def __init__(self, descriptors: Sequence[int], segments: Sequence[int], *, write: bool) -> None:
        """Map what an `Attached` brought, and close the descriptors, also when it fails.

        `segments`: sizes in bytes. Raises ProtocolError when the descriptors do not match them,
        OSError when the memory cannot be mapped.
        """
        try:
            expected = len(segments) * (2 if write else 1)
            if len(descriptors) != expected:
                raise ProtocolError(f"{len(descriptors)} descriptors came, {expected} should")
            try:
                self._readers = tuple(
                    memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
                    for descriptor, size in zip(descriptors, segments, strict=False)
                )
                self._writers: tuple[NDArray[np.uint8], ...] = tuple(
                    np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
                    for descriptor, size in zip(
                        descriptors[len(segments) :], segments, strict=False
                    )
                )
                self._touched = tuple(
                    bytearray(-(-len(writer) // FAULT_AROUND_BYTES)) for writer in self._writers
                )
            except (ValueError, OverflowError) as fault:
                raise ProtocolError(f"a segment's size is wrong: {fault}") from fault
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def view(self, segment: int, offset: int, nbytes: int) -> memoryview:
        """Return a read-only view; ProtocolError when there is no such place."""
        if not (0 <= segment < len(self._readers) and offset >= 0 and nbytes >= 0):
            raise ProtocolError(f"no {nbytes} bytes at {offset} of segment {segment}")
        view = self._readers[segment][offset : offset + nbytes]
        if len(view) != nbytes:
            raise ProtocolError(f"no {nbytes} bytes at {offset} of segment {segment}")
        return view

    def holds(self, segment: int, offset: int, nbytes: int) -> bool:
        """Whether there is such a place to write to."""
        return 0 <= segment < len(self._writers) and (
            0 <= offset <= len(self._writers[segment]) - nbytes
        )

    def write(self, segment: int, offset: int, *pieces: memoryview) -> bytes:
        """Copy flat bytes one after another to a place that `holds` them; other threads run meanwhile.

        Returns the XXH3-128 of the source. It is taken bit by bit, while the bytes are in the
        cache; what the source becomes during the copy then never passes for what was meant.
        """
        end = offset + sum(piece.nbytes for piece in pieces)
        self._map(segment, offset, end)
        checksum = xxh3_128()
        for data in pieces:
            target = self._writers[segment][offset : offset + data.nbytes]
            offset += data.nbytes
            source = np.frombuffer(data, np.uint8)
            for at in range(0, data.nbytes, PIECE_BYTES):
                np.copyto(target[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES])
                checksum.update(data[at : at + PIECE_BYTES])
        return checksum.digest()

    def _map(self, segment: int, start: int, end: int) -> None:
        """Touch new pages by reading: a write maps one page at a time, a read its neighbours too."""
        touched = self._touched[segment]
        first, last = start // FAULT_AROUND_BYTES, -(-end // FAULT_AROUND_BYTES)
        if touched.find(0, first, last) >= 0:
            self._writers[segment][start:end:FAULT_AROUND_BYTES].max()
            touched[first:last] = b"\1" * (last - first)
