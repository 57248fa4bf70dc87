"""`TierCacheConnector`: what vLLM loads. Thin glue between its scheduler, its workers and ours.

--kv-transfer-config '{"kv_connector": "TierCacheConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "tiercache_vllm.connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"socket": "/run/tiercache/tiercache.sock"}}'
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tiercache_vllm import logs
from tiercache_vllm.scheduler_side import SchedulerSide
from tiercache_vllm.settings import Work, settings_of
from tiercache_vllm.stats import TierCacheProm, TierCacheStats
from tiercache_vllm.worker_side import Described, WorkerSide
from tiercache_vllm.working import Report

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What one step asks of every worker."""

    work: Work = field(default_factory=Work)
    describe: bool = False


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """What workers tell the scheduler after a step."""

    reports: tuple[Report, ...] = ()
    described: tuple[Described, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        """Return both."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.reports + other.reports, self.described + other.described)


@dataclass
class DescribedMetadata(KVConnectorHandshakeMetadata):
    """What a worker has, told once when an engine starts."""

    described: Described


class TierCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Restores prefixes from a node and saves them to it. A node that is away costs hits, nothing else."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        logs.join()
        settings = settings_of(self._kv_transfer_config.kv_connector_extra_config)
        settings.seats_of(
            vllm_config.parallel_config.tensor_parallel_size, 0
        )  # Wrong ones: say so now.
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, settings, kv_cache_config)
        else:
            self._worker = WorkerSide(vllm_config, settings, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss."""
        return False

    # Scheduler

    def on_new_request(self, request: "Request") -> None:
        """See the base class."""
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class."""
        count = self._scheduling.matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """See the base class."""
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """See the base class."""
        host, disk = self._scheduling.sources(request, num_external_tokens)
        found = {CacheHitSource.HOST: host, CacheHitSource.DISK: disk}
        return {source: count for source, count in found.items() if count}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See the base class."""
        work, describe = self._scheduling.step(scheduler_output)
        return StepMetadata(work, describe)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See the base class."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMetadata):
            self._scheduling.described(meta.described)
            for report in meta.reports:
                self._scheduling.reported(report)
        self._scheduling.ended(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. Nothing is read from the blocks after a step."""
        return False, self._scheduling.finished(request.request_id)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """See the base class."""
        self._scheduling.described(
            tuple(m.described for m in metadata.values() if isinstance(m, DescribedMetadata))
        )

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """See the base class, which would refuse to start: the stages of a pipeline say themselves that
        they must run uncached."""
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    def reset_cache(self) -> bool | None:
        """See the base class."""
        return self._scheduling.reset()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self._working.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """See the base class of vLLM 0.33: the caches are about to be unmapped."""
        if self._worker is not None:
            self._worker.sleep()

    def restore_kv_caches(self) -> None:
        """See the base class of vLLM 0.33."""
        if self._worker is not None:
            self._worker.wake()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """See the base class of vLLM 0.33."""
        return True

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """See the base class."""
        return DescribedMetadata(self._working.described())

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: object) -> None:
        """See the base class."""
        self._working.begin(self._step.work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are never by layer."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: object,
    ) -> None:
        """Saves are never by layer."""

    def wait_for_save(self) -> None:
        """See the base class. What is offered is copied off its blocks here."""
        self._working.save(self._step.work)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class. A failed load is a request's, never a block's."""
        self._working.forget(finished_req_ids)
        found = self._working.results(idle=self._step.work.idle)
        return KVConnectorTransferResults(
            finished_recving=set(found.ended), failed_recving=set(found.failed)
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        report = self._working.report()
        described = (self._working.described(),) if self._step.describe else ()
        if report is None and not described:
            return None
        return WorkerMetadata((report,) if report is not None else (), described)

    def shutdown(self) -> None:
        """See the base class."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """See the base class."""
        return self._scheduling.take_events()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """See the base class. The scheduler tells what its workers counted, too."""
        if self._scheduler is None:
            return None
        counts = self._scheduler.take_counts()
        return TierCacheStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """See the base class."""
        return TierCacheStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """See the base class."""
        return TierCacheProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    @property
    def _step(self) -> StepMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        return meta
