"""A worker as vLLM sees it: the tensors it registers, and the facts that its scheduler needs of them."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from tiercache.client import Options
from tiercache.errors import LayoutError
from tiercache_vllm.facts import groups_of
from tiercache_vllm.geometry import Geometry, geometry_of
from tiercache_vllm.naming import backends_of, engine_name
from tiercache_vllm.settings import Settings, Work
from tiercache_vllm.working import Report, Results, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Described:
    """What one rank has. `geometry` is None where it must run uncached, and `why` says so."""

    rank: int
    geometry: Geometry | None
    facts: tuple[str, ...] = ()
    why: str = ""


class WorkerSide:
    """One rank."""

    def __init__(
        self, vllm_config: "VllmConfig", settings: Settings, kv_cache_config: "KVCacheConfig"
    ) -> None:
        self._config = vllm_config
        self._settings = settings
        self._caches = kv_cache_config
        self._worker: Worker | None = None
        self._described = Described(0, None, why="no caches were registered")

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the engine's tensors. What is not understood is not cached, and said once."""
        self.close()
        rank = get_tensor_model_parallel_rank()
        parallel = self._config.parallel_config
        try:
            if parallel.pipeline_parallel_size > 1:
                raise LayoutError("pipeline parallelism is not supported; run uncached")
            groups = groups_of(self._caches, tensors, self._config)
            geometry = geometry_of(groups, parallel.tensor_parallel_size)
            options = Options(
                ranks=parallel.tensor_parallel_size,
                rank=rank,
                write=True,
                name=engine_name(self._config),
                deadline_s=self._settings.deadline_s,
                retry_s=self._settings.retry_s,
            )
            blocks = self._caches.num_blocks
            self._worker = Worker(self._settings, geometry, tensors, blocks, options)
            self._described = Described(rank, geometry, backends_of(self._config, tensors))
        except LayoutError as fault:
            _log.error("tiercache: this model is not cached: %s", fault)
            self._described = Described(rank, None, why=str(fault))

    def described(self) -> Described:
        """Return what this rank has."""
        return self._described

    def begin(self, work: Work) -> None:
        """See `Worker`."""
        if self._worker is not None:
            self._worker.begin(work)

    def save(self, work: Work) -> None:
        """See `Worker`."""
        if self._worker is not None and work.saves:
            self._worker.save(work)

    def results(self, *, idle: bool) -> Results:
        """See `Worker`."""
        if self._worker is None:
            return Results(frozenset(), frozenset())
        return self._worker.results(idle=idle)

    def forget(self, requests: set[str]) -> None:
        """See `Worker`."""
        if self._worker is not None:
            self._worker.forget(requests)

    def report(self) -> Report | None:
        """See `Worker`."""
        return self._worker.report() if self._worker is not None else None

    def sleep(self) -> None:
        """See `Worker`."""
        if self._worker is not None:
            self._worker.sleep()

    def wake(self) -> None:
        """See `Worker`."""
        if self._worker is not None:
            self._worker.wake()

    def close(self) -> None:
        """See `Worker`."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
