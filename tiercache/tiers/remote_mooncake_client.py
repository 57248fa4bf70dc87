"""Mooncake's own client: how it is loaded, set up, and kept from holding the interpreter."""

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from tiercache.errors import ConfigError

TRIAL_S_MAX = 20.0
_TRIAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()  # Its end takes seconds, and there is none here.
os._exit(store.setup(json.load(sys.stdin)) != 0)
"""

KEPT: list["Native"] = []
"""Every client that was set up. Mooncake ends one with the interpreter held: for a second, or for
thirty where masters are elected. So it ends with the process; the master forgets it by itself."""

KEPT_MAX = 64


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How to reach a Mooncake Store.

    `master` is "host:port", or "etcd://..." for one that is elected. `host` is this node's address as
    the others reach it. `protocol` is "tcp" or "rdma", `devices` names the cards of the latter.
    `replicas` is how many store processes keep each object. Calls of the master end after `rpc_s_max`,
    moves that make no progress after `transfer_s_max`: that bounds how long a late call keeps its
    memory. At most `threads` calls are under way.
    """

    master: str
    host: str = "127.0.0.1"
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    replicas: int = 1
    buffer_bytes: int = 16 << 20
    rpc_s_max: float = 2.0
    transfer_s_max: float = 5.0
    threads: int = 4


class Native(Protocol):
    """What is used of Mooncake's own client, which has no types. Negative numbers are its errors."""

    def setup(self, config: dict[str, str]) -> int:
        """Connect; 0 when it did. Holds the interpreter."""
        ...

    def register_buffer(self, address: int, nbytes: int) -> int:
        """Let memory be moved to and from; 0 when that is done. Takes long where it pins pages."""
        ...

    def unregister_buffer(self, address: int) -> int:
        """Take that back."""
        ...

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        """Return 1 for each key there is something for, 0 for others."""
        ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], config: object
    ) -> list[int]:
        """Store each object from its pieces; 0 when that is done, or when the key was taken."""
        ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Fill the pieces of each object; return its size. Their sizes must add up to it."""
        ...

    def get_into_ranges(
        self, addresses: list[int], keys: list[list[str]], to: list[list[list[int]]],
        at: list[list[list[int]]], sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:  # fmt: skip
        """Fill ranges: by buffer, by key, by range; offsets in the buffer, then in the object."""
        ...

    def get_size(self, key: str) -> int:
        """Return the size of an object."""
        ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:  # noqa: FBT001
        """Remove objects, leased ones too by `force`."""
        ...

    def remove_by_regex(self, pattern: str, force: bool) -> int:  # noqa: FBT001
        """Remove the objects whose keys match; return how many."""
        ...


def config_of(settings: MooncakeSettings) -> dict[str, str]:
    """Return what `setup` takes."""
    return {
        "local_hostname": settings.host,
        "metadata_server": settings.metadata,
        "global_segment_size": "0",
        "local_buffer_size": str(settings.buffer_bytes),
        "protocol": settings.protocol,
        "rdma_devices": settings.devices,
        "master_server_addr": settings.master,
    }


def answers(config: dict[str, str]) -> bool:
    """Return whether a client could connect, as seen by a process that does nothing else.

    Mooncake's `setup` holds the interpreter for seconds when the master is dead or frozen. Here it is
    called only when that has just gone well elsewhere.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL],
            input=json.dumps(config).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TRIAL_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def load(settings: MooncakeSettings) -> ModuleType:
    """Return Mooncake's module. Its native code reads the environment when it is loaded."""
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", round(1000 * settings.rpc_s_max)),
        ("MC_RPC_CONNECT_TIMEOUT_MS", round(1000 * settings.rpc_s_max)),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", math.ceil(settings.transfer_s_max)),
        ("MC_TCP_STATUS_TIMEOUT_SEC", math.ceil(settings.transfer_s_max)),
        ("MC_STORE_CLIENT_SETUP_RETRIES", 1),
        ("MC_LOG_LEVEL", "ERROR"),
        ("GLOG_minloglevel", 2),
    ):
        os.putenv(name, str(value))
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigError(
            f"Mooncake's client cannot be loaded: {error}; install the extra `mooncake` and the "
            f"system's libibverbs1 and libnuma1"
        ) from error
