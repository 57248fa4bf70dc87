"""Measures the peers of one script: one process per client, one line of JSON per result.

    python -m tests.bench.peers.bench_redis --sizes 64K,16M --reps 5

Reference: one thread that copies with numpy between two rings of the same size as the clients',
measured just before and just after each cell. `ratio` compares medians: the time of one such copy
over that of one object, times the number of clients. On a shared machine it says more than GB/s
(1e9 bytes per second) does. `gbps` and `ops_s` are those of all clients together, from the first
start to the last end, what `put` leaves to be done included; latencies are per object.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from typing import TypeAlias

import numpy as np

from tests.bench.peers.cell import RING_BYTES, Cell, Phase, name_of, serve, slots
from tests.bench.peers.peer import Context, Peer, aligned

SIZES = {"4K": 4 << 10, "64K": 64 << 10, "1M": 1 << 20, "4M": 4 << 20, "16M": 16 << 20}
WORKING_SET_BYTES = 512 << 20
"""What the clients of one cell store together."""

CELL_S_MAX = 180.0
MEMCPY_S = 0.1

Worker: TypeAlias = tuple[BaseProcess, Connection]


@dataclass(frozen=True, slots=True)
class Result:
    """One operation of one cell. Rates are None where no bytes move (`exists`)."""

    peer: str
    version: str
    op: str
    size: int
    clients: int
    batch: int
    rep: int
    objects: int
    ops_s: float
    p50_us: float
    p99_us: float
    gbps: float | None
    memcpy_gbps: float
    ratio: float | None
    load1: float
    at: int


class Memcpy:
    """The reference: single-thread copies between rings that exceed the processor's caches."""

    def __init__(self) -> None:
        self._source, self._target = aligned(RING_BYTES), aligned(RING_BYTES)
        self._source[:] = 7

    def times_us(self, size: int) -> list[float]:
        """Copy pieces of `size` for `MEMCPY_S`; return the microseconds of each."""
        sources, targets = slots(self._source, size), slots(self._target, size)
        times: list[float] = []
        started = now = time.perf_counter()
        while now - started < MEMCPY_S:
            at = len(times) % len(sources)
            before = time.perf_counter()
            np.copyto(targets[at], sources[at])
            now = time.perf_counter()
            times.append((now - before) * 1e6)
        return times


class Clients:
    """The client processes of one peer."""

    def __init__(self, peer_type: type[Peer], context: Context, counts: Sequence[int]) -> None:
        spawn = multiprocessing.get_context("spawn")
        barriers: dict[int, Barrier] = {
            count: spawn.Barrier(count, timeout=CELL_S_MAX) for count in counts
        }
        self._workers: list[Worker] = []
        for rank in range(max(counts)):
            here, there = spawn.Pipe()
            process = spawn.Process(
                target=serve, args=(peer_type, context, rank, there, barriers), daemon=True
            )
            process.start()
            self._workers.append((process, here))
            trouble = self._next(here)
            if trouble:
                raise RuntimeError(trouble)

    def measure(self, cell: Cell) -> list[list[Phase]]:
        """Return the phases of each client."""
        chosen = [pipe for _, pipe in self._workers[: cell.clients]]
        for pipe in chosen:
            pipe.send(cell)
        outcomes: list[list[Phase]] = []
        for pipe in chosen:
            outcome = self._next(pipe)
            if not isinstance(outcome, list):
                raise TypeError(outcome)
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """End the processes."""
        for _, pipe in self._workers:
            try:
                pipe.send(None)
            except OSError:
                continue  # It is gone already, and said why.
        for process, _ in self._workers:
            process.join(10)
            if process.is_alive():
                process.kill()

    def _next(self, pipe: Connection) -> object:
        if not pipe.poll(CELL_S_MAX):
            raise TimeoutError("a client process does not answer")
        try:
            outcome: object = pipe.recv()
        except EOFError as error:
            raise RuntimeError("a client process died") from error
        return outcome


def measure(peer_type: type[Peer], options: argparse.Namespace) -> Iterator[Result]:
    """Start a peer, yield its results, stop it."""
    peer = peer_type()
    memcpy = Memcpy()
    try:
        clients = Clients(peer_type, peer.start(), options.clients)
        try:
            for number, cell in enumerate(_cells(peer, options)):
                times = memcpy.times_us(cell.size)
                outcomes = clients.measure(cell)
                reference = statistics.median(times + memcpy.times_us(cell.size))
                rep = options.rep + number // _cells_per_rep(peer, options)
                for phases in zip(*outcomes, strict=True):
                    yield _result(peer, cell, phases, rep, reference)
        finally:
            clients.close()
    finally:
        peer.stop()


def _cells(peer: Peer, options: argparse.Namespace) -> Iterator[Cell]:
    for rep in range(options.reps):
        for size in options.sizes:
            for count in options.clients:
                objects = max(4, min(peer.objects_max, WORKING_SET_BYTES // (size * count)))
                for batch in peer.batches:
                    tag = f"b{os.getpid()}x{rep}s{size}c{count}n{batch}"
                    yield Cell(size, count, batch, objects, tag, options.budget)


def _cells_per_rep(peer: Peer, options: argparse.Namespace) -> int:
    return len(options.sizes) * len(options.clients) * len(peer.batches)


def _result(peer: Peer, cell: Cell, phases: Sequence[Phase], rep: int, memcpy_us: float) -> Result:
    seconds = (max(p.ended for p in phases) - min(p.started for p in phases)) / 1e9
    latency_us = np.concatenate([phase.latency for phase in phases]) / 1e3
    p50_us = float(np.percentile(latency_us, 50))
    objects = sum(phase.objects for phase in phases)
    gbps = None if phases[0].op == "exists" else objects * cell.size / seconds / 1e9
    return Result(
        peer=name_of(peer, cell.batch),
        version=peer.version(),
        op=phases[0].op,
        size=cell.size,
        clients=cell.clients,
        batch=cell.batch,
        rep=rep,
        objects=objects,
        ops_s=round(objects / seconds, 1),
        p50_us=round(p50_us, 2),
        p99_us=round(float(np.percentile(latency_us, 99)), 2),
        gbps=None if gbps is None else round(gbps, 4),
        memcpy_gbps=round(cell.size / memcpy_us / 1e3, 3),
        ratio=None if gbps is None else round(cell.clients * memcpy_us / p50_us, 4),
        load1=round(os.getloadavg()[0], 2),
        at=int(time.time()),
    )


def main(peer_types: Sequence[type[Peer]]) -> None:
    """Measure each of these as the command line says; lines go to standard output."""
    parser = argparse.ArgumentParser(description="Measure peers; see tests/bench/peers/harness.py.")
    parser.add_argument("--sizes", default="64K,1M,4M,16M", help=f"some of {','.join(SIZES)}")
    parser.add_argument("--clients", default="1", help="numbers of client processes, e.g. 1,4")
    parser.add_argument("--reps", type=int, default=3, help="repetitions")
    parser.add_argument("--rep", type=int, default=0, help="number of the first repetition")
    parser.add_argument("--budget", type=float, default=0.25, help="seconds per phase")
    parser.add_argument("--only", default="", help="some of the script's peers, by name")
    options = parser.parse_args()
    options.sizes = [SIZES[label] for label in options.sizes.split(",")]
    options.clients = [int(count) for count in options.clients.split(",")]
    only = options.only.split(",") if options.only else [each.name for each in peer_types]
    for peer_type in peer_types:
        if peer_type.name in only:
            for result in measure(peer_type, options):
                sys.stdout.write(json.dumps(asdict(result)) + "\n")
                sys.stdout.flush()
