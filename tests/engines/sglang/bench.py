"""Beside SGLang's own `file` backend: pages per second and processor time per page, through SGLang's calls.

    tests/engines/run sglang --co -q   # Makes the environment.
    PYTHONPATH=.:adapters/sglang:tests/engines/sglang/stand_ins SGLANG_USE_CPU_ENGINE=1 \\
        $(tests/engines/environment sglang) -m tests.engines.sglang.bench [--folder DIR ...]

All backends get the same host pool, the same pages and the same batches of 128, and take turns, in one
process on one machine. Processor time is that of this process and, for a node, of the node's. The
node's memory has been used before, as it has in an engine that runs for more than minutes. A folder of
`file` may be on a disk or in memory (/dev/shm).
"""

import argparse
import gc
import hashlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tiercache.testing.nodes import Launcher, NodeProcess

BATCH = 128
EXISTS_PAGES = 2048
REPEATS = 5
EVERY = 16


@dataclass(frozen=True)
class Result:
    """One figure of one backend."""

    backend: str
    what: str
    pages_per_s: float
    cpu_us_per_page: float
    milliseconds: float


class Backends:
    """A host pool with room for `pages` pages, and backends that are registered with it."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        from tests.engines.sglang.stand_ins import cpu_plugin

        cpu_plugin.register()
        arguments = ServerArgs(model_path="dummy", page_size=64, device="cpu")
        arguments._mamba_cache_chunk_size = 64
        set_global_server_args_for_scheduler(arguments)
        self.layers = max(1, page_bytes // (64 * 576 * 2))
        device = MLATokenToKVPool(
            size=64,
            page_size=64,
            dtype=torch.bfloat16,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            layer_num=self.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        about = device.get_device_pool_infos()[0].buffer_info
        self.pool = MLATokenToKVPoolHost(
            about,
            float(pages + 1),
            0,
            64,
            "page_first",
            pin_memory=False,
            device="cpu",
            device_capacity_tokens=64,
            start_layer=0,
            end_layer=self.layers,
            target_layer_num=self.layers,
        )
        self.pool.kv_buffer.view(torch.uint8).random_(0, 255)
        self.page_bytes = self.layers * 64 * 576 * 2

    def _config(self, extra: dict[str, Any]) -> Any:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

        return HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
            extra_config=extra,
        )

    def file(self, folder: Path) -> Any:
        """Return SGLang's own backend over a folder."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        backend = HiCacheFile(self._config({}), file_path=str(folder))
        backend.register_mem_pool_host(self.pool)
        return backend

    def ours(self, socket: Path) -> Any:
        """Return our backend over a node."""
        from tiercache_sglang.backend import TierCacheStorage

        table = {"socket": str(socket), "weights": "bench", "tokenizer": "none", "deadline_s": 4.0}
        backend = TierCacheStorage(self._config({"interface_v1": 1, "tiercache": table}))
        backend.register_mem_pool_host(self.pool)
        backend.on_host_pools_registered()
        return backend


class Calls:
    """How SGLang's controller sets and gets: in batches, by pages of the host pool."""

    def __init__(self, pool: Any, backend: Any, *, direct: bool) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

        self._pool, self._backend, self._direct = pool, backend, direct
        self._about = HiCacheStorageExtraInfo

    def set(self, keys: list[str]) -> None:
        """Save pages."""
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            if self._direct:
                rows = torch.arange(start * 64, (start + len(batch)) * 64)
                about = self._about(prefix_keys=keys[:start])
                assert all(self._backend.batch_set_v1(batch, rows, about))
            else:
                pages = [self._pool.get_data_page((start + at) * 64) for at in range(len(batch))]
                assert self._backend.batch_set(batch, pages)

    def get(self, keys: list[str]) -> None:
        """Read pages."""
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            if self._direct:
                rows = torch.arange(start * 64, (start + len(batch)) * 64)
                assert all(self._backend.batch_get_v1(batch, rows))
            else:
                empty = [self._pool.get_dummy_flat_data_page() for _ in batch]
                for at, page in enumerate(self._backend.batch_get(batch, empty)):
                    self._pool.set_from_flat_data_page((start + at) * 64, page)

    def clear(self) -> None:
        """Drop everything."""
        self._backend.clear()

    def exists(self, keys: list[str]) -> None:
        """Look one path up, in one call."""
        assert self._backend.batch_exists(keys) == len(keys)


