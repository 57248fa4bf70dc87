"""What `--json` prints, and what the tables show: flat values, digests as hexadecimal text.

These shapes are promised in `docs/cli.md`: fields are added, never changed.
"""

import msgspec

from tiercache.cli.replies import NodeFacts, Row, Stats
from tiercache.state import Extent

HITS = ("hit_host", "hit_nvme")
TIERS = ("host", "nvme")


class Place(msgspec.Struct, frozen=True):
    """Where one copy lies; `size` is the space it takes."""

    segment: int
    offset: int
    size: int


class Object(msgspec.Struct, frozen=True):
    """One object. Names of its namespace are "" while the node does not know them."""

    key: str
    namespace: str
    model: str
    weights: str
    tokenizer: str
    lora: str
    tenant: str
    part: str
    kind: str
    shard: str
    codec: str
    digest: str
    start: int
    end: int
    nbytes: int
    dtype: str
    layout: str
    parent: str
    base: str
    requantised: int
    checksum: str
    writer: str
    sealed_at: float
    status: str
    leases: int
    sights: int
    tiers: list[str]
    host: Place | None
    nvme: Place | None
    left_s: float | None = None
    pinned: bool = False


class Namespace(msgspec.Struct, frozen=True):
    """One namespace, and what the node counts of it."""

    digest: str
    model: str
    weights: str
    tokenizer: str
    lora: str
    tenant: str
    counts: dict[str, int]


class HitRate(msgspec.Struct, frozen=True):
    """The share of all lookups, and of all tokens looked up, that was found; None before the first.

    Nothing is left out of the whole: a lookup that was declined or aborted counts as one.
    """

    lookups: float | None
    tokens: float | None


class Statistics(msgspec.Struct, frozen=True):
    """One node: itself, what it counted since its start, what it holds now."""

    node: NodeFacts
    hit_rate: HitRate
    counters: dict[str, dict[str, int]]
    gauges: dict[str, dict[str, float]]
    namespaces: list[Namespace]

    def count(self, name: str, label: str = "") -> int:
        """Return one counter; 0 when the node does not have it."""
        return self.counters.get(name, {}).get(label, 0)

    def gauge(self, name: str, label: str = "") -> float:
        """Return one gauge; 0 when the node does not have it."""
        return self.gauges.get(name, {}).get(label, 0.0)


class BadCopy(msgspec.Struct, frozen=True):
    """One copy that is not what was sealed."""

    key: str
    tier: str
    fault: str


class Verification(msgspec.Struct, frozen=True):
    """The end of a verify: copies read, their bytes, those that failed."""

    checked: int
    nbytes: int
    failed: list[BadCopy]


def object_of(row: Row) -> Object:
    """Return one object as it is shown."""
    record, label = row.record, row.label
    copies = zip(TIERS, (row.host, row.nvme), strict=True)
    return Object(
        key=row.key,
        namespace=record.key.namespace.hex(),
        model=label.model if label else "",
        weights=label.weights if label else "",
        tokenizer=label.tokenizer if label else "",
        lora=label.lora if label else "",
        tenant=label.tenant if label else "",
        part=record.key.part,
        kind=row.kind,
        shard=str(record.key.shard),
        codec=record.key.codec,
        digest=record.key.digest.hex(),
        start=record.start,
        end=record.end,
        nbytes=record.nbytes,
        dtype=row.dtype,
        layout=row.layout,
        parent=record.parent.hex(),
        base=record.base.hex(),
        requantised=record.requantised,
        checksum=record.checksum.hex(),
        writer=record.writer,
        sealed_at=record.sealed_at,
        status=row.status,
        leases=row.leases,
        sights=row.sights,
        tiers=[tier for tier, extent in copies if extent is not None],
        host=_place(row.host),
        nvme=_place(row.nvme),
        left_s=row.left_s,
        pinned=row.pinned,
    )


def statistics_of(stats: Stats) -> Statistics:
    """Return a node's statistics as they are shown."""
    lookups = stats.counters.get("lookups", {})
    found = sum(stats.counters.get("hit_tokens", {}).values())
    asked = sum(stats.counters.get("lookup_tokens", {}).values())
    return Statistics(
        node=stats.node,
        hit_rate=HitRate(
            _share(sum(lookups.get(label, 0) for label in HITS), sum(lookups.values())),
            _share(found, asked),
        ),
        counters=stats.counters,
        gauges=stats.gauges,
        namespaces=[
            Namespace(
                label.digest.hex(),
                label.model,
                label.weights,
                label.tokenizer,
                label.lora,
                label.tenant,
                counts,
            )
            for label, counts in stats.namespaces
        ],
    )


def _place(extent: Extent | None) -> Place | None:
    return None if extent is None else Place(extent.segment, extent.offset, extent.size)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
