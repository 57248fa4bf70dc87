"""Bytes in and out of the arena: as a view, copied into the caller's buffers, saved.

Each call is measured beside a plain copy of as many bytes by the same process, one after the other,
so that both see the same neighbours. A call moves one object, or as many as make 64 MiB. A load needs
no message of its own once a plan is there: the plan leased the bytes. Rings of buffers exceed the
processor's caches. The arena was written and read once before: what the very
first touch of a page costs a client is a figure of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

import numpy as np

from tests.bench.figures import Figure, Goal, at_least, at_most, percentile, size_label
from tests.bench.nodes import Sidecar, blob_layout
from tests.bench.peers.cell import RING_BYTES, slots
from tests.bench.peers.peer import PAGE_BYTES, Buffer, aligned
from tiercache.client import Blob, Client, Options, copy_into
from tiercache.state import Chain, Namespace

ARENA_BYTES = 1 << 30
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
BATCHED_SIZES = (1 << 20, 4 << 20, 16 << 20)
CALL_BYTES = 64 << 20
BLOCK_TOKENS = 16
GOALS_FROM_BYTES = 1 << 20
LOAD_GOAL, SAVE_GOAL = 0.9, 0.8
VIEW_GOAL = 1.5
"""How much slower a view of the largest object may be than of the smallest: noise, not size."""

SAMPLE_BYTES = 512 << 20
CALLS_MIN, CALLS_MAX = 6, 200
VIEW_CALLS = 400
FIRST_SIZE = 16 << 20


@dataclass(slots=True)
class Samples:
    """Latencies in nanoseconds of one kind of call in one repetition."""

    view: list[int] = field(default_factory=list)
    view_visit: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    load_visit: list[int] = field(default_factory=list)
    load_memcpy: list[int] = field(default_factory=list)
    save: list[int] = field(default_factory=list)
    save_memcpy: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)


class Objects:
    """Objects of one size, `count` in a call: saved under new chains, read by name."""

    def __init__(self, node: Sidecar, size: int, count: int = 1) -> None:
        self.size, self.count = size, count
        layout = blob_layout(size, BLOCK_TOKENS)
        name = f"m{size}x{count}"
        namespace = Namespace.of(layout, model=name, weights="w", tokenizer="t")
        options = Options(deadline_s=10.0, required=True)
        self.client = Client.attach(node.socket, namespace, layout, options=options)
        self._ends = range(BLOCK_TOKENS, BLOCK_TOKENS * count + 1, BLOCK_TOKENS)
        self._saved: list[Chain] = []
        self._number = 0

    @property
    def nbytes(self) -> int:
        """What one call moves."""
        return self.size * self.count

    def chain(self) -> Chain:
        """Return the chain of objects that were never saved."""
        self._number += 1
        return Chain([self._number] * BLOCK_TOKENS * self.count, BLOCK_TOKENS)

    def save(self, chain: Chain, sources: Sequence[Buffer]) -> None:
        """Save in one call."""
        blobs = [
            Blob("kv", end, source.data, start=end - BLOCK_TOKENS)
            for end, source in zip(self._ends, sources, strict=True)
        ]
        saved = self.client.save("save", chain, blobs)
        assert saved.stored == self.count, saved

    def note(self, chain: Chain) -> None:
        """Remember what was saved, and wait until it can be read."""
        flushed = self.client.flush()
        assert not flushed.waiting + flushed.lost, flushed
        self._saved.append(chain)

    def touch(self, nth: int) -> None:
        """Map what is left of the nth call from the last; the oldest may have made room by now."""
        chain = self._saved[-1 - nth]
        with self.client.plan("touch", chain, limit=len(chain)) as plan:
            for blob in plan.blobs:
                np.frombuffer(blob.data, np.uint8)[::PAGE_BYTES].max()

    def load(self, nth: int, targets: Sequence[Buffer] | None) -> tuple[int, int]:
        """Load what the nth call from the last saved, as views, or copied into `targets`.

        Return the nanoseconds of the load, and of the whole visit: plan, load, release.
        """
        chain = self._saved[-1 - nth]
        began = perf_counter_ns()
        plan = self.client.plan("load", chain, limit=len(chain))
        planned = perf_counter_ns()
        blobs = self.client.load(plan).blobs
        if targets is not None:
            for blob, target in zip(blobs, targets, strict=True):
                copy_into(target.data, blob.data)
        loaded = perf_counter_ns()
        self.client.release(plan)
        ended = perf_counter_ns()
        assert len(blobs) == self.count
        return loaded - planned, ended - began


class Rings:
    """Buffers of the caller."""

    def __init__(self) -> None:
        self._source, self._target = aligned(RING_BYTES), aligned(RING_BYTES)
        noise = np.random.default_rng(0)
        self._source[:] = noise.integers(0, 255, RING_BYTES, dtype=np.uint8)

    def pick(self, objects: Objects, number: int) -> tuple[list[Buffer], list[Buffer]]:
        """Return the buffers of the `number`th call: sources and targets."""
        sources, targets = slots(self._source, objects.size), slots(self._target, objects.size)
        at = [(number * objects.count + n) % len(sources) for n in range(objects.count)]
        return [sources[n] for n in at], [targets[n] for n in at]


def copy(targets: Sequence[Buffer], sources: Sequence[Buffer]) -> None:
    """The reference."""
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def measure(reps: int) -> Iterator[Figure]:
    """Yield figures of loads and saves."""
    rings = Rings()
    with Sidecar(arena_bytes=ARENA_BYTES) as node:
        node.wait_prefaulted()
        yield from _first_touch(Objects(node, FIRST_SIZE), rings)
        single = [Objects(node, size) for size in SIZES]
        batched = [Objects(node, size, CALL_BYTES // size) for size in BATCHED_SIZES]
        samples: dict[Objects, list[Samples]] = {each: [] for each in (*single, *batched)}
        for each in samples:  # Every client has mapped every page.
            _fill(each, rings)
        for _ in range(reps):
            for objects, found in samples.items():
                found.append(_sample(objects, rings))
        yield from _view_figures(samples)
        yield from _figures(samples)


def _fill(objects: Objects, rings: Rings) -> None:
    calls = ARENA_BYTES // objects.nbytes
    for number in range(calls):
        chain = objects.chain()
        sources, _ = rings.pick(objects, number)
        objects.save(chain, sources)
        objects.note(chain)
    for number in range(calls):
        objects.touch(number)


def _first_touch(objects: Objects, rings: Rings) -> Iterator[Figure]:
    """Measure a client that never touched the arena before, once: there is only one first time."""
    calls = ARENA_BYTES // objects.nbytes // 2
    save, reference = [], []
    for number in range(calls):
        sources, targets = rings.pick(objects, number)
        reference.append(_timed(copy, targets, sources))
        chain = objects.chain()
        save.append(_timed(objects.save, chain, sources))
        objects.note(chain)
    load = [objects.load(n, rings.pick(objects, n)[1])[0] for n in range(calls)]
    label = size_label(objects.size)
    for what, latency in (("save", save), ("load copied", load)):
        ratio = (_ratio(reference, latency),)
        yield Figure("load", f"{what}, {label}, pages new to the client", "x memcpy", ratio)


def _sample(objects: Objects, rings: Rings) -> Samples:
    calls = max(CALLS_MIN, min(CALLS_MAX, SAMPLE_BYTES // objects.nbytes))
    samples = Samples()
    for number in range(calls):
        sources, targets = rings.pick(objects, number)
        chain = objects.chain()
        samples.save_memcpy.append(_timed(copy, targets, sources))
        samples.save.append(_timed(objects.save, chain, sources))
        samples.sealed.append(samples.save[-1] + _timed(objects.note, chain))
    kept = min(calls, ARENA_BYTES // objects.nbytes // 2)
    # Views by themselves: what copying leaves in the caches has nothing to do with them.
    for number in range(VIEW_CALLS):
        _note(objects.load(number % kept, None), samples.view, samples.view_visit)
    for number in range(calls):
        sources, targets = rings.pick(objects, number)
        samples.load_memcpy.append(_timed(copy, targets, sources))
        _, others = rings.pick(objects, number + RING_BYTES // 2 // objects.nbytes)
        _note(objects.load(number % kept, others), samples.load, samples.load_visit)
    return samples


def _note(latencies: tuple[int, int], load: list[int], visit: list[int]) -> None:
    load.append(latencies[0])
    visit.append(latencies[1])


def _view_figures(samples: dict[Objects, list[Samples]]) -> Iterator[Figure]:
    visits: list[tuple[float, ...]] = []
    for objects, reps in samples.items():
        if objects.count == 1:
            load = tuple(percentile(each.view, 50) for each in reps)
            visits.append(tuple(percentile(each.view_visit, 50) for each in reps))
            label = size_label(objects.size)
            yield Figure("load", f"load as a view, {label}", "us", load)
            yield Figure("load", f"plan, load as a view, release, {label}", "us", visits[-1])
    growth = tuple(more / less for less, more in zip(visits[0], visits[-1], strict=True))
    name = f"plan, load as a view, release, {size_label(SIZES[-1])} over {size_label(SIZES[0])}"
    yield Figure("load", name, "x", growth, at_most(VIEW_GOAL), "independent of the size")


def _figures(samples: dict[Objects, list[Samples]]) -> Iterator[Figure]:
    for objects, reps in samples.items():
        load = tuple(_ratio(each.load_memcpy, each.load) for each in reps)
        name = f"load copied, {_call(objects)}"
        yield Figure("load", name, "x memcpy", load, _goal(objects, LOAD_GOAL))
    for objects, reps in samples.items():
        visit = tuple(_ratio(each.load_memcpy, each.load_visit) for each in reps)
        yield Figure("load", f"plan, load copied, release, {_call(objects)}", "x memcpy", visit)
    for objects, reps in samples.items():
        save = tuple(_ratio(each.save_memcpy, each.save) for each in reps)
        name = f"save, {_call(objects)}"
        yield Figure("load", name, "x memcpy", save, _goal(objects, SAVE_GOAL))
    for objects, reps in samples.items():
        if objects.nbytes == CALL_BYTES:
            sealed = tuple(_ratio(each.save_memcpy, each.sealed) for each in reps)
            name = f"save, {_call(objects)}, until it can be read"
            yield Figure("load", name, "x memcpy", sealed)


def _call(objects: Objects) -> str:
    if objects.count == 1:
        return f"{size_label(objects.size)} in a call"
    return f"{objects.count} of {size_label(objects.size)} in a call"


def _goal(objects: Objects, bound: float) -> Goal | None:
    return at_least(bound) if objects.size >= GOALS_FROM_BYTES else None


def _ratio(memcpy: Sequence[int], latency: Sequence[int]) -> float:
    return percentile(memcpy, 50) / percentile(latency, 50)


def _timed(work: Callable[..., object], *arguments: object) -> int:
    before = perf_counter_ns()
    work(*arguments)
    return perf_counter_ns() - before
