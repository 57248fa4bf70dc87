"""The NVMe tier against plain direct I/O of the same pattern, in the same run.

First the tier by itself, called as the sidecar calls it. Then the whole: a client saves, a second
visit makes the sidecar write back, it gives up its host copies, and brings the objects back when they
are asked for. Plain I/O goes to and from shared memory like that of an arena; what it gives with
ordinary memory, whose pages are larger, is shown beside it. Files lie in the folder that
TIERCACHE_BENCH_DISK names, else in /var/tmp: it must be on the disk in question.
"""

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from tests.bench import nvme
from tests.bench.figures import Figure, at_least, at_most, size_label
from tests.bench.nodes import Sidecar, blob_layout
from tests.bench.peers.peer import DISK, Buffer, aligned
from tests.bench.plain_io import PlainFile
from tiercache.client import Blob, Client, Options, Wanted
from tiercache.state import Chain, Extent, Namespace
from tiercache.tiers.host import HostArena

READ_GOAL, WRITE_GOAL, WRITTEN_GOAL = at_least(0.9), at_least(0.8), at_most(1.1)
SIZES = (1 << 20, 4 << 20, 16 << 20)
TOTAL_BYTES = 256 << 20
SEGMENT_BYTES = 256 << 20
CAP_BYTES = 8 << 30
BLOCK_TOKENS = 16


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures of the tier alone, then of the sidecar."""
    folder = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=DISK))
    arena = HostArena([TOTAL_BYTES, TOTAL_BYTES])
    try:
        arena.prefault(lambda: False)
        noise = np.random.default_rng(0).integers(0, 255, TOTAL_BYTES, dtype=np.uint8)
        arena.view(Extent(0, 0, TOTAL_BYTES))[:] = noise.data
        yield from _tier(folder, arena, reps)
        for size in SIZES:
            yield from _sidecar(folder, arena, size, reps)
    finally:
        arena.close()
        shutil.rmtree(folder)


def _tier(folder: Path, arena: HostArena, reps: int) -> Iterator[Figure]:
    reads, writes, written = (defaultdict[int, list[float]](list) for _ in range(3))
    for rep in range(reps):
        for size in nvme.SIZES:
            plain = dict(nvme.plain(folder, arena, size))
            before = nvme.written_bytes()
            ours = dict(nvme.tier(folder, arena, size, rep))
            written[size].append((nvme.written_bytes() - before) / TOTAL_BYTES)
            reads[size].append(plain["read"] / ours["read"])
            writes[size].append(plain["write"] / ours["write"])
    for size in nvme.SIZES:
        yield from _three(size, "tier alone", reads[size], writes[size], written[size])


def _three(
    size: int,
    whose: str,
    reads: Sequence[float],
    writes: Sequence[float],
    written: Sequence[float],
) -> Iterator[Figure]:
    what = f"{size_label(size)} objects, {whose}"
    yield Figure("nvme", f"read {what}", "x direct", tuple(reads), READ_GOAL)
    yield Figure("nvme", f"write {what}", "x direct", tuple(writes), WRITE_GOAL)
    name = f"bytes on the device per byte, {what}"
    yield Figure("nvme", name, "x", tuple(written), WRITTEN_GOAL)


# --- the whole


@dataclass(slots=True)
class Samples:
    """Seconds and bytes of one size, a value per repetition."""

    read: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    plain_read: list[float] = field(default_factory=list)
    plain_write: list[float] = field(default_factory=list)
    ordinary_read: list[float] = field(default_factory=list)
    ordinary_write: list[float] = field(default_factory=list)


def _sidecar(folder: Path, arena: HostArena, size: int, reps: int) -> Iterator[Figure]:
    layout = blob_layout(size, BLOCK_TOKENS)
    namespace = Namespace.of(layout, model=f"m{size}", weights="w", tokenizer="t")
    options = Options(deadline_s=60.0, required=True)
    keys = f'write_bytes_per_s = "64GiB"\ncap_bytes = {CAP_BYTES}\n'
    keys += f"segment_bytes = {SEGMENT_BYTES}\nread_threads = {nvme.READ_THREADS}\n"
    shared = [
        _cut(np.frombuffer(arena.view(Extent(at, 0, TOTAL_BYTES)), np.uint8), size) for at in (0, 1)
    ]
    ordinary = _cut(aligned(TOTAL_BYTES), size)
    samples = Samples()
    with (
        Sidecar(arena_bytes=4 * TOTAL_BYTES, nvme=folder / "node", nvme_keys=keys) as node,
        Client.attach(node.socket, namespace, layout, options=options) as client,
    ):
        node.wait_prefaulted()
        node.wait_scanned()
        for rep in range(reps):
            _plain(folder / f"plain-{size}-{rep}", shared, ordinary, samples)
            chain = Chain([rep] * BLOCK_TOKENS * len(ordinary), BLOCK_TOKENS)
            before = node.device_bytes()[1]
            samples.write.append(_write_back(client, chain, shared[0]))
            samples.written.append((node.device_bytes()[1] - before) / TOTAL_BYTES)
            _forget_host(node, len(ordinary))
            samples.read.append(_fetch(client, chain))
            with node.admin() as admin:
                admin.clear("")
    shutil.rmtree(folder / "node")
    reads, writes = (
        _over(samples.plain_read, samples.read),
        _over(samples.plain_write, samples.write),
    )
    yield from _three(size, "whole sidecar", reads, writes, samples.written)
    for word, plain, ours in (
        ("read", samples.ordinary_read, samples.read),
        ("write", samples.ordinary_write, samples.write),
    ):
        name = f"{word} {size_label(size)} objects, whole sidecar, over ordinary memory"
        yield Figure("nvme", name, "x direct", tuple(_over(plain, ours)))
    gbps = tuple(TOTAL_BYTES / seconds / 1e9 for seconds in samples.ordinary_read)
    name = f"plain direct read of {size_label(size)} into ordinary memory"
    yield Figure("nvme", name, "GB/s", gbps)


def _plain(
    path: Path, shared: Sequence[Sequence[Buffer]], ordinary: Sequence[Buffer], samples: Samples
) -> None:
    for source, target, writes, reads in (
        (shared[0], shared[1], samples.plain_write, samples.plain_read),
        (ordinary, ordinary, samples.ordinary_write, samples.ordinary_read),
    ):
        plain = PlainFile(path, TOTAL_BYTES)
        writes.append(plain.write(source))
        reads.append(plain.read(target, nvme.READ_THREADS))
        plain.remove()


def _write_back(client: Client, chain: Chain, sources: Sequence[Buffer]) -> float:
    """Save; let a second request reach the prefix, so that it earns its place; return the seconds
    from then until all is on disk."""
    ends = range(BLOCK_TOKENS, len(chain) + 1, BLOCK_TOKENS)
    blobs = [
        Blob("kv", end, each.data, start=end - BLOCK_TOKENS)
        for end, each in zip(ends, sources, strict=True)
    ]
    saved = client.save("save", chain, blobs)
    assert saved.stored == len(sources), saved
    _flush(client, durable=False)
    _visit(client, chain, f"first-{chain.digests[1].hex()}")
    started = perf_counter()
    _visit(client, chain, f"second-{chain.digests[1].hex()}")
    _flush(client, durable=True)
    return perf_counter() - started


def _visit(client: Client, chain: Chain, request: str) -> None:
    with client.plan(request, chain, limit=len(chain)) as plan:
        assert plan.boundary == len(chain), plan


def _flush(client: Client, *, durable: bool) -> None:
    flushed = client.flush(durable=durable, wait_s=60.0)
    assert not flushed.waiting + flushed.lost, flushed


def _forget_host(node: Sidecar, count: int) -> None:
    with node.admin() as admin:
        evicted = admin.evict("", "host", 0)
        assert evicted.objects == count, evicted


def _fetch(client: Client, chain: Chain) -> float:
    wanted = [Wanted("kv", digest) for digest in chain.digests[1:]]
    started = perf_counter()
    with client.fetch("load", wanted, wait_s=60.0) as holding:
        seconds = perf_counter() - started
        assert None not in holding.blobs
    return seconds


def _over(plain: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [reference / mine for reference, mine in zip(plain, ours, strict=True)]


def _cut(whole: Buffer, size: int) -> list[Buffer]:
    return [whole[at : at + size] for at in range(0, whole.nbytes, size)]
