"""The reference for the NVMe tier: the same pattern of plain direct I/O on files of the same size."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from tests.bench.peers.peer import Buffer

CALL_BYTES_MAX = 8 << 20
"""Neighbours go to the disk together up to this size, as the tier does it."""


class PlainFile:
    """One preallocated file, written and read past the page cache."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, nbytes)

    def write(self, sources: Sequence[Buffer]) -> float:
        """Write objects of one size, one after the other from the start; return the seconds."""
        size = sources[0].nbytes
        together = max(1, CALL_BYTES_MAX // size)
        started = perf_counter()
        for at in range(0, len(sources), together):
            some = [each.data for each in sources[at : at + together]]
            moved = os.pwritev(self._file, some, at * size)
            assert moved == size * len(some), moved
        return perf_counter() - started

    def read(self, targets: Sequence[Buffer], threads: int) -> float:
        """Read objects of one size, each in one call, by `threads`; return the seconds."""
        size = targets[0].nbytes

        def one(number: int) -> None:
            moved = os.preadv(self._file, [targets[number].data], number * size)
            assert moved == size, moved

        started = perf_counter()
        if threads == 1:
            for number in range(len(targets)):
                one(number)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(one, range(len(targets))))
        return perf_counter() - started

    def remove(self) -> None:
        """Close and delete it."""
        os.close(self._file)
        self._path.unlink()
