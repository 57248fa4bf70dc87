"""What a node costs before and beside its work: start, idling, memory.

The arena is of 8 GiB where the machine has twice that, and on disk there are 100,000 objects. Ready
means that a client was attached and a look-up of it answered; what is on disk is found meanwhile.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import TypeAlias

import numpy as np
from xxhash import xxh3_128_digest

from tests.bench.figures import Figure, at_most
from tests.bench.nodes import Sidecar, blob_layout
from tests.bench.peers.peer import DISK, aligned, pause
from tiercache.budget import memory_limit
from tiercache.client import Blob, Client, Options
from tiercache.state import NATIVE, Chain, Extent, Key, Layout, Namespace, Record
from tiercache.tiers.base import Write
from tiercache.tiers.nvme import NvmeTier

READY_GOAL_S = 1.0
IDLE_GOAL_PERCENT = 1.0
BEYOND_GOAL_MIB = 100.0
ARENA_BYTES = 8 << 30
ON_DISK = 100_000
CHAIN_BLOCKS = 10_000
IN_MEMORY = 10_000
OBJECT_BYTES = 4096
BLOCK_TOKENS = 16
SEGMENT_BYTES = 256 << 20
CAP_BYTES = 16 << 30
IDLE_S = 20.0
METRICS = "127.0.0.1:0"
MIB = 1 << 20
State: TypeAlias = tuple[Namespace, Layout, Chain]


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures of starts with a full disk, then of one node that idles."""
    arena_bytes = min(ARENA_BYTES, memory_limit() // 2 // (1 << 30) * (1 << 30)) or 1 << 30
    note = f"arena of {arena_bytes >> 30} GiB"
    folder = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=DISK))
    try:
        layout = blob_layout(OBJECT_BYTES, BLOCK_TOKENS)
        namespace = Namespace.of(layout, model="bench", weights="w", tokenizer="t")
        chains = [
            Chain(range(first, first + BLOCK_TOKENS * CHAIN_BLOCKS), BLOCK_TOKENS)
            for first in range(ON_DISK // CHAIN_BLOCKS)
        ]
        digests = [digest for chain in chains for digest in chain.digests[1:]]
        assert len(digests) == ON_DISK
        _store(folder / "node", namespace, layout, digests)
        yield from _starts(folder / "node", arena_bytes, (namespace, layout, chains[-1]), reps)
    finally:
        shutil.rmtree(folder)
    yield from _idle(arena_bytes, note)


def _store(path: Path, namespace: Namespace, layout: Layout, digests: Sequence[bytes]) -> None:
    """Put the objects on disk, as a node that ran before would have."""
    content = aligned(OBJECT_BYTES)
    content[:] = np.random.default_rng(0).integers(0, 255, OBJECT_BYTES, dtype=np.uint8)
    view, checksum = content.data, xxh3_128_digest(content.data)
    part = layout.parts[0]
    tier = NvmeTier(path, cap_bytes=CAP_BYTES, segment_bytes=SEGMENT_BYTES)
    try:
        assert tier.remember(namespace.label(), layout) is None
        batch: list[Write] = []
        for number, digest in enumerate(digests):
            key = Key(namespace.digest, part.name, part.whole, NATIVE, digest)
            segment, offset = divmod(number * OBJECT_BYTES, SEGMENT_BYTES)
            start = number % CHAIN_BLOCKS * BLOCK_TOKENS
            record = Record(key, start, start + BLOCK_TOKENS, OBJECT_BYTES, checksum, "bench", 0.0)
            batch.append(Write(record, Extent(segment + 1, offset, OBJECT_BYTES), view))
            if len(batch) == 1024 or number + 1 == ON_DISK:
                assert not any(tier.write(batch))
                batch = []
    finally:
        tier.close()


def _starts(path: Path, arena_bytes: int, state: State, reps: int) -> Iterator[Figure]:
    listening, ready, found, whole = [], [], [], []
    keys = f"cap_bytes = {CAP_BYTES}\nsegment_bytes = {SEGMENT_BYTES}\n"
    for _ in range(reps):
        with Sidecar(arena_bytes=arena_bytes, nvme=path, nvme_keys=keys, metrics=METRICS) as node:
            _plan(node, state, BLOCK_TOKENS)
            ready.append(monotonic() - node.spawned_at)
            listening.append(node.started_after_s)
            node.wait_scanned()
            found.append(monotonic() - node.spawned_at)
            assert _plan(node, state, CHAIN_BLOCKS * BLOCK_TOKENS) == CHAIN_BLOCKS * BLOCK_TOKENS
            node.wait_prefaulted()
            whole.append(monotonic() - node.spawned_at)
    what = f"{ON_DISK:,} objects on disk"
    note = f"arena of {arena_bytes >> 30} GiB; the process's start included"
    yield Figure("start", f"start until it listens, {what}", "s", tuple(listening))
    goal = at_most(READY_GOAL_S)
    yield Figure("start", f"start until a plan is answered, {what}", "s", tuple(ready), goal, note)
    yield Figure("start", f"start until all is found, {what}", "s", tuple(found))
    yield Figure("start", "start until the arena is memory", "s", tuple(whole))


def _plan(node: Sidecar, state: State, limit: int) -> int:
    """Return the boundary that a new client is told. It keeps nothing of the arena."""
    namespace, layout, chain = state
    options = Options(deadline_s=10.0, required=True)
    with (
        Client.attach(node.socket, namespace, layout, options=options) as client,
        client.plan("request", chain, limit=limit) as plan,
    ):
        assert not plan.reason.startswith("unavailable"), plan
        return plan.boundary


def _idle(arena_bytes: int, note: str) -> Iterator[Figure]:
    layout = blob_layout(OBJECT_BYTES, BLOCK_TOKENS)
    namespace = Namespace.of(layout, model="bench", weights="w", tokenizer="t")
    options = Options(deadline_s=10.0, required=True)
    folder = Path(tempfile.mkdtemp(prefix="tiercache-bench-"))
    keys = f"cap_bytes = {CAP_BYTES}\n"
    try:
        with (
            Sidecar(
                arena_bytes=arena_bytes, nvme=folder / "node", nvme_keys=keys, metrics=METRICS
            ) as node,
            Client.attach(node.socket, namespace, layout, options=options) as client,
        ):
            node.wait_scanned()
            node.wait_prefaulted()
            empty = node.memory()
            chain = Chain(range(BLOCK_TOKENS * IN_MEMORY), BLOCK_TOKENS)
            content = memoryview(bytes(OBJECT_BYTES))
            ends = range(BLOCK_TOKENS, len(chain) + 1, BLOCK_TOKENS)
            blobs = [Blob("kv", end, content, start=end - BLOCK_TOKENS) for end in ends]
            saved = client.save("save", chain, blobs)
            assert saved.stored == IN_MEMORY, saved
            client.flush()
            before = node.cpu_s()
            pause(IDLE_S)
            percent = 100 * (node.cpu_s() - before) / IDLE_S
            full = node.memory()
    finally:
        shutil.rmtree(folder)
    goal = at_most(IDLE_GOAL_PERCENT)
    yield Figure("start", f"idle for {IDLE_S:.0f} s", "% core", (percent,), goal, note)
    beyond = (full["RssAnon"] + full["RssFile"]) / MIB
    goal = at_most(BEYOND_GOAL_MIB)
    name = f"resident beyond the arena, {IN_MEMORY:,} objects"
    note = f"of it {full['RssFile'] / MIB:.0f} MiB code; disk and metrics are on"
    yield Figure("start", name, "MiB", (beyond,), goal, note)
    grown = (full["RssAnon"] - empty["RssAnon"]) / IN_MEMORY
    yield Figure("start", f"memory per object, {IN_MEMORY:,} objects", "bytes", (grown,))
