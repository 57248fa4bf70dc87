"""The storage backend that SGLang loads: `--hicache-storage-backend dynamic`.

    {"backend_name": "tiercache", "module_path": "tiercache_sglang.backend",
     "class_name": "TierCacheStorage", "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
     "tiercache": {"socket": "/run/tiercache/tiercache.sock"}}

SGLang writes a state before its KV and reads KV before the state; which of them make a boundary is decided
by the node, and told as `restorable_prefix_pages`. An attach fails loudly where the pools cannot be kept;
after it nothing raises: a fault is a miss, counted and logged once in a while.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from tiercache.errors import LayoutError, UnavailableError
from tiercache_sglang.attaching import attach, weights_version
from tiercache_sglang.figures import Figures
from tiercache_sglang.pools import KV_POOL, STATE_POOL, SUPPORTED, Pages, Slots
from tiercache_sglang.restorable import EVERY_PAGE, NO_HITS, Hits
from tiercache_sglang.settings import parse
from tiercache_sglang.store import Store

_log = logging.getLogger(__name__)
T = TypeVar("T")

LOG_S: Final = 60.0
"""The same kind of fault is logged at most this often."""


class TierCacheStorage(HiCacheStorage):
    """One rank's backend. SGLang calls it from its prefetch, I/O, backup and scheduler threads."""

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: dict[str, object] | None = None
    ) -> None:
        """Raises ConfigError for settings that are wrong. Nothing is connected yet."""
        self.figures = Figures()
        self.registered_pools: dict[str, Any] = {}
        self.mem_pool_host: Any = None
        self._config = storage_config
        self._settings = parse(storage_config.extra_config)
        self._attached: Store | None = None
        self._weights = ""
        self._pages: Pages | None = None
        self._slots: Slots | None = None
        self._logged: dict[str, float] = {}

    # --- attach and detach

    def on_host_pools_registered(self) -> None:
        """All pools are known: attach to the node.

        Raises LayoutError or ConfigError, with the reason, when they cannot be kept, and what the node says
        when it refuses them. A node that is away is no reason, unless `required` is set.
        """
        names = [str(name) for name in self.registered_pools]
        unknown = [name for name in names if name not in SUPPORTED]
        if unknown:
            raise LayoutError(f"pools {unknown} are not supported, only {list(SUPPORTED)}")
        states = self.registered_pools.get(PoolName.MAMBA)
        self._pages = Pages(self.mem_pool_host)
        self._slots = None if states is None else Slots(states)
        self._weights = weights_version()
        self._attached = attach(
            self._settings, self._config, self.mem_pool_host, states, self.figures
        )

    def close(self) -> None:
        """Detach. Idempotent."""
        store, self._attached = self._attached, None
        if store is not None:
            store.close()

    @property
    def _store(self) -> Store | None:
        """What is attached, unless the engine runs other weights by now: their state is not this one."""
        if self._attached is not None and weights_version() != self._weights:
            self.figures.add("other_weights")
            self._warn(
                "other_weights",
                f"the weights are {weights_version()!r} now, not {self._weights!r}: nothing is served or "
                "saved until the backend is detached and attached again",
            )
            return None
        return self._attached

    # --- look-ups

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return every prefix of `keys` that can be restored on this rank, and keep what they need."""
        look_up = partial(self._look_up, keys, pool_transfers or (), extra_info)
        hits = self._guarded("exists", NO_HITS, look_up)
        if hits is NO_HITS:  # Nothing is known: SGLang is to believe what it believed.
            return PoolTransferResult(0, {}, [])
        pools = {PoolName.KV: hits.kv} | {
            PoolName(name): pages for name, pages in hits.pools.items()
        }
        return PoolTransferResult(hits.longest, pools, hits.prefixes)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading pages of `keys` are held, and keep them."""
        look_up = partial(self._look_up, keys, (), extra_info)
        return self._guarded("exists", NO_HITS, look_up).longest

    def exists(self, key: str) -> bool:
        """Return whether one page is held."""
        return self.batch_exists([key]) == 1

    def _look_up(
        self,
        keys: list[str],
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> Hits:
        store = self._store
        if store is None:
            return NO_HITS
        known = store.state_parts if self._slots is not None else ()
        pools, windows = _wanted_of(transfers, known)
        before: list[str] | None = None if extra_info is None else extra_info.prefix_keys
        return store.look_up(keys, pools, windows, before or ())

    # --- pages of KV

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read KV pages into host memory; say of each whether it is there."""
        return self._guarded("get", [False] * len(keys), lambda: self._get(keys, host_indices))

    def _get(self, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        store = self._store
        if store is None or self._pages is None:
            return [False] * len(keys)
        return store.read_pages(keys, self._pages.at(host_indices, len(keys)))

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Save KV pages from host memory; all or none count as stored."""
        done = self._guarded("set", False, lambda: self._set(keys, host_indices, extra_info))
        return [done] * len(keys)

    def _set(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> bool:
        store, before = self._store, self._before(extra_info)
        if store is None or self._pages is None or before is None:
            return False
        return store.save_pages(before, keys, self._pages.at(host_indices, len(keys)))

    # --- states

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Read what each transfer names into host memory."""
        return {
            transfer.name: self._guarded(
                "get", [False] * len(transfer.keys or ()), partial(self._get_one, transfer)
            )
            for transfer in transfers
        }

    def _get_one(self, transfer: PoolTransfer) -> list[bool]:
        keys = transfer.keys or []
        if transfer.name == PoolName.KV:
            return self._get(keys, transfer.host_indices)
        store = self._store
        if transfer.name != PoolName.MAMBA or store is None or self._slots is None:
            return [False] * len(keys)
        return store.read_states(keys, self._slots.at(transfer.host_indices, len(keys)))

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Save what each transfer names. A first state is never refused: SGLang offers it once."""
        done: dict[str, list[bool]] = {}
        for transfer in transfers:
            saved = self._guarded(
                "set",
                False,
                partial(self._set_one, transfer, extra_info),
            )
            done[transfer.name] = [saved] * len(transfer.keys or ())
        return done

    def _set_one(self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None) -> bool:
        keys = transfer.keys or []
        if transfer.name == PoolName.KV:
            return self._set(keys, transfer.host_indices, extra_info)
        store, before = self._store, self._before(extra_info)
        if before is None or store is None:
            return False
        if transfer.name != PoolName.MAMBA or self._slots is None:
            return False
        return store.save_states(before, keys, self._slots.at(transfer.host_indices, len(keys)))

    # --- the first interface, which SGLang does not use beside `interface_v1`

    def get(
        self, key: str, target_location: object | None = None, target_sizes: object | None = None
    ) -> torch.Tensor | None:
        """Return None: without `interface_v1` nothing is served."""
        return None

    def batch_get(
        self,
        keys: list[str],
        target_locations: object | None = None,
        target_sizes: object | None = None,
    ) -> list[torch.Tensor | None]:
        """Return None for each."""
        return [None] * len(keys)

    def set(
        self,
        key: str,
        value: object | None = None,
        target_location: object | None = None,
        target_sizes: object | None = None,
    ) -> bool:
        """Return False: without its place in the sequence a page is not saved."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: object | None = None,
        target_locations: object | None = None,
        target_sizes: object | None = None,
    ) -> bool:
        """Return False."""
        return False

    # --- operation

    def clear(self) -> None:
        """Drop everything of this model from all tiers of the node, whoever saved it.

        Raises UnavailableError when the node did not do so; SGLang logs it, and then does not count on an
        empty storage.
        """
        if self._attached is None:
            return
        cleared = self._attached.clear()
        why = cleared.reason or (cleared.failed and f"the {cleared.failed} tier failed")
        if why:
            raise UnavailableError(f"the node was not cleared: {why}")
        _log.info(
            "tiercache: cleared %d objects; %d more go when they are let go of",
            cleared.objects,
            cleared.busy,
        )

    def get_stats(self) -> StorageMetrics:
        """Return pages and bandwidth (GB/s) of the transfers since the last call."""
        got, saved = self.figures.take("get"), self.figures.take("set")
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in got],
            backup_pgs=[each.pages for each in saved],
            prefetch_bandwidth=[each.gb_per_s for each in got],
            backup_bandwidth=[each.gb_per_s for each in saved],
        )

    # --- small things

    def _before(self, extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
        """Return the pages that come before the first one of a call; None when SGLang does not say."""
        before: list[str] | None = None if extra_info is None else extra_info.prefix_keys
        if before is None:
            self.figures.add("no_position")
            self._warn(
                "no_position",
                'nothing is saved: set "hicache_storage_pass_prefix_keys": true in '
                "--hicache-storage-backend-extra-config",
            )
            return None
        return before

    def _guarded(self, call: str, otherwise: T, act: Callable[[], T]) -> T:
        """Act; on any fault of ours count it, log it and go on as if it was a miss."""
        try:
            return act()
        except Exception:  # noqa: BLE001
            # The engine's thread: a bug of the cache must not end a request.
            self.figures.add(f"errors:{call}")
            if self._is_due(call):
                _log.exception("tiercache: %s failed; serving without", call)
            return otherwise

    def _warn(self, kind: str, text: str) -> None:
        if self._is_due(kind):
            _log.warning("tiercache: %s", text)

    def _is_due(self, kind: str) -> bool:
        now = monotonic()
        if now - self._logged.get(kind, -LOG_S) < LOG_S:
            return False
        self._logged[kind] = now
        return True


def _wanted_of(
    transfers: Sequence[PoolTransfer], state_parts: Sequence[str]
) -> tuple[dict[str, Sequence[str]], dict[str, int | None]]:
    """Return the parts of each further pool of a look-up, and how many trailing pages it needs.

    Raises LayoutError for a pool that was not attached, and for a policy that is not known.
    """
    pools: dict[str, Sequence[str]] = {}
    windows: dict[str, int | None] = {}
    for transfer in transfers:
        name = str(transfer.name)
        if name == KV_POOL:
            continue
        if name != STATE_POOL or not state_parts:
            raise LayoutError(f"pool {name!r} is not one that was attached")
        pools[name] = state_parts
        match transfer.hit_policy:
            case PoolHitPolicy.TRAILING_PAGES:
                windows[name] = max(1, len(transfer.keys or ()))
            case PoolHitPolicy.ALL_PAGES:
                windows[name] = EVERY_PAGE
            case other:
                raise LayoutError(f"hit policy {other} of pool {name!r} is not known")
    return pools, windows
