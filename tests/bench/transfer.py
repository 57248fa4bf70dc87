"""Bytes in and out of the arena: as a view, copied into the caller's buffer, saved.

Each call is measured beside a plain copy of as many bytes by the same process, one after the other,
so that both see the same neighbours. Rings of buffers exceed the processor's caches. The arena is
written and read once before: what the very first touch of a page costs a client is a figure of its
own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from tests.bench.figures import Figure, at_least, at_most, percentile, size_label
from tests.bench.nodes import Sidecar, blob_layout
from tests.bench.peers.cell import RING_BYTES, slots
from tests.bench.peers.peer import Buffer, aligned
from tiercache.client import Blob, Client, Options, Wanted, copy_into
from tiercache.state import Chain, Layout, Namespace

ARENA_BYTES = 1 << 30
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
BLOCK_TOKENS = 16
LOAD_GOAL_FROM_BYTES = 1 << 20
LOAD_GOAL, SAVE_GOAL = 0.9, 0.8
VIEW_GOAL = 1.5
"""How much slower a view of the largest object may be than of the smallest: noise, not size."""

SAMPLE_BYTES = 512 << 20
CALLS_MIN, CALLS_MAX = 6, 200
VIEW_CALLS = 400


@dataclass(slots=True)
class Samples:
    """Latencies in nanoseconds of one size in one repetition."""

    view: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    load_memcpy: list[int] = field(default_factory=list)
    save: list[int] = field(default_factory=list)
    save_memcpy: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)


class Objects:
    """Objects of one size: saved one by one under new chains, read by name."""

    def __init__(self, node: Sidecar, size: int) -> None:
        self.size = size
        self._layout: Layout = blob_layout(size, BLOCK_TOKENS)
        namespace = Namespace.of(self._layout, model=f"m{size}", weights="w", tokenizer="t")
        options = Options(deadline_s=10.0, required=True)
        self.client = Client.attach(node.socket, namespace, self._layout, options=options)
        self._saved: list[bytes] = []
        self._number = 0

    def chain(self) -> Chain:
        """Return the chain of an object that was never saved."""
        self._number += 1
        return Chain([self._number] * BLOCK_TOKENS, BLOCK_TOKENS)

    def save(self, chain: Chain, source: Buffer) -> None:
        """Save one object."""
        blob = Blob("kv", BLOCK_TOKENS, memoryview(source))
        saved = self.client.save("save", chain, [blob])
        assert saved.stored == 1, saved
        self._saved.append(chain.digests[1])

    def flush(self) -> None:
        """Wait until all is sealed."""
        flushed = self.client.flush()
        assert not flushed.waiting + flushed.lost, flushed

    def load_view(self, nth: int) -> None:
        """Look at the nth object from the last."""
        with self.client.fetch("load", self._wanted(nth)) as holding:
            blob = holding.blobs[0]
            assert blob is not None
            assert blob.data.nbytes == self.size

    def load_into(self, nth: int, target: Buffer) -> None:
        """Copy the nth object from the last."""
        with self.client.fetch("load", self._wanted(nth)) as holding:
            blob = holding.blobs[0]
            assert blob is not None
            copy_into(memoryview(target), blob.data)

    def _wanted(self, nth: int) -> Sequence[Wanted]:
        return [Wanted("kv", self._saved[-1 - nth])]


class Rings:
    """Buffers of the caller."""

    def __init__(self) -> None:
        self._source, self._target = aligned(RING_BYTES), aligned(RING_BYTES)
        noise = np.random.default_rng(0)
        self._source[:] = noise.integers(0, 255, RING_BYTES, dtype=np.uint8)

    def source(self, size: int, number: int) -> Buffer:
        """Return a buffer to copy from."""
        return _nth(self._source, size, number)

    def target(self, size: int, number: int) -> Buffer:
        """Return a buffer to copy to."""
        return _nth(self._target, size, number)


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures of loads and saves."""
    rings = Rings()
    with Sidecar(arena_bytes=ARENA_BYTES) as node:
        node.wait_prefaulted()
        yield from _first_touch(Objects(node, SIZES[-2]), rings)
        objects = [Objects(node, size) for size in SIZES]
        for each in objects:  # Every client has mapped every page.
            _fill(each, rings, ARENA_BYTES)
        samples: dict[int, list[Samples]] = {size: [] for size in SIZES}
        for _ in range(reps):
            for each in objects:
                samples[each.size].append(_sample(each, rings))
        yield from _figures(samples)


