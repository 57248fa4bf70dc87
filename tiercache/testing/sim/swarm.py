"""What one seed draws: sizes, layouts, faults. Many are switched off wholly in any one history.

A history in which everything goes wrong at once explores little: caches stay empty, and rare paths hide
behind common ones. So each seed tries a few things hard.
"""

import random
from dataclasses import dataclass
from typing import get_args

from tiercache.core.limits import Evicting, Limits, Order, Protecting, Retaining
from tiercache.core.policy.retention import Retention
from tiercache.state import Care, Hint, Kind, Layout, Namespace, Part, Tensor
from tiercache.testing.sim.disk import Faults
from tiercache.testing.sim.model import CONV_COLUMNS

PAGE = 4096
BLOCK = 4


@dataclass(frozen=True, slots=True)
class Swarm:
    """The draw of one seed. Chances are per step or per request; `haste` is how much sooner a job gets
    its turn than an engine."""

    layout: Layout
    namespaces: tuple[Namespace, ...]
    scopes: tuple[tuple[str, str], ...]
    codecs: tuple[tuple[str, ...], ...]
    limits: Limits
    engines: int
    ranks: tuple[int, ...]
    reshard: float
    faults: Faults
    abort: float
    cancel: float
    omit: float
    twice: float
    hold: float
    sums: float
    engine_dies: float
    node_dies: float
    shrinks: float
    disk_fails: float
    opening_pace: float
    operator: float
    clear: float
    pins: float
    care: float
    haste: int
    steps: int


def draw(rng: random.Random, steps: int) -> Swarm:
    """Return what a seed explores."""
    ranks = rng.choice((1, 1, 2))
    layout = draw_layout(rng, ranks)
    namespaces = tuple(
        Namespace.of(layout, model="toy", weights=f"w{number}", tokenizer="t")
        for number in range(rng.choice((1, 1, 1, 2)))
    )

    def maybe(most: float, chance: float = 0.5) -> float:
        return rng.random() * most if rng.random() < chance else 0.0

    scopes = (("", ""), ("adapter", ""), ("", "tenant"))[: rng.choice((1, 1, 1, 3))]
    return Swarm(
        layout=layout,
        namespaces=namespaces,
        scopes=scopes,
        codecs=rng.choice(((("native",),), (("native",), ("xor", "native"), ("native", "xor")))),
        limits=draw_limits(rng, [namespaces[0].narrow(salt=salt).tenant for _, salt in scopes]),
        engines=rng.choice((1, 2, 3, 4)),
        ranks=rng.choice(((1, ranks), (ranks,))),
        reshard=maybe(1.0),
        faults=Faults(
            no_space=maybe(0.5, 0.3),
            write_io=maybe(0.3, 0.3),
            lost_write=maybe(0.3, 0.3),
            bit_flip=maybe(0.3, 0.3),
            read_io=maybe(0.3, 0.3),
            forget_io=maybe(0.3, 0.2),
        ),
        abort=maybe(0.3),
        cancel=maybe(0.3),
        omit=maybe(0.5),
        twice=maybe(0.3),
        hold=maybe(0.5),
        sums=maybe(1.0),
        engine_dies=maybe(0.01),
        node_dies=maybe(0.008, 0.6),
        shrinks=maybe(0.5, 0.2),
        disk_fails=maybe(0.5, 0.2),
        opening_pace=rng.choice((0.02, 0.2, 1.0)),
        operator=maybe(0.08),
        clear=maybe(0.3),
        pins=maybe(0.4),
        care=maybe(0.8, 0.6),
        haste=rng.choice((1, 2, 5)),
        steps=steps,
    )


def draw_care(rng: random.Random, chance: float) -> Care:
    """Return what one request wishes; mostly nothing."""
    if rng.random() >= chance:
        return Care()
    return Care(
        ttl_ms=rng.choice((0, 0, 1, 200, 5000)),
        priority=rng.randint(-2, 2),
        hint=rng.choice(tuple(Hint)),
        store=rng.random() < 0.8,
    )


def draw_protecting(rng: random.Random, tenants: list[str]) -> Protecting:
    """Return what is protected, and from whom. Often nothing."""
    shares = tuple((name, rng.random(), rng.random()) for name in dict.fromkeys(tenants))
    return Protecting(
        pinned_share_max=rng.choice((0.0, 0.2, 0.9)),
        pin_s_max=rng.choice((1.0, 1000.0)),
        pins_per_owner_max=rng.choice((1, 1000)),
        shared_share_max=rng.choice((0.0, 0.1, 0.9)),
        shared_sights_min=rng.choice((2, 8)),
        shared_s_max=rng.choice((1.0, 1000.0)),
        chances_max=rng.choice((0, 2, 4)),
        tool_call_s_max=rng.choice((0.5, 100.0)),
        ttl_s=rng.choice((0.0, 0.0, 2.0)),
        host_share=rng.choice((1.0, 1.0, 0.6)),
        nvme_share=rng.choice((1.0, 1.0, 0.6)),
        shares=shares if rng.random() < 0.3 else (),
    )


