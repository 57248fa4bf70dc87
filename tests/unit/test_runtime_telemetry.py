"""Every series is there before any traffic, and only those of the tables."""

from prometheus_client import CollectorRegistry, generate_latest

from tiercache.core.counters import NAMES
from tiercache.core.limits import Limits
from tiercache.core.machine import Machine
from tiercache.runtime.telemetry import (
    BUCKETS,
    COUNTERS,
    GAUGES,
    HANDLE_SECONDS,
    PREFIX,
    NodeCollector,
    Numbers,
    Tally,
)

RUNTIME_GAUGES = {
    "ready",
    "nvme_scanned",
    "nvme_failed",
    "pool_unreachable",
    "open_connections",
    "arena_bytes",
    "arena_prefaulted_bytes",
    "writeback_limit_bytes_per_second",
    "start_time_seconds",
}


def scrape(counters: Numbers, gauges: Numbers, tally: Tally | None = None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(
        NodeCollector(lambda: counters, lambda: gauges, tally or Tally(), {"version": "1"})
    )
    lines = generate_latest(registry).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


def test_all_series_are_there_with_0_before_any_traffic() -> None:
    found = scrape({}, {})
    for series in COUNTERS:
        for value in series.values:
            label = f'{{{series.label}="{value}"}}' if series.label else ""
            assert found[f"{PREFIX}{series.name}_total{label}"] == 0
    for series in GAUGES:
        for value in series.values:
            label = f'{{{series.label}="{value}"}}' if series.label else ""
            assert found[f"{PREFIX}{series.name}{label}"] == 0
    assert found[f"{PREFIX}{HANDLE_SECONDS}_count"] == 0
    assert found[f'{PREFIX}build_info{{version="1"}}'] == 1


def test_the_tables_hold_what_the_core_counts() -> None:
    machine = Machine(Limits(host_segments=(4096 * 16,)))
    tabled = {series.name: set(series.values) for series in COUNTERS}
    assert {
        name: set(labels) for name, labels in machine.counters.items()
    }.items() <= tabled.items()
    assert tabled.keys() - machine.counters.keys() == Tally().counters.keys()
    gauges = {series.name: set(series.values) for series in GAUGES}
    core = {name: set(labels) for name, labels in machine.gauges().items()}
    assert core.items() <= gauges.items()
    assert gauges.keys() - core.keys() == RUNTIME_GAUGES


def test_numbers_are_read_when_asked() -> None:
    counters = {"lookups": {"hit_host": 3, "miss": 2}}
    gauges = {"bytes": {"host": 10.0, "nvme": 20.0}, "leases": {"": 4.0}}
    found = scrape(counters, gauges)
    assert found['tiercache_lookups_total{result="hit_host"}'] == 3
    assert found['tiercache_lookups_total{result="declined"}'] == 0
    assert found['tiercache_bytes{tier="nvme"}'] == 20
    assert found["tiercache_leases"] == 4


def test_what_is_in_no_table_makes_no_series() -> None:
    found = scrape({"lookups": {"model-name": 3}, "surprise": {"": 1}}, {"surprise": {"": 1.0}})
    assert not [name for name in found if "surprise" in name or "model-name" in name]


def test_times_fall_into_cumulative_buckets() -> None:
    tally = Tally()
    for seconds in (0.000_001, BUCKETS[0], 0.000_3, 7.0):
        tally.handled(seconds)
    found = scrape({}, {}, tally)
    name = f"{PREFIX}{HANDLE_SECONDS}"
    assert found[f'{name}_bucket{{le="1e-05"}}'] == 2
    assert found[f'{name}_bucket{{le="0.0005"}}'] == 3
    assert found[f'{name}_bucket{{le="1.0"}}'] == 3
    assert found[f'{name}_bucket{{le="+Inf"}}'] == found[f"{name}_count"] == 4
    assert found[f"{name}_sum"] > 7


def test_names_are_documented_once() -> None:
    names = [series.name for series in (*COUNTERS, *GAUGES)]
    assert len(names) == len(set(names))
    assert all(series.help.endswith(".") for series in (*COUNTERS, *GAUGES))
    assert NAMES.keys() <= set(names)
