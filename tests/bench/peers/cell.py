"""One measurement, in a client process: put, read what the neighbour put, look for it.

The clients of a cell go through its phases together. Buffers are rings that are larger than any
cache of the processor. Each object carries a stamp in its first and last eight bytes; what
`get_into` brought is compared afterwards, outside the timed part.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import numpy as np
from numpy.typing import NDArray

from tests.bench.peers.peer import MIB, Buffer, Context, Peer

RING_BYTES = 64 * MIB
CALLS_MIN = 3
"""Calls in a phase, however long they take."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured: `count` objects of `size` in calls of `batch`, `budget_s` per phase."""

    size: int
    clients: int
    batch: int
    count: int
    tag: str
    budget_s: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What one client did in one phase. Times are nanoseconds; `latency` is per object."""

    op: str
    started: int
    ended: int
    latency: NDArray[np.float64]
    objects: int


class Client:
    """One client in its phases."""

    def __init__(self, peer: Peer, rank: int, barriers: dict[int, Barrier]) -> None:
        self._peer = peer
        self._rank = rank
        self._barriers = barriers
        self._source = peer.allocate(RING_BYTES)
        self._target = peer.allocate(RING_BYTES)
        noise = np.random.default_rng(rank).integers(0, 255, RING_BYTES, dtype=np.uint8)
        self._source[:] = noise

    def measure(self, cell: Cell) -> list[Phase]:
        """Go through all phases of `cell`."""
        peer, rank = self._peer, self._rank
        barrier = self._barriers[cell.clients]
        peer.prepare(cell.size)
        sources = slots(self._source, cell.size)
        targets = slots(self._target, cell.size)
        batch = min(cell.batch, cell.count, len(sources))
        for slot, view in enumerate(sources):
            _stamp(view, _mark(rank, slot))
        neighbour = (rank + 1) % cell.clients
        own = [_key(cell.tag, rank, number) for number in range(cell.count)]
        theirs = [_key(cell.tag, neighbour, number) for number in range(cell.count)]
        calls = [range(at, min(cell.count, at + batch)) for at in range(0, cell.count, batch)]

        def put(call: range) -> None:
            peer.put(_pick(own, call), _ring(sources, call))

        def get(call: range) -> None:
            peer.get(_pick(theirs, call))

        def get_into(call: range) -> None:
            peer.get_into(_pick(theirs, call), _ring(targets, call))

        def exists(call: range) -> None:
            if not peer.exists(_pick(theirs, call)):
                raise AssertionError(f"{peer.name}: {theirs[call[0]]} should be there")

        self._warm(cell, sources, targets, barrier)
        phases = [self._timed("put", put, calls, cell, barrier)]
        for call in calls[-(-phases[0].objects // batch) :]:  # The readers want all of them.
            put(call)
        peer.settle()
        for op, reads in (("get_into", get_into), ("get", get), ("exists", exists)):
            if op not in peer.ops:
                continue
            phases.append(self._timed(op, reads, calls, cell, barrier))
            if op == "get_into" and peer.check:
                self._compare(targets, neighbour, phases[-1].objects)
        barrier.wait()
        peer.delete(own)
        barrier.wait()
        return phases

    def _warm(
        self, cell: Cell, sources: Sequence[Buffer], targets: Sequence[Buffer], barrier: Barrier
    ) -> None:
        """Put and read all of it once, so that the memory of both sides is there, and remove it."""
        keys = [_key(f"{cell.tag}w", self._rank, number) for number in range(cell.count)]
        for number, key in enumerate(keys):
            self._peer.put([key], [sources[number % len(sources)]])
        self._peer.settle()
        for number, key in enumerate(keys):
            self._peer.get_into([key], [targets[number % len(targets)]])
        barrier.wait()
        self._peer.delete(keys)

    def _timed(
        self,
        op: str,
        work: Callable[[range], None],
        calls: Sequence[range],
        cell: Cell,
        barrier: Barrier,
    ) -> Phase:
        now = time.perf_counter_ns
        latency = np.empty(len(calls), dtype=np.float64)
        barrier.wait()
        started = now()
        until = started + int(cell.budget_s * 1e9)
        done = objects = 0
        for call in calls:
            before = now()
            work(call)
            after = now()
            latency[done] = (after - before) / len(call)
            done += 1
            objects += len(call)
            if after > until and done >= CALLS_MIN:
                break
        if op == "put":
            self._peer.settle()
        ended = now()
        barrier.wait()
        return Phase(op, started, ended, latency[:done], objects)

    def _compare(self, targets: Sequence[Buffer], neighbour: int, count: int) -> None:
        """The target ring holds the last objects that were read; each must be whole."""
        for number in range(max(0, count - len(targets)), count):
            slot = number % len(targets)
            view = targets[slot]
            found = {int(view[:8].view(np.uint64)[0]), int(view[-8:].view(np.uint64)[0])}
            if found != {_mark(neighbour, slot)}:
                raise AssertionError(f"{self._peer.name}: object {number} is not what was put")


def serve(
    peer_type: type[Peer],
    context: Context,
    rank: int,
    parent: Connection,
    barriers: dict[int, Barrier],
) -> None:
    """Be a client process: measure the cells that come, until None does."""
    peer = peer_type()
    try:
        peer.connect(context, rank)
        client = Client(peer, rank, barriers)
        parent.send("")
        while (cell := parent.recv()) is not None:
            parent.send(client.measure(cell))
        peer.close()
    except BaseException:
        for barrier in barriers.values():
            barrier.abort()
        parent.send(traceback.format_exc())
        raise


def name_of(peer: Peer, batch: int) -> str:
    """Return what a peer is called in results."""
    return peer.name if batch == 1 else f"{peer.name}-b{batch}"


def slots(ring: Buffer, size: int) -> list[Buffer]:
    """Return the ring cut into pieces of `size`."""
    return [ring[at : at + size] for at in range(0, ring.size - size + 1, size)]


def _pick(keys: Sequence[str], call: range) -> list[str]:
    return [keys[number] for number in call]


def _ring(views: Sequence[Buffer], call: range) -> list[Buffer]:
    return [views[number % len(views)] for number in call]


def _mark(rank: int, slot: int) -> int:
    return (rank << 40) | slot


def _stamp(view: Buffer, mark: int) -> None:
    view[:8].view(np.uint64)[0] = mark
    view[-8:].view(np.uint64)[0] = mark


def _key(tag: str, rank: int, number: int) -> str:
    return f"{tag}-{rank}-{number:06d}"