def _fill(objects: Objects, rings: Rings, nbytes: int) -> None:
    count = nbytes // objects.size
    for number in range(count):
        objects.save(objects.chain(), rings.source(objects.size, number))
    objects.flush()
    for number in range(count // 2):
        objects.load_into(number, rings.target(objects.size, number))


def _first_touch(objects: Objects, rings: Rings) -> Iterator[Figure]:
    """Measure a client that never touched the arena before, once: there is only one first time."""
    size = objects.size
    count = ARENA_BYTES // size // 2
    save, copy, load = [], [], []
    for number in range(count):
        source, target = rings.source(size, number), rings.target(size, number)
        copy.append(_timed(lambda s=source, t=target: np.copyto(t, s)))
        chain = objects.chain()
        save.append(_timed(lambda c=chain, s=source: objects.save(c, s)))
    objects.flush()
    for number in range(count):
        target = rings.target(size, number)
        load.append(_timed(lambda n=number, t=target: objects.load_into(n, t)))
    label = size_label(size)
    for what, latency in (("save", save), ("load copied", load)):
        ratio = (percentile(copy, 50) / percentile(latency, 50),)
        yield Figure("load", f"{what}, {label}, pages new to the client", "x memcpy", ratio)


def _sample(objects: Objects, rings: Rings) -> Samples:
    size = objects.size
    calls = max(CALLS_MIN, min(CALLS_MAX, SAMPLE_BYTES // size))
    chains = [objects.chain() for _ in range(calls)]
    samples = Samples()
    for number, chain in enumerate(chains):
        source, target = rings.source(size, number), rings.target(size, number)
        samples.save_memcpy.append(_timed(lambda s=source, t=target: np.copyto(t, s)))
        samples.save.append(_timed(lambda c=chain, s=source: objects.save(c, s)))
        samples.sealed.append(samples.save[-1] + _timed(objects.flush))
    kept = min(calls, ARENA_BYTES // size // 2)
    # Views by themselves: what copying leaves in the caches has nothing to do with them.
    samples.view = [_timed(lambda n=n: objects.load_view(n % kept)) for n in range(VIEW_CALLS)]
    for number in range(calls):
        nth = number % kept
        source, target = rings.source(size, number), rings.target(size, number)
        samples.load_memcpy.append(_timed(lambda s=source, t=target: np.copyto(t, s)))
        again = rings.target(size, number + 1)
        samples.load.append(_timed(lambda n=nth, t=again: objects.load_into(n, t)))
    return samples


def _figures(samples: dict[int, list[Samples]]) -> Iterator[Figure]:
    for size, reps in samples.items():
        view = tuple(percentile(each.view, 50) for each in reps)
        yield Figure("load", f"load as a view, {size_label(size)}", "us", view)
    first, last = (samples[size] for size in (SIZES[0], SIZES[-1]))
    growth = tuple(
        percentile(large.view, 50) / percentile(small.view, 50)
        for small, large in zip(first, last, strict=True)
    )
    name = f"load as a view, {size_label(SIZES[-1])} over {size_label(SIZES[0])}"
    yield Figure("load", name, "x", growth, at_most(VIEW_GOAL), "independent of the size")
    for size, reps in samples.items():
        load = tuple(_ratio(each.load_memcpy, each.load) for each in reps)
        goal = at_least(LOAD_GOAL) if size >= LOAD_GOAL_FROM_BYTES else None
        yield Figure("load", f"load copied, {size_label(size)}", "x memcpy", load, goal)
    for size, reps in samples.items():
        save = tuple(_ratio(each.save_memcpy, each.save) for each in reps)
        goal = at_least(SAVE_GOAL) if size >= LOAD_GOAL_FROM_BYTES else None
        yield Figure("load", f"save, {size_label(size)}", "x memcpy", save, goal)
    for size, reps in samples.items():
        sealed = tuple(_ratio(each.save_memcpy, each.sealed) for each in reps)
        note = "one object at a time, waiting for its checksum"
        yield Figure("load", f"save and flush, {size_label(size)}", "x memcpy", sealed, None, note)


def _ratio(memcpy: Sequence[int], latency: Sequence[int]) -> float:
    return percentile(memcpy, 50) / percentile(latency, 50)


def _timed(work: Callable[[], None]) -> int:
    before = perf_counter_ns()
    work()
    return perf_counter_ns() - before


def _nth(ring: Buffer, size: int, number: int) -> Buffer:
    cut = slots(ring, size)
    return cut[number % len(cut)]
