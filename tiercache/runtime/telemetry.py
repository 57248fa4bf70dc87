"""What a node measures, as Prometheus reads it. Numbers are read at scrape, never pushed."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tiercache.core.counters import NAMES

PREFIX = "tiercache_"
Numbers = Mapping[str, Mapping[str, float]]

BOTH = ("host", "nvme")
NONE = ("",)


class Series(NamedTuple):
    """One metric: its name without prefix and `_total`, the label's name ("" for no label), every
    value the label can take, and what it means."""

    name: str
    label: str
    values: tuple[str, ...]
    help: str


def _core(name: str, label: str, text: str) -> Series:
    return Series(name, label, NAMES[name], text)


COUNTERS = (
    _core("lookups", "result", "Plans by what became of them; they add up to all plans."),
    _core("misses", "reason", "Plans without a boundary, by reason."),
    _core("lookup_tokens", "", "Prompt tokens that plans asked for."),
    _core("hit_tokens", "tier", "Prompt tokens that were resumed, by the tier they came from."),
    _core(
        "lost_tokens", "reason", "Prompt tokens that were computed, by why they were not resumed."
    ),
    _core("fetches", "result", "Objects asked for by name, by where they were."),
    _core("reserves", "outcome", "Objects offered for storing, by what was answered."),
    _core(
        "checkpoints",
        "advice",
        "Checkpoints advised that were offered, that were not until the request was over, and offered "
        "inside a prompt without advice.",
    ),
    _core("commits", "", "Objects that were written and sealed."),
    _core("committed_bytes", "", "Bytes written to host memory."),
    _core("commits_lost", "", "Objects that were committed and could not be sealed."),
    _core("evictions", "tier", "Objects dropped to make room."),
    _core("evicted_bytes", "tier", "Bytes dropped to make room."),
    _core("quota_evictions", "tier", "Objects dropped since their own tenant was at its share."),
    _core("expired", "", "Objects that came to their end."),
    _core("pins", "outcome", "Pins asked for, by what was answered."),
    _core("pins_ended", "why", "Pins that ended, by why."),
    _core("writeback_bytes", "", "Bytes written to NVMe."),
    _core(
        "writeback_dropped", "reason", "Objects that should have been written to NVMe, by why not."
    ),
    _core("nvme_read_bytes", "", "Bytes read from NVMe into host memory."),
    _core("nvme_faults", "fault", "Failed operations on the NVMe tier."),
    _core("damaged", "tier", "Objects whose bytes were not those that were sealed."),
    _core("isolated", "", "Requests refused since this node did not hear from etcd."),
    _core(
        "pushes", "outcome", "Prompts that engines handed to other nodes, by what became of them."
    ),
    _core("peer_asked", "answer", "Plans that waited for another node, by what it said."),
    _core(
        "agreements",
        "answer",
        "Nodes with other ranks of an engine that were asked, by what they said.",
    ),
    _core("peer_answered", "answer", "Other nodes' questions, by what was answered."),
    _core("peer_faults", "fault", "Objects that did not come from another node."),
    _core("peer_read_bytes", "", "Bytes fetched from other nodes."),
    _core("peer_lent_bytes", "", "Bytes lent to other nodes."),
    _core("pool_asked", "answer", "Plans that waited for the pool, by what it said."),
    _core("pool_faults", "fault", "Objects that did not come from the pool, and flushes of it."),
    _core("pool_read_bytes", "", "Bytes fetched from the pool."),
    _core("deposits", "outcome", "Boundaries that had earned a place in the pool, by what became."),
    _core("deposited_bytes", "", "Bytes of the boundaries that were put there."),
    Series(
        "connections", "result", ("accepted", "uid", "too_many"), "Connections, by what became."
    ),
    Series("requests", "", NONE, "Requests and notices received."),
    Series(
        "recorded",
        "event",
        ("heard", "left_out"),
        "Plans taken into the trace, and events that the recorder was too slow for.",
    ),
    Series("told", "", NONE, "Batches that routers were told."),
    Series("replays", "result", ("answered", "refused"), "Questions of routers, by what became."),
    Series(
        "protocol_errors", "", NONE, "Connections closed because their client broke the protocol."
    ),
    Series(
        "slow_readers", "", NONE, "Connections closed because their client did not read replies."
    ),
)

GAUGES = (
    Series("bytes", "tier", BOTH, "Bytes that objects take."),
    Series("capacity_bytes", "tier", BOTH, "Bytes that objects can take."),
    Series("objects", "tier", BOTH, "Sealed objects."),
    Series("free_largest_bytes", "tier", ("host",), "Largest object that fits without eviction."),
    Series(
        "quarantined_bytes", "", NONE, "Bytes kept back because a process may still touch them."
    ),
    Series("leases", "", NONE, "Objects leased."),
    Series("leases_overdue", "", NONE, "Objects leased for longer than the limit."),
    Series("reservations", "", NONE, "Objects being written by clients."),
    Series("sessions", "", NONE, "Clients that serve a namespace."),
    Series("waiting", "", NONE, "Requests waiting for the slower tier."),
    Series("writeback_queue", "", NONE, "Objects waiting to be written to NVMe, or on their way."),
    Series("nvme_paused", "", NONE, "1 while writing to NVMe rests after a failure."),
    Series(
        "nvme_failed", "", NONE, "1 when the NVMe tier failed at the start: nothing is written."
    ),
    Series("namespaces", "", NONE, "Namespaces known."),
    Series(
        "eviction_policy",
        "policy",
        ("index", "hyper", "marconi", "point-lru", "lru"),
        "1 for the order of eviction that is followed.",
    ),
    Series("ghosts", "", NONE, "Boundaries whose reuse is remembered, held or not."),
    Series(
        "whatif_saved",
        "memory",
        ("0.5", "1", "2", "4"),
        "Part of the prefill that so many times the host memory would save, estimated.",
    ),
    Series("pins_open", "", NONE, "Pins that stand."),
    Series("pinned_objects", "", NONE, "Objects under a pin."),
    Series("pinned_bytes", "", NONE, "Host memory that objects under a pin may take."),
    Series("pinned_bytes_max", "", NONE, "Host memory that may be pinned."),
    Series("sheltered_bytes", "", NONE, "Bytes set aside since many requests share them."),
    Series("expiring_objects", "", NONE, "Objects that have an end."),
    Series("tenants", "", NONE, "Tenants known."),
    Series("sights", "", NONE, "Prefixes whose visits are remembered."),
    Series("checkpoints_open", "", NONE, "Checkpoints advised that may still be offered."),
    Series("peers", "", NONE, "Other nodes of the cluster that this one deals with."),
    Series("peers_sick", "", NONE, "Those of them that are left alone since they failed."),
    Series("peer_pulls", "", NONE, "Fetches from other nodes under way."),
    Series("handing_over", "", NONE, "Prompts on their way to other nodes or from them."),
    Series("boundaries_told", "", NONE, "Boundaries that other nodes are told of."),
    Series("pool_boundaries", "", NONE, "Boundaries that the pool is known to hold."),
    Series("pool_sick", "", NONE, "1 while the pool is not asked since it failed."),
    Series("pool_unreachable", "", NONE, "1 when the last look at the pool failed."),
    Series("deposits_open", "", NONE, "Boundaries on their way to the pool."),
    Series("deposits_paused", "", NONE, "1 while nothing is put there after a failure."),
    Series(
        "isolated_now", "", NONE, "1 while this node gives nothing out, since etcd is out of reach."
    ),
    Series("ready", "", NONE, "1 when the node accepts clients."),
    Series(
        "nvme_scanned", "", NONE, "1 when all that was stored before this start has been found."
    ),
    Series("open_connections", "", NONE, "Connections open now."),
    Series("arena_bytes", "", NONE, "Size of the host tier's arena."),
    Series("arena_prefaulted_bytes", "", NONE, "Part of the arena whose pages exist."),
    Series("writeback_limit_bytes_per_second", "", NONE, "Most bytes written to NVMe per second."),
    Series("start_time_seconds", "", NONE, "When the node started, seconds since 1970."),
)

BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 1.0)
HANDLE_SECONDS = "handle_seconds"


class Tally:
    """The runtime's own counts, beside the core's. Every name is there from the start, at 0."""

    def __init__(self) -> None:
        core = NAMES.keys()
        self.counters: dict[str, dict[str, int]] = {
            series.name: dict.fromkeys(series.values, 0)
            for series in COUNTERS
            if series.name not in core
        }
        self._handled = [0] * (len(BUCKETS) + 1)
        self._handled_s = 0.0

    def add(self, name: str, label: str = "") -> None:
        """Count one more."""
        self.counters[name][label] += 1

    def handled(self, seconds: float) -> None:
        """Count the time that one event took."""
        self._handled[bisect_left(BUCKETS, seconds)] += 1
        self._handled_s += seconds

    def histogram(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by upper bound, and the sum in seconds."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._handled, strict=True):
            total += count
            buckets.append((bound, total))
        return buckets, self._handled_s


class NodeCollector(Collector):
    """Turns what `counters()` and `gauges()` return into metrics, when asked.

    A number that they lack reads as 0; one that is in no table is left out, so label sets stay
    bounded by this file.
    """

    def __init__(
        self,
        counters: Callable[[], Numbers],
        gauges: Callable[[], Numbers],
        tally: Tally,
        build: Mapping[str, str],
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._tally = tally
        self._build = dict(build)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the tables."""
        counters, gauges = self._counters(), self._gauges()
        for series in COUNTERS:
            counter = CounterMetricFamily(
                PREFIX + series.name, series.help, labels=[series.label] if series.label else []
            )
            _fill(counter, series, counters)
            yield counter
        for series in GAUGES:
            gauge = GaugeMetricFamily(
                PREFIX + series.name, series.help, labels=[series.label] if series.label else []
            )
            _fill(gauge, series, gauges)
            yield gauge
        buckets, sum_s = self._tally.histogram()
        yield HistogramMetricFamily(
            PREFIX + HANDLE_SECONDS, "Time to decide one event.", buckets=buckets, sum_value=sum_s
        )
        about = GaugeMetricFamily(PREFIX + "build_info", "What runs here.", labels=[*self._build])
        about.add_metric([*self._build.values()], 1)
        yield about


def _fill(
    family: CounterMetricFamily | GaugeMetricFamily, series: Series, numbers: Numbers
) -> None:
    found = numbers.get(series.name, {})
    for value in series.values:
        family.add_metric([value] if series.label else [], found.get(value, 0))
