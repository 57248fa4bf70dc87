"""Fetching from a peer beside a plain blocking loop of `recv_into`, over loopback, from another process.

`python -m tests.bench.transport KIND` serves one side: "plain", "plain-small" (with the small send buffer
that our own transport sets), "tcp", "unix" or "ucx". The plain loop checks no sum and knows no
deadline.
"""

import asyncio
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter_ns
from typing import Final

import uvloop
import xxhash

from tests.bench.figures import Figure, Goal, at_least, at_most, percentile, size_label
from tests.bench.nodes import ROOT
from tiercache.transport.base import Asked, Lent, Limits, Listener, Loan, Peer, Transport, Want
from tiercache.transport.handshake import End
from tiercache.transport.security import Plain, SharedKey
from tiercache.transport.tcp import TcpTransport
from tiercache.transport.ucx import UcxTransport

SIZES: Final = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
LARGEST: Final = SIZES[-1]
SAMPLE_BYTES: Final = 128 << 20
CALLS_MAX: Final = 300
CALLS_MIN: Final = 5
BATCH: Final = 16
GOALS_FROM_BYTES: Final = 4 << 20
LEAST: Final = {"tcp": 0.9, "ucx": 0.8}
LATENCY_MOST: Final = 2.0
WITHIN_S: Final = 60.0
KEY: Final = SharedKey(bytes(range(32)))
LISTENS: Final = "listens at "
_LENGTH_BYTES: Final = 8


class Prefixes:
    """A `Source` of the first bytes of one memory."""

    def __init__(self) -> None:
        self.memory = filled(LARGEST)
        self._sums: dict[int, bytes] = {}

    def lend(
        self, peer: str, asked: Sequence[Asked], answer: Callable[[Sequence[Lent]], None]
    ) -> None:
        answer([self._lent(each.object_bytes) for each in asked])

    def ask(self, peer: str, body: bytes, answer: Callable[[bytes], None]) -> None:
        answer(body)

    def _lent(self, nbytes: int) -> Loan:
        view = self.memory[:nbytes]
        if nbytes not in self._sums:
            self._sums[nbytes] = xxhash.xxh3_128_digest(view)
        return Loan(view, self._sums[nbytes], _nothing)


def _nothing() -> None:
    pass


