"""Reports as tables for people. Everything that came from elsewhere is escaped first."""

import sys
from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiercache.cli import text
from tiercache.cli.documents import TIERS, BadCopy, Namespace, Object, Place, Statistics
from tiercache.cli.replies import Members, PinRow, PoolRow, ShareRow
from tiercache.wire import sharing

SHORT_HEX = 12
"""Digits shown of a digest. What is shown of a key is a prefix of it, so it can be asked for."""

PIPE_COLUMNS = 10_000
"""A table that goes into a pipe is never folded: its reader is a program."""


def console(*, whole: bool = False) -> Console:
    """Return a console on stdout that takes nothing for markup; `whole`: lines are never folded."""
    width = None if sys.stdout.isatty() and not whole else PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=width)


def objects(rows: Sequence[Object], now: float, *, long: bool) -> RenderableType:
    """Return one line per object. `now` is wall-clock seconds, for ages."""
    names = ("key", "kind/part", "shard", "codec", "tokens", "size", "tiers", "leases", "sights")
    table = _table(*names, "age", numbers=("size", "leases", "sights", "age"))
    for row in rows:
        _add(
            table,
            row.key if long else _short(row.key),
            f"{row.kind}/{row.part}",
            row.shard,
            row.codec,
            f"{row.start}-{row.end}",
            text.size(row.nbytes),
            _tiers(row),
            str(row.leases),
            str(row.sights),
            text.age(now - row.sealed_at) if row.sealed_at else "-",
        )
    return table


def inspection(row: Object, now: float) -> RenderableType:
    """Return everything that is known of one object."""
    what = "snapshot" if row.start == 0 and row.kind in {"recurrent", "conv"} else "range"
    sealed = text.when(row.sealed_at) if row.sealed_at else "not sealed"
    age = f" ({text.age(now - row.sealed_at)} ago)" if row.sealed_at else ""
    return _facts(
        ("key", row.key),
        ("namespace", row.namespace),
        ("model", _known(row.model)),
        ("weights", _known(row.weights)),
        ("tokenizer", _known(row.tokenizer)),
        ("lora", row.lora or "-"),
        ("tenant", row.tenant or "-"),
        ("kind / part", f"{row.kind}/{row.part}"),
        ("tokens", f"{row.start}-{row.end} ({what})"),
        ("boundary", f"{row.end} at {row.digest}"),
        ("inside a block after", row.base or "-"),
        ("dtype", _known(row.dtype)),
        ("layout", row.layout),
        ("shard", row.shard),
        ("codec", row.codec),
        ("size", f"{row.nbytes:,} bytes"),
        ("parent checkpoint", row.parent or "-"),
        ("requantised", str(row.requantised)),
        ("checksum (XXH3-128)", row.checksum or "-"),
        ("writer", row.writer or "-"),
        ("sealed", sealed + age),
        ("status", row.status),
        ("host", _place(row.host)),
        ("nvme", _place(row.nvme)),
        ("leases", str(row.leases)),
        ("sights", str(row.sights)),
        ("ends in", "-" if row.left_s is None else text.age(row.left_s)),
        ("pinned", "yes" if row.pinned else "no"),
    )


def pins(rows: Sequence[PinRow]) -> RenderableType:
    """Return one line per pin."""
    numbers = ("pin", "objects", "size", "ends in")
    table = _table("pin", "owner", "kind", "objects", "size", "ends in", numbers=numbers)
    for row in rows:
        _add(
            table,
            str(row.number),
            row.owner or "-",
            f"session {row.session}" if row.session else "operator",
            f"{row.objects:,}",
            text.size(row.nbytes),
            text.age(row.left_s),
        )
    return table


def shares(rows: Sequence[ShareRow]) -> RenderableType:
    """Return one line per tenant."""
    names = ("host", "takes", "of", "nvme", "takes", "of")
    outcomes = list(dict.fromkeys(name for row in rows for name in row.outcomes))
    table = _table("tenant", *names, *outcomes, "set by", numbers=(*names, *outcomes))
    for row in rows:
        cells: list[str] = []
        for tier, share in zip(TIERS, (row.host, row.nvme), strict=True):
            taken, allowed = row.taken.get(tier, 0), row.allowed.get(tier, 0)
            cells += [f"{share:g}", text.size(taken), text.size(allowed)]
        counts = (f"{row.outcomes.get(name, 0):,}" for name in outcomes)
        _add(table, row.tenant, *cells, *counts, "cluster" if row.common else "node")
    return table


def failures(failed: Sequence[BadCopy]) -> RenderableType:
    """Return one line per copy that did not verify."""
    table = _table("tier", "fault", "key")
    for copy in failed:
        _add(table, copy.tier, copy.fault, copy.key)
    return table


def stats(report: Statistics) -> RenderableType:
    """Return the whole of a node on one page."""
    return Group(
        _node(report),
        Text(),
        _tier_table(report),
        Text(),
        _traffic(report),
        Text(),
        _namespaces(report.namespaces),
    )


def _node(report: Statistics) -> RenderableType:
    node = report.node
    ready = text.percent(node.arena_prefaulted_bytes, node.arena_bytes)
    return _facts(
        ("node", f"version {node.version}, process {node.pid}, up {text.age(node.uptime_s)}"),
        ("socket", f"{node.socket}, open connections: {node.connections}"),
        ("arena", f"{text.size(node.arena_bytes)}, {ready} of it touched"),
        ("nvme", node.nvme + (", writing paused" if report.gauge("nvme_paused") else "")),
    )


