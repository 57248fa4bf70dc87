"""LMCache's multiprocess server without a GPU: engine-driven transfers over its shared memory.

One object is one chunk of 16 tokens of exactly the object's size; a batch is one request for a
prefix of so many chunks, whose messages they share.

    put       PREPARE_STORE, copy into the slots, COMMIT_STORE, END_SESSION
    get_into  LOOKUP, WAIT_PREFETCH, PREPARE_RETRIEVE, copy out, COMMIT_RETRIEVE, END_SESSION
    exists    LOOKUP, WAIT_PREFETCH, FREE_LOOKUP_LOCKS, END_SESSION

This is what its own adapters do for an engine. Reporting of usage is switched off.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from tests.bench.peers.harness import main
from tests.bench.peers.peer import Buffer, Context, Peer, Servers, free_port

BIN = os.path.dirname(sys.executable)
HOST = "127.0.0.1"
CHUNK_TOKENS = 16
REPLY_S_MAX = 30.0
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
}
PACKAGE = "lmcache.v1.multiprocess"


class LmCache(Peer):
    """The server has no way to delete single objects: after each cell the cache is emptied."""

    name = "lmcache"
    batches = (1, 16)
    objects_max = 500

    def start(self) -> Context:
        self._servers = Servers("lmcache")
        port = free_port()
        shm = f"tiercache-bench-{os.getpid()}"
        self._servers.run(
            f"{BIN}/lmcache", "server", "--host", HOST, "--port", str(port),
            "--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "2", "--eviction-policy", "LRU",
            "--max-workers", "2", "--supported-transfer-mode", "engine_driven",
            "--shm-name", shm, "--http-host", HOST, "--http-port", str(free_port()),
            "--prometheus-port", str(free_port()), "--no-l1-use-lazy",
            **QUIET,
        )  # fmt: skip
        self._servers.wait_for(port)
        return {"port": str(port)}

    def stop(self) -> None:
        self._servers.stop()

    def version(self) -> str:
        return version("lmcache")

    def connect(self, context: Context, rank: int) -> None:
        os.environ.update(QUIET)
        # Without stubs, and only in this peer's own environment: hence no static imports.
        self._torch: Any = importlib.import_module("torch")
        self._torch.set_num_threads(1)
        factory = importlib.import_module(f"{PACKAGE}.transport.factory").RequestClientFactory
        self._types: Any = importlib.import_module(f"{PACKAGE}.custom_types")
        self._server: Any = factory.create(f"tcp://{HOST}:{context['port']}")
        self._rank = rank
        self._registered: dict[int, tuple[Any, int]] = {}
        self._requests = 0

    def prepare(self, size: int) -> None:
        """Register a model whose chunk is `size` bytes: one layer, 16 slots."""
        self._model = f"m{size}"
        if size not in self._registered:
            self._registered[size] = self._register(size, 1000 + 100 * self._rank)
        self._transfer, self._instance = self._registered[size]

    def _register(self, size: int, base: int) -> tuple[Any, int]:
        transfers = f"{PACKAGE}.transfer_context"
        contexts: Any = importlib.import_module(f"{transfers}.base")
        memory: Any = importlib.import_module(f"{transfers}.shm")
        layouts: Any = importlib.import_module("lmcache.v1.distributed.api")
        instance = base + len(self._registered)
        width = size // CHUNK_TOKENS
        payload = self._types.RegisterEngineDrivenContextPayload(
            instance_id=instance,
            model_name=self._model,
            world_size=1,
            block_size=CHUNK_TOKENS,
            num_layers=1,
            hidden_dim_size=width,
            dtype_str="uint8",
            use_mla=True,
            num_physical_slots=CHUNK_TOKENS,
        )
        reply = self._server.register_kv_cache_engine_driven_context(payload).result(
            timeout=REPLY_S_MAX
        )
        layout = layouts.MemoryLayoutDesc(
            shapes=[self._torch.Size([1, CHUNK_TOKENS, width])], dtypes=[self._torch.uint8]
        )
        metadata = contexts.EngineDrivenContextMetadata(
            layout_desc=layout, block_size=CHUNK_TOKENS, use_mla=True
        )
        transfer = memory.EngineDrivenContextShm(
            metadata, self._server, REPLY_S_MAX, reply.shm_name, reply.pool_size
        )
        return transfer, instance

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        request = self._request(keys)
        prepared = self._transfer.prepare_store(request, self._instance)
        if prepared is None or len(prepared[0]) != len(keys):
            raise RuntimeError(f"prepare_store gave {prepared and len(prepared[0])} slots")
        slots = prepared[0]
        for slot, source in zip(slots, sources, strict=True):
            slot.view(-1).copy_(self._torch.from_numpy(source))
        if not self._transfer.commit_store(request, self._instance, slots):
            raise RuntimeError("commit_store")
        self._end(request)

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        request = self._request(keys)
        if not self._found(request):
            raise KeyError(keys)
        slots = self._transfer.prepare_retrieve(request, self._instance)
        if not slots or len(slots) != len(keys):
            raise RuntimeError(f"prepare_retrieve gave {slots and len(slots)} slots")
        for slot, target in zip(slots, targets, strict=True):
            self._torch.from_numpy(target).copy_(slot.view(-1))
        self._transfer.commit_retrieve(request, self._instance)
        self._end(request)

    def exists(self, keys: Sequence[str]) -> bool:
        request = self._request(keys)
        found = self._found(request)
        self._server.free_lookup_locks(request.no_worker_id_version(), 1).result(
            timeout=REPLY_S_MAX
        )
        self._end(request)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        if self._rank == 0:
            self._server.clear(True).result(timeout=REPLY_S_MAX)

    def close(self) -> None:
        os._exit(0)  # Its threads would keep the process.

    def _request(self, keys: Sequence[str]) -> Any:  # noqa: ANN401
        self._requests += 1
        tokens = tuple(token for key in keys for token in _tokens(key))
        return self._types.IPCCacheServerKey(
            model_name=self._model,
            world_size=1,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=f"{self._rank}-{self._requests}",
            num_kv_readers=1,
        )

    def _found(self, request: Any) -> bool:  # noqa: ANN401
        self._server.lookup(request.no_worker_id_version(), 1).result(timeout=REPLY_S_MAX)
        waiting = self._server.wait_prefetch_status(request.request_id, 10.0)
        return bool(waiting.result(timeout=REPLY_S_MAX))

    def _end(self, request: Any) -> None:  # noqa: ANN401
        self._server.end_session(request.request_id).result(timeout=REPLY_S_MAX)


def _tokens(key: str) -> tuple[int, ...]:
    """Return the 16 tokens that stand for a key."""
    mixed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return (
        *((mixed >> (3 * shift)) & 0x3FFFFFFF for shift in range(CHUNK_TOKENS - 1)),
        mixed & 0xFFFF,
    )


if __name__ == "__main__":
    main([LmCache])
