"""Pools of connections, and what is put around a peer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tiercache.errors import PeerFault, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.testing.transport_pairs import AMPLE_S, SMALL, faults_of, until
from tiercache.transport.base import Source, Want
from tiercache.transport.inproc import InprocListener, InprocPeer, InprocTransport, Space
from tiercache.transport.pool import REST_S_MAX, REST_S_MIN, Pool
from tiercache.transport.wrap import Measured, Throttled


class Counting:
    """A transport that counts its dials, and holds them up while `gate` is not set."""

    def __init__(self, space: Space) -> None:
        self.inner = InprocTransport("taker", space, SMALL)
        self.dials = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def listen(self, address: str, source: Source) -> InprocListener:
        return await self.inner.listen(address, source)

    async def dial(self, address: str, within_s: float) -> InprocPeer:
        self.dials += 1
        await self.gate.wait()
        return await self.inner.dial(address, within_s)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def one(lender: Lender, connections_max: int = 2) -> tuple[InprocListener, Counting, Pool]:
    transport = Counting(Space())
    listener = await transport.listen("x", lender)
    return listener, transport, Pool(transport, "x", connections_max)


def fetch(pool: Pool, within_s: float = AMPLE_S) -> Awaitable[list[TransportFault | None]]:
    return pool.fetch([Target(b"k", 1).want], within_s)


async def test_connections_are_kept() -> None:
    _, transport, pool = await one(Lender({b"k": 1}))
    for _ in range(5):
        assert await fetch(pool) == [None]
        assert await pool.probe(AMPLE_S) >= 0
    assert (transport.dials, pool.connections) == (1, 1)
    await pool.close()
    assert pool.connections == 0
    assert faults_of(await fetch(pool)) == [PeerFault.LOST]
    with pytest.raises(TransportFault, match="closed"):
        await pool.probe(1)


async def test_another_is_made_while_all_are_busy_and_no_more_than_allowed() -> None:
    lender = Lender({b"k": 1})
    listener, transport, pool = await one(lender, 3)
    lender.held = []
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(pool.fetch([Target(b"k", 1).want], AMPLE_S)) for _ in range(9)]
        await until(lambda: lender.asked == 9)
        assert (transport.dials, listener.connections) == (3, 3)
        lender.give()
    assert all(call.result() == [None] for call in calls)
    await pool.close()
    assert listener.connections == 0


async def test_a_connection_that_ended_is_replaced() -> None:
    listener, transport, pool = await one(Lender({b"k": 1}))
    assert await fetch(pool) == [None]
    for peer in list(listener.peers):
        await peer.close()
    assert await fetch(pool) == [None]
    assert (transport.dials, pool.connections) == (2, 1)
    await pool.close()


async def test_nobody_dials_again_at_once() -> None:
    """The rest doubles up to its limit, and ends with a dial that works."""
    clock, transport = Clock(), Counting(Space())
    pool = Pool(transport, "x", clock=clock)
    rest_s = REST_S_MIN
    for dials in range(1, 9):
        assert faults_of(await fetch(pool)) == [PeerFault.LOST]
        assert transport.dials == dials
        clock.now += rest_s * 0.99
        assert faults_of(await fetch(pool)) == [PeerFault.LOST]
        assert transport.dials == dials
        clock.now += rest_s * 0.02
        rest_s = min(2 * rest_s, REST_S_MAX)
    await transport.listen("x", Lender({b"k": 1}))
    assert await fetch(pool) == [None]
    await pool.close()


async def test_one_dial_serves_all_who_wait() -> None:
    _, transport, pool = await one(Lender({b"k": 1}), 1)
    transport.gate.clear()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(pool.fetch([Target(b"k", 1).want], AMPLE_S)) for _ in range(5)]
        await until(lambda: transport.dials == 1)
        transport.gate.set()
    assert all(call.result() == [None] for call in calls)
    assert transport.dials == 1
    await pool.close()


async def test_dialling_counts() -> None:
    """A dial that takes too long is LATE; one that is cancelled holds nobody up."""
    _, transport, pool = await one(Lender({b"k": 1}))
    transport.gate.clear()
    assert faults_of(await fetch(pool, 0.02)) == [PeerFault.LATE]
    async with asyncio.TaskGroup() as group:
        call = group.create_task(pool.fetch([Target(b"k", 1).want], AMPLE_S))
        await until(lambda: transport.dials == 2)
        call.cancel()
    transport.gate.set()
    assert await fetch(pool) == [None]
    await pool.close()


async def test_a_pool_closed_while_it_dials() -> None:
    listener, transport, pool = await one(Lender({b"k": 1}))
    transport.gate.clear()
    async with asyncio.TaskGroup() as group:
        call = group.create_task(pool.fetch([Target(b"k", 1).want], AMPLE_S))
        await until(lambda: transport.dials == 1)
        await pool.close()
        transport.gate.set()
    assert faults_of(call.result()) == [PeerFault.LOST]
    assert listener.connections == 0


async def test_a_busy_connection_is_better_than_a_failed_dial() -> None:
    lender = Lender({b"k": 1})
    listener, transport, pool = await one(lender)
    lender.held = []
    async with asyncio.TaskGroup() as group:
        first = group.create_task(pool.fetch([Target(b"k", 1).want], AMPLE_S))
        await until(lambda: lender.asked == 1)
        transport.inner = InprocTransport("taker", Space(), SMALL)
        second = group.create_task(pool.fetch([Target(b"k", 1).want], AMPLE_S))
        await until(lambda: lender.asked == 2)
        lender.give()
    assert first.result() == second.result() == [None]
    assert (transport.dials, pool.connections) == (2, 1)
    await pool.close()
    await listener.close()


def test_a_pool_has_room_for_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Pool(InprocTransport("a", Space()), "x", 0)


# --- wrappers


class Scripted:
    """A peer that says yes and notes its deadlines."""

    def __init__(self) -> None:
        self.deadlines: list[float] = []
        self.closed = False
        self.wait: Callable[[], Awaitable[None]] | None = None

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        self.deadlines.append(within_s)
        if self.wait is not None:
            await self.wait()
        missing = TransportFault(PeerFault.MISSING, "")
        return [missing if want.key == b"gone" else None for want in wants]

    async def ask(self, body: bytes, within_s: float) -> bytes:
        self.deadlines.append(within_s)
        return body

    async def probe(self, within_s: float) -> float:
        return within_s

    async def close(self) -> None:
        self.closed = True


def wants(nbytes: int, *keys: bytes) -> list[Want]:
    return [Target(key, nbytes).want for key in keys or (b"k",)]


async def test_a_rate_limit_holds_and_nothing_is_too_large() -> None:
    clock, slept = Clock(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.now += seconds

    inner = Scripted()
    peer = Throttled(inner, 100, clock=clock, sleep=sleep)
    assert await peer.fetch(wants(1000), 60) == [None]
    assert not slept
    assert await peer.fetch(wants(50), 60) == [None]
    assert slept == [10.0]
    assert inner.deadlines == [60, 50.0]
    late = await peer.fetch(wants(50, b"a", b"b"), 0.5)
    assert faults_of(late) == [PeerFault.LATE] * 2
    assert len(inner.deadlines) == 2
    clock.now += 100
    assert await peer.fetch(wants(50), 1) == [None]
    assert slept == [10.0]
    assert await peer.probe(3) == 3
    assert not peer.closed
    await peer.close()
    assert peer.closed
    with pytest.raises(ValueError, match="at least 1"):
        Throttled(inner, 0)


async def test_waiters_go_in_the_order_they_came() -> None:
    clock, slept = Clock(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    peer = Throttled(Scripted(), 100, clock=clock, sleep=sleep)
    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(peer.fetch(wants(100), 60))
    assert slept == [1.0, 2.0, 3.0]


async def test_what_goes_through_is_counted() -> None:
    clock, inner = Clock(), Scripted()

    async def wait() -> None:
        clock.now += 2

    inner.wait = wait
    peer = Measured(inner, clock)
    await peer.fetch(wants(10, b"a", b"gone", b"b"), 1)
    tally = peer.fetched
    assert (tally.calls, tally.ranges, tally.nbytes, tally.seconds) == (1, 3, 20, 2.0)
    assert tally.faults[PeerFault.MISSING] == sum(tally.faults.values()) == 1

    async def never() -> None:
        await asyncio.Event().wait()

    inner.wait = never
    async with asyncio.TaskGroup() as group:
        call = group.create_task(peer.fetch(wants(10), 1))
        await until(lambda: len(inner.deadlines) == 2)
        call.cancel()
    assert (peer.fetched.cancelled, peer.fetched.calls) == (1, 1)