def _tier_table(report: Statistics) -> RenderableType:
    sizes = ("bytes", "capacity", "used", "objects", "largest free", "of free")
    lost = ("evicted", "evicted bytes", "damaged")
    table = _table("tier", *sizes, *lost, numbers=(*sizes, *lost))
    for tier in TIERS:
        held, capacity = report.gauge("bytes", tier), report.gauge("capacity_bytes", tier)
        is_host = tier == "host"
        _add(
            table,
            tier,
            text.size(held),
            text.size(capacity),
            text.percent(held, capacity),
            f"{report.gauge('objects', tier):,.0f}",
            text.size(report.gauge("free_largest_bytes", tier)) if is_host else "-",
            text.size(max(capacity - held, 0)) if is_host else "-",
            f"{report.count('evictions', tier):,}",
            text.size(report.count("evicted_bytes", tier)),
            f"{report.count('damaged', tier):,}",
        )
    return table


def _traffic(report: Statistics) -> RenderableType:
    rate = report.hit_rate
    counters = report.counters
    written = text.size(report.count("writeback_bytes"))
    read = text.size(report.count("nvme_read_bytes"))
    return _facts(
        ("lookups", _counts(counters.get("lookups", {}))),
        ("hit rate", f"{_rate(rate.lookups)} of lookups, {_rate(rate.tokens)} of tokens"),
        ("hit tokens", _counts(counters.get("hit_tokens", {}))),
        ("misses", _counts(counters.get("misses", {}))),
        ("computed", _counts(counters.get("lost_tokens", {}))),
        ("reserves", _counts(counters.get("reserves", {}))),
        (
            "commits",
            f"{report.count('commits'):,}, {report.count('commits_lost'):,} of them lost",
        ),
        ("write-back", f"{written} written, {report.gauge('writeback_queue'):,.0f} waiting"),
        ("not written", _counts(counters.get("writeback_dropped", {}))),
        ("nvme", f"{read} read; faults: {_counts(counters.get('nvme_faults', {}))}"),
        (
            "leases",
            f"{report.gauge('leases'):,.0f}, {report.gauge('leases_overdue'):,.0f} overdue, "
            f"{text.size(report.gauge('quarantined_bytes'))} in quarantine",
        ),
        (
            "protected",
            f"{text.size(report.gauge('pinned_bytes'))} pinned of "
            f"{text.size(report.gauge('pinned_bytes_max'))}, "
            f"{text.size(report.gauge('sheltered_bytes'))} shared by many; "
            f"{report.gauge('expiring_objects'):,.0f} objects have an end, "
            f"{report.count('expired'):,} came to it",
        ),
        (
            "sessions",
            f"{report.gauge('sessions'):,.0f}, {report.gauge('reservations'):,.0f} open "
            f"reservations, {report.gauge('waiting'):,.0f} waiting",
        ),
    )


def members(found: Members) -> RenderableType:
    """Return one line per node of a cluster; `boundaries` are what a node could resume."""
    names = ("node", "address", "health", "memory", "disk", "boundaries", "protocol", "boot")
    table = _table(*names, numbers=("memory", "disk", "boundaries"))
    for row in found.nodes:
        low, high = row.protocols
        _add(
            table,
            row.name,
            row.address,
            row.health,
            text.size(row.host_bytes),
            text.size(row.nvme_bytes) if row.nvme_bytes else "-",
            f"{row.boundaries:,}",
            str(low) if low == high else f"{low}-{high}",
            row.boot,
        )
    return table


def pool(found: PoolRow) -> RenderableType:
    """Return one line on the pool; `boundaries` are those that are known to be there."""
    table = _table("pool", "name", "health", "boundaries", "state", numbers=("boundaries",))
    _add(table, found.kind, found.name, found.health, f"{found.boundaries:,}", found.state)
    return table


def places(found: sharing.Places) -> RenderableType:
    """Return one line per node that could resume a prompt, the asked one first."""
    names = ("node", "tokens", "tier", "bytes", "to fetch", "fetch s", "compute s", "health")
    table = _table(*names, numbers=names[1:2] + names[3:7])
    for place in found.places:
        _add(
            table,
            place.node or "(this one)",
            f"{place.boundary:,}",
            place.tier or "-",
            *(text.size(size) if size >= 0 else "?" for size in (place.nbytes, place.absent_bytes)),
            *(f"{s:.3g}" if s >= 0 else "?" for s in (place.seconds, place.compute_s)),
            place.health or "-",
        )
    return table


def _namespaces(rows: Sequence[Namespace]) -> RenderableType:
    if not rows:
        return Text("No namespace holds anything yet.")
    names = list(dict.fromkeys(name for row in rows for name in row.counts))
    table = _table("namespace", "model", "weights", "lora", "tenant", *names, numbers=names)
    for row in rows:
        amounts = (_amount(name, row.counts.get(name, 0)) for name in names)
        identity = (row.model, row.weights, row.lora, row.tenant)
        _add(table, row.digest[:SHORT_HEX], *(item or "-" for item in identity), *amounts)
    return table


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(Text(text.plain(name)), justify=justify, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(Text(text.plain(cell)) for cell in cells))


def _facts(*lines: tuple[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in lines:
        _add(grid, name, value)
    return grid


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{label} {amount:,}" for label, amount in counts.items()) or "none"


def _amount(name: str, amount: int) -> str:
    return text.size(amount) if name in TIERS or "bytes" in name else f"{amount:,}"


def _rate(share: float | None) -> str:
    return "-" if share is None else text.percent(share, 1)


def _tiers(row: Object) -> str:
    # An object without a copy that counts is on its way in or out: say which.
    return "+".join(row.tiers) or row.status


def _place(place: Place | None) -> str:
    if place is None:
        return "-"
    return f"segment {place.segment}, offset {place.offset}, {place.size} bytes taken"


def _short(key: str) -> str:
    namespace, _, rest = key.partition("/")
    return f"{namespace}/{rest[:SHORT_HEX]}"


def _known(value: str) -> str:
    return value or "unknown"
