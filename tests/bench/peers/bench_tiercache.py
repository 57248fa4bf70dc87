"""tiercache: a sidecar of its own, and clients that attach to it.

One object is one block of 16 tokens of exactly the object's size; a batch is a prefix of so many
blocks. Keys become tokens, and tokens a chain, inside the timed part.

    put       save
    get       fetch, look at the views, release
    get_into  fetch, copy out of the views, release
    exists    fetch, release
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tests.bench.nodes import ANSWER_S_MAX, Sidecar, blob_layout
from tests.bench.peers.harness import main
from tests.bench.peers.peer import Buffer, Context, Peer
from tiercache import __version__
from tiercache.cli.admin import Admin
from tiercache.client import Blob, Client, Holding, Options, Wanted, copy_into
from tiercache.state import Chain, Namespace

BLOCK_TOKENS = 16
ARENA_BYTES = 1 << 30
PART = "kv"


class Tiercache(Peer):
    """After each cell everything is evicted, so that the next one finds warm memory, as at others."""

    name = "tiercache"
    ops = ("put", "get_into", "get", "exists")
    batches = (1, 16)

    def start(self) -> Context:
        self._sidecar = Sidecar(arena_bytes=ARENA_BYTES)
        self._sidecar.wait_prefaulted()
        return {"socket": str(self._sidecar.socket)}

    def stop(self) -> None:
        self._sidecar.stop()

    def version(self) -> str:
        return __version__

    def connect(self, context: Context, rank: int) -> None:
        self._socket = Path(context["socket"])
        self._rank = rank
        self._clients: dict[int, Client] = {}

    def prepare(self, size: int) -> None:
        if size not in self._clients:
            layout = blob_layout(size, BLOCK_TOKENS)
            namespace = Namespace.of(layout, model=f"bench-{size}", weights="w", tokenizer="t")
            options = Options(name=f"bench-{self._rank}", deadline_s=10.0, required=True)
            self._clients[size] = Client.attach(self._socket, namespace, layout, options=options)
        self._client = self._clients[size]

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        ends = range(BLOCK_TOKENS, BLOCK_TOKENS * len(keys) + 1, BLOCK_TOKENS)
        blobs = [
            Blob(PART, end, source.data, start=end - BLOCK_TOKENS)
            for end, source in zip(ends, sources, strict=True)
        ]
        saved = self._client.save(keys[0], _chain(keys), blobs)
        if saved.stored != len(keys):
            raise RuntimeError(f"save: {saved}")

    def get(self, keys: Sequence[str]) -> int:
        with self._fetch(keys) as holding:
            return sum(blob.data.nbytes for blob in holding.blobs if blob is not None)

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        with self._fetch(keys) as holding:
            for blob, target in zip(holding.blobs, targets, strict=True):
                if blob is None:
                    raise KeyError(keys)
                copy_into(target.data, blob.data)

    def exists(self, keys: Sequence[str]) -> bool:
        with self._fetch(keys) as holding:
            return None not in holding.blobs

    def settle(self) -> None:
        flushed = self._client.flush()
        if flushed.waiting or flushed.lost or flushed.reason:
            raise RuntimeError(f"flush: {flushed}")

    def delete(self, keys: Sequence[str]) -> None:
        if self._rank == 0:
            with Admin(str(self._socket), ANSWER_S_MAX) as admin:
                admin.evict("", "host", 0)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _fetch(self, keys: Sequence[str]) -> Holding:
        return self._client.fetch(
            keys[0], [Wanted(PART, digest) for digest in _chain(keys).digests[1:]]
        )


def _chain(keys: Sequence[str]) -> Chain:
    tokens = [token for key in keys for token in _tokens(key)]
    return Chain(tokens, BLOCK_TOKENS)


def _tokens(key: str) -> memoryview:
    """Return the 16 tokens that stand for a key."""
    return memoryview(hashlib.blake2b(key.encode(), digest_size=64).digest()).cast("I")


if __name__ == "__main__":
    main([Tiercache])
