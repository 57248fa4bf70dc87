"""SGLang's own prefix tree and cache controller, without a server: write, drop, restore, compare.

A `Tree` is one engine rank: pools of a small model on the CPU, host pools, the tree and the controller with
their threads. What it computes is random but follows from a seed, so that another process knows it too.
"""

import contextlib
import json
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from tests.engines.sglang.shapes import STATE_LAYERS, Shape, kv_pool, request_pool
from tests.engines.sglang.stand_ins import cpu_plugin

WAIT_S = 60.0
LOOK_S = 0.005
PATIENT_S = 4.0
"""How long a call may take where slowness is not what is tested: machines may be busy."""


@dataclass(frozen=True)
class Rank:
    """Which rank, and where its node is. `table` is the backend's own settings beyond the socket, `server`
    SGLang's own arguments."""

    socket: str
    rank: int = 0
    ranks: int = 1
    table: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)

    def extra_config(self, shape: Shape) -> str:
        """Return what is passed as `--hicache-storage-backend-extra-config`."""
        table = {
            "socket": self.socket,
            "weights": "seeded",
            "tokenizer": "none",
            "deadline_s": PATIENT_S,
            **self.table,
        }
        config = {
            "backend_name": "tiercache",
            "module_path": "tiercache_sglang.backend",
            "class_name": "TierCacheStorage",
            "interface_v1": 1,
            "hicache_storage_pass_prefix_keys": True,
            "prefetch_threshold": shape.page,
            "tiercache": table,
            **self.extra,
        }
        return json.dumps(config)


@dataclass
class Restored:
    """What one prefetch brought. `kv`, `state` say whether they are what was computed, bit by bit."""

    from_storage: int
    device: int
    host: int
    kv: bool
    state: bool | None


def tokens_of(seed: int, count: int) -> "array[int]":
    """Return a prompt; those of one seed are prefixes of one another."""
    source = torch.Generator().manual_seed(seed)
    return array("q", torch.randint(2, 30_000, (4096,), generator=source)[:count].tolist())


def wait_until(holds: Callable[[], object], what: str, wait_s: float = WAIT_S) -> None:
    """Return once `holds()`; AssertionError when it does not in time."""
    until = time.monotonic() + wait_s
    rest = threading.Event()
    while not holds():
        assert time.monotonic() < until, f"not in time: {what}"
        rest.wait(LOOK_S)


