"""What the connector counts, on vLLM's log and on its /metrics. Needs vLLM."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: Mapping[str, str] = {
    "questions": "Requests that the node was asked about.",
    "hits": "Answers with a boundary to resume from.",
    "misses": "Answers without one.",
    "refused": "Requests that must not be cached: an input or an adapter has no identity.",
    "handed_over": "Requests that named the node that prefilled them.",
    "handed_over_short": "Of these, requests of which less was there than the prompt allows.",
    "sources_ignored": "Requests that named something that cannot be a node as their source.",
    "destinations_ignored": "Likewise, as the node that is to take them.",
    "pushed": "Requests that another node took while they were prefilled here.",
    "pushed_short": "Requests of which it took less than their prompt allows.",
    "pushes_dropped": "Requests that were not pushed: too many were under way.",
    "hit_tokens": "Tokens whose state was loaded.",
    "host_tokens": "Tokens of hits that were in the node's host memory when asked.",
    "nvme_tokens": "Tokens of hits that had to come from NVMe, or from another node.",
    "hits_left_alone": "Hits not taken because a load of that boundary had failed lately.",
    "loads": "Loads that ended, on every worker.",
    "loads_failed": "Loads that failed; their requests were computed.",
    "loads_doomed": "Loads that were given up before they began.",
    "loaded_objects": "Objects loaded.",
    "loaded_bytes": "Bytes loaded.",
    "hot_objects": "Recurrent states restored from INT8 checkpoints on the device.",
    "saved_objects": "Objects that the node took.",
    "saved_bytes": "Bytes copied off the device to be saved.",
    "held_objects": "Objects offered that the node had already.",
    "save_dropped": "Objects not saved: too much was waiting, or the node was away.",
    "save_failed": "Objects not saved because of a fault.",
    "offers_declined": "Recurrent states on offer that were not worth saving.",
    "offers_unaligned": "Recurrent states on offer inside a block.",
    "offers_partial": "Recurrent states on offer from only some of the groups.",
    "advice_unfollowed": "Boundaries the node advised to save where vLLM offered no state.",
    "lost": "Prefixes that were saved once and are not with the node any more.",
}
ATTACHED = "attached"
DECLINED = "declined_"


class TierCacheStats(KVConnectorStats):
    """Counts by name since the last look; `attached` is 1 or 0, as it is now."""

    def reset(self) -> None:
        """See the base class."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts."""
        for name, count in other.data.items():
            self.data[name] = count if name == ATTACHED else self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """See the base class."""
        return {f"tiercache_{name}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """See the base class."""
        return not self.data


class TierCacheProm(KVConnectorPromMetrics):
    """The same as Prometheus metrics named `vllm:tiercache_...`."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(f"vllm:tiercache_{name}", text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }
        self._declined = self._counter_cls(
            "vllm:tiercache_declined",
            "Objects that the node did not take, by reason.",
            labelnames=[*labelnames, "reason"],
        )
        self._attached = create_metric_per_engine(
            self._gauge_cls(
                "vllm:tiercache_attached",
                "1 while the scheduler is attached to a node.",
                labelnames=labelnames,
            ),
            per_engine_labelvalues,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See the base class."""
        for name, count in transfer_stats_data.items():
            if name == ATTACHED:
                self._attached[engine_idx].set(count)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(count)
            elif name.startswith(DECLINED):
                labels = self.per_engine_labelvalues[engine_idx]
                self._declined.labels(*labels, name.removeprefix(DECLINED)).inc(count)
