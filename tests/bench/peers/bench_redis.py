"""Redis over a Unix socket, with redis-py and its C parser; nothing is persisted.

`get` returns bytes; `get_into` copies them once more. A batch is one pipeline.
"""

import shutil
import subprocess
from collections.abc import Sequence
from typing import cast

import numpy as np
import redis

from tests.bench.peers.harness import main
from tests.bench.peers.peer import Buffer, Context, Peer, Servers

SERVER = "redis-server"


class Redis(Peer):
    """One server with its default threads."""

    name = "redis"
    ops = ("put", "get_into", "get", "exists")
    batches = (1, 16)

    def start(self) -> Context:
        if shutil.which(SERVER) is None:
            raise FileNotFoundError(f"{SERVER} is not installed")
        self._servers = Servers("redis")
        path = str(self._servers.folder / "redis.sock")
        self._servers.run(
            SERVER, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no",
            "--maxmemory", "3gb", "--dir", str(self._servers.folder),
        )  # fmt: skip
        self._servers.wait_for(path)
        return {"socket": path}

    def stop(self) -> None:
        self._servers.stop()

    def version(self) -> str:
        return subprocess.check_output([SERVER, "--version"], text=True).split()[2]

    def connect(self, context: Context, rank: int) -> None:
        self._redis = redis.Redis(unix_socket_path=context["socket"])
        self._redis.ping()

    def put(self, keys: Sequence[str], sources: Sequence[Buffer]) -> None:
        if len(keys) == 1:
            self._redis.set(keys[0], sources[0].data)
            return
        with self._redis.pipeline(transaction=False) as pipeline:
            for key, source in zip(keys, sources, strict=True):
                pipeline.set(key, source.data)
            pipeline.execute()

    def get(self, keys: Sequence[str]) -> Sequence[bytes]:
        one = len(keys) == 1
        found = [self._redis.get(keys[0])] if one else self._redis.mget(keys)
        if None in found:
            raise KeyError(keys)
        return cast("list[bytes]", found)

    def get_into(self, keys: Sequence[str], targets: Sequence[Buffer]) -> None:
        for found, target in zip(self.get(keys), targets, strict=True):
            np.copyto(target, np.frombuffer(found, dtype=np.uint8))

    def exists(self, keys: Sequence[str]) -> bool:
        return self._redis.exists(*keys) == len(keys)

    def delete(self, keys: Sequence[str]) -> None:
        self._redis.delete(*keys)


if __name__ == "__main__":
    main([Redis])
