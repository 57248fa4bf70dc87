"""The node's host memory, mapped into this process.

Nothing here unmaps. A view keeps its mapping alive; without views, a mapping goes when the arena is
dropped. So bytes that somebody still looks at never become a segmentation fault, whatever happened
to the node or the client.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import ProtocolError


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy `source` into `target`, as flat bytes; other threads run meanwhile.

    Raises ValueError when their sizes differ, or `target` is read-only.
    """
    if target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit into {target.nbytes}")
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


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

    def write(self, segment: int, offset: int, data: memoryview) -> None:
        """Copy flat bytes to a place that `holds` them; other threads run meanwhile."""
        target = self._writers[segment][offset : offset + data.nbytes]
        np.copyto(target, np.frombuffer(data, np.uint8))
