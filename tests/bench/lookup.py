"""Looking objects up and leasing them: one, and 64 in one call, by a blocking client."""

from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import numpy as np

from tests.bench.echo import Echo
from tests.bench.figures import Figure, at_most, percentile
from tests.bench.nodes import Sidecar, blob_layout
from tiercache.client import Blob, Client, Options, Wanted
from tiercache.state import NATIVE, Chain, Namespace
from tiercache.wire import messages as wire

OBJECT_BYTES = 64 << 10
BLOCK_TOKENS = 16
OBJECTS = 64
GOALS_US = {1: 60.0, OBJECTS: 250.0}
CALLS = {1: 2000, OBJECTS: 600}
ROUND = 100
"""Calls before the other side has its turn: both see the same neighbours."""


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures, each with a bare echo of messages of the same size in the same run."""
    layout = blob_layout(OBJECT_BYTES, BLOCK_TOKENS)
    chain = Chain(range(OBJECTS * BLOCK_TOKENS), BLOCK_TOKENS)
    namespace = Namespace.of(layout, model="bench", weights="w", tokenizer="t")
    options = Options(deadline_s=10.0, required=True)
    with (
        Sidecar(arena_bytes=64 << 20) as node,
        Client.attach(node.socket, namespace, layout, options=options) as client,
        Echo() as echo,
    ):
        node.wait_prefaulted()
        _fill(client, chain)
        for count in (1, OBJECTS):
            yield from _compare(client, echo, chain, count, reps)


def _fill(client: Client, chain: Chain) -> None:
    content = np.arange(OBJECT_BYTES, dtype=np.uint8).data
    ends = range(BLOCK_TOKENS, len(chain) + 1, BLOCK_TOKENS)
    blobs = [Blob("kv", end, content, start=end - BLOCK_TOKENS) for end in ends]
    saved = client.save("fill", chain, blobs)
    assert saved.stored == OBJECTS, saved
    flushed = client.flush()
    assert not flushed.waiting + flushed.lost, flushed


def _compare(client: Client, echo: Echo, chain: Chain, count: int, reps: int) -> Iterator[Figure]:
    digests = chain.digests[1 : count + 1]
    wanted = [Wanted("kv", digest) for digest in digests]
    bare = [wire.Wanted(0, 0, 1, NATIVE, digest) for digest in digests]

    ours: list[list[int]] = []
    whole: list[list[int]] = []
    floor: list[list[int]] = []
    for _ in range(reps):
        for kept in (ours, whole, floor):
            kept.append([])
        for _ in range(0, CALLS[count], ROUND):
            _look_up(client, wanted, ours[-1], whole[-1])
            _ask(echo, bare, floor[-1])
    what = f"lookup + lease, {count} object{'s in one call' if count > 1 else ''}"
    p50, p50_floor = _each(ours, 50), _each(floor, 50)
    yield Figure("lookup", f"{what}: p50", "us", p50, at_most(GOALS_US[count]))
    yield Figure("lookup", f"{what}: p99", "us", _each(ours, 99))
    yield Figure("lookup", f"{what}, and release: p50", "us", _each(whole, 50))
    yield Figure("lookup", f"{what}: bare echo p50", "us", p50_floor)
    ratio = tuple(mine / least for mine, least in zip(p50, p50_floor, strict=True))
    yield Figure("lookup", f"{what}: p50 over bare echo", "x", ratio)


def _look_up(
    client: Client, wanted: Sequence[Wanted], latency: list[int], released: list[int]
) -> None:
    """Look up and lease until the views are there, then release, again and again."""
    for _ in range(ROUND):
        before = perf_counter_ns()
        holding = client.fetch("request", wanted)
        there = holding.blobs[-1] is not None
        leased = perf_counter_ns()
        client.release(holding)
        released.append(perf_counter_ns() - before)
        latency.append(leased - before)
        assert there


def _ask(echo: Echo, wanted: Sequence[wire.Wanted], latency: list[int]) -> None:
    for _ in range(ROUND):
        before = perf_counter_ns()
        pieces = echo.fetch(wanted)
        latency.append(perf_counter_ns() - before)
        assert pieces == len(wanted)


def _each(reps: Sequence[Sequence[int]], share: float) -> tuple[float, ...]:
    return tuple(percentile(latency, share) for latency in reps)