def draw_limits(rng: random.Random, tenants: list[str]) -> Limits:
    """Return limits small enough to be met."""
    segments = tuple(PAGE * rng.choice((16, 32, 64, 256)) for _ in range(rng.choice((1, 2))))
    segment_bytes = PAGE * rng.choice((4, 16, 32))
    has_disk = rng.random() < 0.85
    return Limits(
        host_segments=segments,
        nvme_bytes=segment_bytes * rng.choice((2, 8, 32)) if has_disk else 0,
        nvme_segment_bytes=segment_bytes,
        eager=rng.random() < 0.5,
        nvme_pause_s=rng.choice((0.1, 2.0)),
        lease_s_max=rng.choice((0.5, 60.0)),
        sights_max=rng.choice((20, 1000)),
        recent_requests_max=rng.choice((2, 1000)),
        plans_max=rng.choice((2, 1000, 1000)),
        waiting_max=rng.choice((1, 1000, 1000)),
        tails_max=rng.choice((1, 2, 8)),
        sample_bytes_min=1,
        advice_max=rng.choice((1, 1000, 1000)),
        retaining=Retaining(
            mode=rng.choice(get_args(Retention)),
            interval_tokens=rng.choice((1, 3, 8)),
            decode_interval_tokens=rng.choice((0, 0, 2)),
            checkpoints_per_path_max=rng.choice((0, 2, 8)),
            prefill_tokens_per_s=rng.choice((0.0, 1.0, 100.0, 10_000.0)),
        ),
        evicting=draw_evicting(random.Random(f"{segment_bytes} {segments} 1")),
        way_blocks_max=20 if segment_bytes < 16 * PAGE else 1000,
        namespaces_max=rng.choice((2, 1000, 1000)),
        reservations_per_session_max=rng.choice((20, 1000, 1000)),
        leases_per_session_max=rng.choice((20, 1000, 1000)),
        evictions_per_reserve_max=rng.choice((2, 1000, 1000)),
        write_back_objects_max=rng.choice((10, 1000, 1000)),
        write_back_batch_bytes_max=PAGE * rng.choice((1, 4, 64)),
        write_back_in_flight_bytes_max=PAGE * rng.choice((1, 8, 64)),
        fill_batch_bytes_max=rng.choice((64, 100_000)),
        list_rows_max=rng.choice((2, 1000)),
        list_scan_max=rng.choice((3, 1000)),
        protecting=draw_protecting(rng, tenants),
    )


def draw_evicting(rng: random.Random) -> Evicting:
    """Return what goes first."""
    return Evicting(rng.choice(get_args(Order)), ghosts_max=rng.choice((3, 1000)))


def draw_layout(rng: random.Random, ranks: int) -> Layout:
    """Return one of the shapes that models have."""
    units = rng.choice((ranks, 2)) if ranks > 1 else rng.choice((1, 2))

    def of(name: str, kind: Kind, window: int | None, block: int, columns: int = 1) -> Part:
        own = rng.choice((1, units))
        shape = (own, columns) if block == 0 else (own,)
        axes = ("head", "column")[: len(shape)]
        tensor = Tensor("values", "int64", shape, axes, 0 if own > 1 else None)
        return Part(name, kind, window, block, own, (tensor,))

    kv = of("kv", Kind.KV, None, BLOCK)
    wide = of("wide", Kind.KV, None, 2 * BLOCK)
    sliding = of("sliding", Kind.KV, rng.choice((1, 2, 3)), BLOCK)
    coarse = of("coarse", Kind.KV, rng.choice((1, 2)), 2 * BLOCK)
    recurrent = of("recurrent", Kind.RECURRENT, 1, 0)
    conv = of("conv", Kind.CONV, 1, 0, CONV_COLUMNS)
    shapes = (
        (kv, recurrent, conv),
        (kv, recurrent, conv),
        (wide, sliding, recurrent),
        (sliding, recurrent, conv),
        (kv,),
        (kv, coarse, recurrent, conv),
        (coarse, sliding),
    )
    return Layout(rng.choice(shapes), BLOCK)