class Tree:
    """One rank's tree, attached to a node."""

    def __init__(self, shape: Shape, rank: Rank, group: Any = None) -> None:
        cpu_plugin.register()
        self.shape = shape
        self.rank = rank
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(get_parallel().override(tp_rank=rank.rank, pp_rank=0))
        set_global_server_args_for_scheduler(self._arguments(storage=False))
        self.requests = request_pool(shape)
        self.pool = kv_pool(shape, self.requests)
        self.allocator = TokenToKVPoolAllocator(
            size=512, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        components = (ComponentType.FULL, *((ComponentType.MAMBA,) if shape.hybrid else ()))
        self.params = CacheInitParams(
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=shape.page,
            disable=False,
            tree_components=components,
            enable_mamba_extra_buffer=shape.hybrid,
            eviction_policy="lru",
            tp_cache_group=group,
        )
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(shape.core):
            self.cache: Any = UnifiedRadixCache(params=self.params)
        arguments = self._arguments(storage=True)
        set_global_server_args_for_scheduler(arguments)
        self.cache.init_hicache(arguments, self.params)
        self.cache.write_through_threshold = 1
        self.cache.load_back_threshold = 0
        self.controller.prefetch_capacity_limit = 1 << 20
        self._number = 0

    @property
    def controller(self) -> Any:
        """SGLang's controller."""
        return self.cache.cache_controller

    @property
    def backend(self) -> Any:
        """Our backend, or what SGLang wrapped it with."""
        return self.controller.storage_backend

    @property
    def full(self) -> Any:
        """The pool of the attention layers."""
        return self.pool.full_kv_pool if self.shape.hybrid else self.pool

    def close(self) -> None:
        """Detach, and undo what was set for the whole process."""
        self.cache.shutdown()
        self._stack.close()

    # --- what an engine would do

    def compute(self, seed: int, count: int) -> None:
        """ "Compute" a prompt of `count` tokens and insert it, with its state at the end."""
        tokens = tokens_of(seed, count)
        value = self.allocator.alloc(count)
        for layer, (at, buffer) in enumerate(self._kv_buffers()):
            wanted = self._kv_of(seed, layer, count, buffer)
            buffer[value] = wanted
            del at
        params = InsertParams(key=RadixKey(tokens), value=value)
        if self.shape.hybrid:
            slot = self._request().kv.mamba_pool_idx.unsqueeze(0)
            for number, (layer, buffer) in enumerate(self._state_buffers()):
                buffer[layer, slot] = self._state_of(seed, number, count, buffer[layer, slot])
            params.mamba_value = slot
        self.cache.insert(params)

    def settle(self) -> None:
        """Wait until all that is to be saved has been handed to the backend."""
        self.cache.flush_pending_backups()

        def done() -> bool:
            self.cache.check_hicache_events()
            pending = self.cache.ongoing_backup or self.cache.ongoing_write_through
            pipeline = self.cache.buffer_pipeline
            if pipeline is not None:  # Writes states when it is told, after the KV.
                self.cache.flush_pending_backups()
                pending = pending or not pipeline.is_idle()
            return not pending and self.controller.backup_queue.empty()

        wait_until(done, "backups")

    def forget(self) -> None:
        """Drop everything but what is in the node."""
        self.cache.reset()
        self.requests.clear()
        self.allocator.clear()
        for _, buffer in self._kv_buffers():
            buffer.zero_()
        for layer, buffer in self._state_buffers():
            buffer[layer].zero_()

    def prefetch(self, seed: int, count: int, *, beyond: int = 0, **scope: str) -> int:
        """Ask for a prompt's state from storage; return how many tokens came. `beyond`: how many tokens
        the tree has itself. `scope`: SGLang's `cache_salt`, or the `extra_key` that an adapter has."""
        self._number += 1
        handle = CacheRequestHandle(f"request-{self._number}", 0)
        node = self.cache.root_node_handle()
        tokens = tokens_of(seed, count)
        if beyond:
            match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
            assert match.device_prefix_len == beyond
            node = match.last_host_node
            if self.cache.is_root(node):  # Without a host cache; as SGLang's scheduler does.
                node = match.last_device_node
        self.cache.prefetch_from_storage(
            handle,
            node,
            tokens[beyond:],
            self.cache.get_last_hash_value(node),
            self.cache.get_prefix_hash_values(node),
            matched_prefix_tokens=tokens[:beyond],
            **scope,
        )

        def done() -> bool:
            self.cache.check_hicache_events()
            return bool(self.cache.check_prefetch_progress(handle))

        wait_until(done, f"prefetch of {count} tokens")
        return int(self.cache.pop_prefetch_loaded_tokens(handle))

    def stops(self, seed: int, count: int) -> list[int] | None:
        """Return what the backend says can be restored of a prompt, in pages."""
        keys = get_storage_hash_str(tokens_of(seed, count), None, page_size=self.shape.page)
        trailing = PoolTransfer(
            PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        transfers = [trailing] if self.shape.hybrid else []
        found: list[int] | None = self.backend.batch_exists_v2(
            keys, transfers
        ).restorable_prefix_pages
        return found

    def restore(self, seed: int, count: int, *, beyond: int = 0) -> Restored:
        """Prefetch a prompt, `beyond` what the tree has itself, and bring it to the device; compare with
        what was computed."""
        came = self.prefetch(seed, count, beyond=beyond)
        request = self.last_request = self._request()
        key = RadixKey(tokens_of(seed, count))
        match = self.cache.match_prefix(
            MatchPrefixParams(key=key, req=request, cow_mamba=self.shape.hybrid)
        )
        request.prefix_len = match.device_prefix_len
        request.last_node = match.last_device_node
        request.last_host_node = match.last_host_node
        request.best_match_node = match.best_match_node
        request.host_hit_length = match.host_hit_length
        request.swa_host_hit_length = match.swa_host_hit_length
        request.mamba_host_hit_length = match.mamba_host_hit_length
        host = int(match.host_hit_length)
        if host:
            self.cache.init_load_back(
                InitLoadBackParams(
                    best_match_node=match.best_match_node, host_hit_length=host, req=request
                )
            )
            self.cache.ready_to_load_host_cache()
            self.cache.loading_check()
        after = self.cache.match_prefix(MatchPrefixParams(key=key))
        device = int(after.device_prefix_len)
        kv = state = True
        if device:
            rows = self.cache.path_device_indices(after.last_device_node)
            for layer, (_, buffer) in enumerate(self._kv_buffers()):
                kv = kv and torch.equal(buffer[rows], self._kv_of(seed, layer, device, buffer))
            if self.shape.hybrid:
                slot = request.kv.mamba_pool_idx.unsqueeze(0)
                for number, (layer, buffer) in enumerate(self._state_buffers()):
                    there = buffer[layer, slot]
                    state = state and torch.equal(
                        there, self._state_of(seed, number, device, there)
                    )
        return Restored(came, device, host, kv, state if self.shape.hybrid else None)

    # --- its parts

    def _arguments(self, *, storage: bool) -> Any:
        shape = self.shape
        named: dict[str, Any] = {}
        if storage:
            named = {
                "hicache_io_backend": "direct" if "direct" in shape.order else "kernel",
                "hicache_mem_layout": shape.order,
                "hicache_write_policy": shape.write,
                "hicache_storage_backend": "dynamic",
                "hicache_storage_backend_extra_config": self.rank.extra_config(shape),
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_host_memory_mode": shape.memory,
                "served_model_name": "tiny",
            }
        arguments = ServerArgs(
            model_path="dummy",
            page_size=shape.page,
            tp_size=self.rank.ranks,
            **named,
            **self.rank.server,
        )
        arguments._mamba_cache_chunk_size = 64
        return arguments

    def _request(self) -> Any:
        self._number += 1
        request = Req(
            rid=str(self._number),
            origin_input_text="",
            origin_input_ids=array("q"),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        self.requests.alloc([request])
        return request

    def _kv_buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        full = self.full
        buffers = [full.kv_buffer] if self.shape.latent else [full.k_buffer, full.v_buffer]
        for of_kind in buffers:
            yield from enumerate(of_kind)

    def _state_buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        if not self.shape.hybrid:
            return
        cache = self.requests.mamba_pool.mamba_cache
        for layer in range(len(STATE_LAYERS)):
            yield from ((layer, buffer) for buffer in (cache.temporal, *cache.conv))

    def _kv_of(self, seed: int, layer: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return the KV of a prompt's first `count` tokens: the same in every process."""
        source = torch.Generator().manual_seed(1000 * seed + layer)
        if not self.shape.latent:
            source.manual_seed(1000 * seed + layer + 100_000 * (1 + self.rank.rank))
        wide = torch.randn(512, *like.shape[1:], generator=source)
        return wide[:count].to(like.dtype)

    def _state_of(self, seed: int, number: int, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return the state at `count` tokens: another one on every rank."""
        source = torch.Generator().manual_seed(
            7_000_000 + 100_000 * self.rank.rank + 10_000 * number + 512 * seed + count
        )
        return torch.randn(like.shape, generator=source).to(like.dtype)


def restored_in(path: Path) -> dict[str, Restored]:
    """Return what a child process wrote with `report`."""
    return {name: Restored(**each) for name, each in json.loads(path.read_text()).items()}


def report(path: Path, found: dict[str, Restored]) -> None:
    """Write results for the process that waits for this one."""
    path.write_text(json.dumps({name: asdict(each) for name, each in found.items()}))