def keys_of(name: str, count: int) -> list[str]:
    """Return page hashes."""
    return [hashlib.sha256(f"{name} {at}".encode()).hexdigest() for at in range(count)]


@contextmanager
def running_node(folder: Path, host_bytes: int) -> Iterator[NodeProcess]:
    """A node with enough memory, without NVMe."""
    launcher = Launcher()
    try:
        # Nothing is written behind: this compares memory with memory, and both with a disk.
        node = NodeProcess(
            launcher,
            folder,
            host={"bytes": host_bytes, "segment_bytes": host_bytes // 4},
            nvme={"path": ""},
            node={"log": "warning"},
        )
        node.start()
        yield node
    finally:
        launcher.close()


class Contestant(NamedTuple):
    """One backend: its name, its calls, and the processor time it has used."""

    name: str
    calls: Calls
    cpu_s: Callable[[], float]


def measure(contestants: list[Contestant], pages: int) -> Iterator[Result]:
    """Yield the figures of all backends, which take turns: medians over repeats, each of new pages."""
    for repeat in range(REPEATS + 1):
        for one in contestants:
            warm = keys_of(f"warm {repeat}", pages)
            one.calls.set(warm)
            one.calls.get(warm)
    for one in contestants:
        one.calls.clear()
    for what in ("set", "get"):
        acts = [keys_of(f"pages {repeat}", pages) for repeat in range(REPEATS)]
        yield from _turns(contestants, what, what, acts)
    for count in dict.fromkeys((BATCH, pages)):
        acts = [keys_of("pages 0", pages)[:count]] * (4 * REPEATS)
        yield from _turns(contestants, f"exists of {count}", "exists", acts)


def _turns(
    contestants: list[Contestant], label: str, call: str, acts: list[list[str]]
) -> Iterator[Result]:
    took: list[list[float]] = [[] for _ in contestants]
    used: list[list[float]] = [[] for _ in contestants]
    for keys in acts:
        for at, (_, calls, cpu_s) in enumerate(contestants):
            gc.collect()
            began, cpu = time.perf_counter(), cpu_s()
            getattr(calls, call)(keys)
            took[at].append(time.perf_counter() - began)
            used[at].append(cpu_s() - cpu)
    for (name, _, _), seconds, cpus in zip(contestants, took, used, strict=True):
        second, count = statistics.median(seconds), len(acts[0])
        # A node's time comes in ticks of 10 ms: the mean of many is the better figure.
        cpu = statistics.mean(cpus) / count * 1e6
        yield Result(name, label, count / second, cpu, second * 1e3)


def hybrid_exists(socket: Path, node_cpu_s: Callable[[], float], folder: Path) -> Iterator[Result]:
    """Yield how long a look-up of many pages takes in one call for a hybrid model, with a state after every
    sixteenth: ours and SGLang's own, which take turns. The pages are small ones."""
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheFile,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )

    from tests.engines.sglang.shapes import Shape
    from tests.engines.sglang.trees import Rank, Tree

    tree = Tree(Shape(), Rank(str(socket)))
    kv = tree.controller.storage_host_pool
    states = tree.backend.registered_pools[PoolName.MAMBA]
    file = HiCacheFile(tree.controller.storage_config, file_path=str(folder))
    file.register_mem_pool_host(kv)
    file.register_mem_host_pool_v2(kv, PoolName.KV)
    file.register_mem_host_pool_v2(states, PoolName.MAMBA)
    keys, policy = keys_of("hybrid", EXISTS_PAGES), PoolHitPolicy.TRAILING_PAGES
    rows, slot = kv.alloc(EVERY * tree.shape.page), states.alloc(1)
    page = kv.get_data_page(int(rows[0]))
    for start in range(0, EXISTS_PAGES, EVERY):
        batch, last = keys[start : start + EVERY], keys[start + EVERY - 1]
        state = PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=[last], hit_policy=policy)
        about = HiCacheStorageExtraInfo(prefix_keys=keys[: start + EVERY - 1])
        for backend in (tree.backend, file):
            assert all(backend.batch_set_v2([state], about)[PoolName.MAMBA])
        assert all(tree.backend.batch_set_v1(batch, rows, HiCacheStorageExtraInfo(keys[:start])))
        assert file.batch_set(batch, [page] * EVERY)
    took: dict[str, list[float]] = {"tiercache": [], "file": []}
    used: dict[str, list[float]] = {"tiercache": [], "file": []}
    trailing = PoolTransfer(PoolName.MAMBA, keys=["__placeholder__"], hit_policy=policy)
    for _ in range(8 * REPEATS):
        for name, backend in (("tiercache", tree.backend), ("file", file)):
            extra = node_cpu_s if name == "tiercache" else float
            began, cpu = time.perf_counter(), time.process_time() + extra()
            found = backend.batch_exists_v2(keys, [trailing])
            took[name].append(time.perf_counter() - began)
            used[name].append(time.process_time() + extra() - cpu)
            assert found.kv_hit_pages == EXISTS_PAGES
        read = PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=keys[-1:], hit_policy=policy)
        tree.backend.batch_get_v2([read])  # What is read is let go of.
    for name, seconds in took.items():
        second, cpu = statistics.median(seconds), statistics.mean(used[name])
        label = f"hybrid exists of {EXISTS_PAGES}"
        per_page = cpu / EXISTS_PAGES * 1e6
        yield Result(name, label, EXISTS_PAGES / second, per_page, second * 1e3)
    tree.close()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page-bytes", type=int, default=1 << 20)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--folder", type=Path, action="append", default=[])
    given = parser.parse_args()
    folders = given.folder or [Path("/dev/shm"), Path(tempfile.gettempdir())]
    backends = Backends(given.pages, given.page_bytes)
    results: list[Result] = []
    with ExitStack() as closing:
        temporary = closing.enter_context(tempfile.TemporaryDirectory())
        host_bytes = int(given.page_bytes * given.pages * (REPEATS + 3)) // (16 << 20) * (16 << 20)
        node = closing.enter_context(running_node(Path(temporary), max(host_bytes, 1 << 30)))
        backend = backends.ours(node.socket)

        def both() -> float:
            return time.process_time() + node.cpu_s()

        calls = Calls(backends.pool, backend, direct=True)
        contestants = [Contestant("tiercache", calls, both)]
        for folder in folders:
            own = Path(tempfile.mkdtemp(dir=folder))
            closing.callback(shutil.rmtree, own)
            calls = Calls(backends.pool, backends.file(own), direct=False)
            contestants.append(Contestant(f"file in {folder}", calls, time.process_time))
        results += measure(contestants, given.pages)
        backend.close()
        own = Path(tempfile.mkdtemp(dir=folders[0]))
        closing.callback(shutil.rmtree, own)
        results += hybrid_exists(node.socket, node.cpu_s, own)
    about = {"page_bytes": backends.page_bytes, "pages": given.pages, "load": os.getloadavg()}
    sys.stdout.write(json.dumps(about) + "\n")
    for one in results:
        sys.stdout.write(
            f"{one.backend:24} {one.what:24} {one.pages_per_s:12.0f} pages/s "
            f"{one.cpu_us_per_page:9.1f} us CPU/page {one.milliseconds:9.2f} ms\n"
        )


if __name__ == "__main__":
    main()