def filled(nbytes: int) -> memoryview:
    """Return shared memory whose pages are there."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[:] = os.urandom(1 << 20) * (nbytes >> 20)
    return memory


class Serving:
    """A process of its own that serves one kind, and its address."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.transport", kind],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert self._process.stdout is not None
        said = (line.partition(LISTENS) for line in self._process.stdout)
        self.address = next(address.strip() for _, found, address in said if found)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class PlainLoop:
    """The blocking client of a plain server."""

    def __init__(self, address: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(address)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(self, target: memoryview) -> None:
        self._socket.sendall(len(target).to_bytes(_LENGTH_BYTES, "little"))
        at = 0
        while at < len(target):
            at += self._socket.recv_into(target[at:])

    def close(self) -> None:
        self._socket.close()


def made(kind: str) -> Transport:
    """Return a transport; of UCX, in the running loop."""
    if kind == "ucx":
        return UcxTransport(End("bench", KEY))
    return TcpTransport(End("bench", Plain()))


def kinds() -> list[str]:
    """Return what can be measured here."""
    return ["tcp", "unix", *(["ucx"] if find_spec("ucxx") else [])]


def measure(reps: int) -> Iterator[Figure]:
    """Yield each transport over the plain loop, at each size."""
    with ExitStack() as stack:
        servers = {kind: Serving(kind) for kind in ("plain", "plain-small", *kinds())}
        for serving in servers.values():
            stack.callback(serving.stop)
        plain = {name: PlainLoop(servers[name].address) for name in ("plain", "plain-small")}
        for loop in plain.values():
            stack.callback(loop.close)
        target = filled(LARGEST)
        rates: dict[tuple[str, int], list[float]] = {}
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for _ in range(reps):
                for kind in kinds():
                    address = servers[kind].address
                    runner.run(_compare(kind, address, plain, target, rates))
        yield from _figures(rates)


async def _compare(
    kind: str,
    address: str,
    plain: dict[str, PlainLoop],
    target: memoryview,
    rates: dict[tuple[str, int], list[float]],
) -> None:
    transport = made(kind)
    peer = await transport.dial(address, WITHIN_S)
    for size in SIZES:
        view = target[:size]
        calls = max(CALLS_MIN, min(CALLS_MAX, SAMPLE_BYTES // size))
        await _fetched(peer, [view])
        theirs = [_timed(plain["plain"], view) for _ in range(calls)]
        ours = [await _fetched(peer, [view]) for _ in range(calls)]
        again = range(calls if kind == "tcp" else 0)
        small = [_timed(plain["plain-small"], view) for _ in again]
        rates.setdefault((kind, size), []).append(percentile(theirs, 50) / percentile(ours, 50))
        if small:
            both = percentile(small, 50) / percentile(ours, 50)
            rates.setdefault(("small", size), []).append(both)
        if size == SIZES[0]:
            views = [target[size * number : size * (number + 1)] for number in range(BATCH)]
            batch = [await _fetched(peer, views) / BATCH for _ in range(calls)]
            rates.setdefault((f"{kind} batch", size), []).append(
                percentile(theirs, 50) * 1e3 / sorted(batch)[len(batch) // 2]
            )
    await peer.close()
    if isinstance(transport, UcxTransport):
        transport.close()


def _timed(plain: PlainLoop, view: memoryview) -> int:
    before = perf_counter_ns()
    plain.fetch(view)
    return perf_counter_ns() - before


async def _fetched(peer: Peer, views: Sequence[memoryview]) -> int:
    before = perf_counter_ns()
    wants = [Want(b"k", len(view), 0, view) for view in views]
    outcomes = await peer.fetch(wants, WITHIN_S)
    after = perf_counter_ns()
    assert outcomes == [None] * len(views), outcomes
    return after - before


def _figures(rates: dict[tuple[str, int], list[float]]) -> Iterator[Figure]:
    for (kind, size), values in rates.items():
        label = size_label(size)
        if kind == "small":
            name = f"fetch over tcp, {label}, over a plain loop with as small a send buffer"
            yield Figure("transport", name, "x", tuple(values))
        elif kind.endswith(" batch"):
            name = f"fetch over {kind.removesuffix(' batch')}, {BATCH} of {label} in a call"
            yield Figure("transport", name, "x plain", tuple(values), None, "one by one there")
        elif size == SIZES[0]:
            goal = at_most(LATENCY_MOST) if kind == "tcp" else None
            times = tuple(1 / value for value in values)
            yield Figure("transport", f"fetch over {kind}, {label}", "x its time", times, goal)
        else:
            yield Figure(
                "transport",
                f"fetch over {kind}, {label}",
                "x plain",
                tuple(values),
                _goal(kind, size),
            )


def _goal(kind: str, size: int) -> Goal | None:
    least = LEAST.get(kind)
    return at_least(least) if least and size >= GOALS_FROM_BYTES else None


def _serve_plain(*, small: bool) -> None:
    memory = filled(LARGEST)
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"{LISTENS}{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, Limits().send_buffer_bytes)
    while asked := sock.recv(_LENGTH_BYTES):
        sock.sendall(memory[: int.from_bytes(asked, "little")])


async def _serve(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 'sock'}" if kind == "unix" else "127.0.0.1:0"
        listener: Listener = await made(kind).listen(address, Prefixes())
        sys.stdout.write(f"{LISTENS}{listener.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1].startswith("plain"):
        _serve_plain(small=sys.argv[1] == "plain-small")
    else:
        uvloop.run(_serve(sys.argv[1]))
