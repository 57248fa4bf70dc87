"""The limit: a client that copies within its own memory, and shares nothing."""

from collections.abc import Sequence

import numpy as np

from tests.bench.peers.harness import main
from tests.bench.peers.peer import MIB, Buffer, Context, Peer, aligned

POOL_BYTES = 256 * MIB


class Memcpy(Peer):
    """One thread, numpy."""

    name = "memcpy"
    ops = ("put", "get_into")
    check = False

    def version(self) -> str:
        return f"numpy {np.__version__}"

    def connect(self, context: Context, rank: int) -> None:
        self._pool = aligned(POOL_BYTES)
        self._pool[:] = 1

    def prepare(self, size: int) -> None:
        self._size = size

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        for key, source in zip(keys, sources, strict=True):
            np.copyto(self._slot(key), source)

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        for key, target in zip(keys, targets, strict=True):
            np.copyto(target, self._slot(key))

    def _slot(self, key: str) -> Buffer:
        number = int(key.rsplit("-", 1)[1]) % (POOL_BYTES // self._size)
        return self._pool[number * self._size : (number + 1) * self._size]


if __name__ == "__main__":
    main([Memcpy])
