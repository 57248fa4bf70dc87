"""Mooncake Store on one node, in its own sidecar mode: master, store process, dummy clients.

A client is a "dummy": control by RPC, bytes through shared memory of the store process. Buffers
come from the client's registered pool, as Mooncake asks for it. A batch is one call.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from tests.bench.peers.harness import main
from tests.bench.peers.peer import MIB, Buffer, Context, Peer, Servers, free_port

BIN = os.path.dirname(sys.executable)
HOST = "127.0.0.1"
POOL_BYTES = 160 * MIB
LOCAL_BUFFER_BYTES = 64 * MIB


class Mooncake(Peer):
    """Every client is a dummy client of one store process."""

    name = "mooncake"
    batches = (1, 16)
    objects_max = 1000

    def start(self) -> Context:
        self._servers = Servers("mooncake")
        rpc, metadata, metrics, client = (free_port() for _ in range(4))
        self._servers.run(
            f"{BIN}/mooncake_master", "--rpc_address", HOST, "--rpc_port", str(rpc),
            "--enable_http_metadata_server=true", "--http_metadata_server_host", HOST,
            "--http_metadata_server_port", str(metadata), "--metrics_host", HOST,
            "--metrics_port", str(metrics),
        )  # fmt: skip
        self._servers.wait_for(rpc)
        self._servers.wait_for(metadata)
        self._servers.run(
            f"{BIN}/mooncake_client", "--host", HOST, "--port", str(client),
            "--global_segment_size", "3 GB", "--local_buffer_size", "512MB",
            "--master_server_address", f"{HOST}:{rpc}",
            "--metadata_server", f"http://{HOST}:{metadata}/metadata",
            "--protocol", "tcp", "--threads", "2",
        )  # fmt: skip
        self._servers.wait_for(client)
        return {"client": f"{HOST}:{client}"}

    def stop(self) -> None:
        self._servers.stop()

    def version(self) -> str:
        return version("mooncake-transfer-engine-non-cuda")

    def connect(self, context: Context, rank: int) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        # Without stubs, and only in this peer's own environment.
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        refused = self._store.setup_dummy(POOL_BYTES, LOCAL_BUFFER_BYTES, context["client"])
        if refused:
            raise RuntimeError(f"setup_dummy: {refused}")

    def allocate(self, nbytes: int) -> Buffer:
        address = self._store.alloc_from_mem_pool(nbytes)
        if not address or self._store.register_buffer(address, nbytes):
            raise MemoryError(f"{nbytes} bytes of the client's pool")
        memory = memoryview((ctypes.c_uint8 * nbytes).from_address(address))
        buffer = np.frombuffer(memory, dtype=np.uint8)
        buffer[:] = 0
        return buffer

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        if len(keys) == 1:
            failed = [self._store.put_from(keys[0], sources[0].ctypes.data, sources[0].nbytes)]
        else:
            failed = self._store.batch_put_from(list(keys), *_places(sources))
        if any(failed):
            raise RuntimeError(f"put: {failed}")

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        addresses, sizes = _places(targets)
        if len(keys) == 1:
            got = [self._store.get_into(keys[0], addresses[0], sizes[0])]
        else:
            got = self._store.batch_get_into(list(keys), addresses, sizes)
        if list(got) != sizes:
            raise RuntimeError(f"get_into: {got}")

    def exists(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1:
            return bool(self._store.is_exist(keys[0]) == 1)
        return all(found == 1 for found in self._store.batch_is_exist(list(keys)))

    def delete(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys), True)

    def close(self) -> None:
        self._store.close()


def _places(buffers: Sequence[Buffer]) -> tuple[list[int], list[int]]:
    return [each.ctypes.data for each in buffers], [each.nbytes for each in buffers]


if __name__ == "__main__":
    main([Mooncake])
