"""How fetches end before their time: late, cancelled, disconnected."""

import asyncio
import os
import random

import pytest

from tiercache.errors import PeerFault, Retry, TransportFault
from tiercache.testing.lenders import Lender, Target
from tiercache.testing.transport_pairs import (
    AMPLE_S,
    KIB,
    MIB,
    SLACK_S,
    SMALL,
    SOON_S,
    TransportUnderTest,
    faults_of,
    until,
)
from tiercache.transport.base import Peer


class EndingContract(TransportUnderTest):
    """What a `Transport` promises of fetches that do not come to their end."""

    def test_a_deadline_is_kept(self) -> None:
        """Whatever the peer does; and what it lends too late is released."""
        lender = Lender({b"k": MIB})

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                lender.held = []
                loop, target = asyncio.get_running_loop(), Target(b"k", MIB)
                began = loop.time()
                outcomes = await peer.fetch([target.want] * 2, SOON_S)
                assert faults_of(outcomes) == [PeerFault.LATE] * 2
                assert SOON_S / 2 < loop.time() - began < SLACK_S
                assert outcomes[0] is not None
                assert outcomes[0].retry is Retry.LATER
                assert faults_of(await peer.fetch([target.want], 0)) == [PeerFault.LATE]
                target.wipe()
                lender.give()
                await until(lambda: lender.loans == 0)
                assert await peer.probe(AMPLE_S) < AMPLE_S
                assert target.wiped
                assert await peer.fetch([target.want], AMPLE_S) == [None]
                assert target.right

        self.run(scenario)

    def test_nothing_keeps_a_target(self) -> None:
        """Afterwards its memory can be given back, whether the call ended or was cancelled."""
        lender = Lender({b"k": 900 * KIB})

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                for steps in (None, 0, 3, 6, 12):
                    memory = bytearray(900 * KIB)
                    view = memoryview(memory)
                    want = Target(b"k", 900 * KIB).want._replace(target=view)
                    async with asyncio.TaskGroup() as group:
                        call = group.create_task(peer.fetch([want], AMPLE_S))
                        if steps is not None:
                            for _ in range(steps):
                                await asyncio.sleep(0)
                            call.cancel()
                    view.release()
                    memory.clear()  # BufferError while somebody holds a view of it.

        self.run(scenario)

    def test_cancelled_at_any_instant(self) -> None:
        """The target is the caller's as soon as the call is gone: not one byte comes after that, no
        loan and no credit is lost, and the connection serves on."""
        sizes = {b"a": 3, b"b": 40 * KIB, b"c": 200 * KIB, b"d": 900 * KIB}
        lender, dice = Lender(sizes), random.Random(1)

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                wiped: list[Target] = []
                for number in range(self.CANCELS):
                    keys = dice.choices(list(sizes), (4, 4, 2, 1), k=dice.randint(1, 3))
                    targets = [Target(key, sizes[key]) for key in keys]
                    await self._cancelled(peer, targets, dice.choice((0, 1, 2, 4, 8, 16, 40)))
                    wiped += targets
                    if number % 20 == 0:
                        target = Target(b"c", sizes[b"c"])
                        assert await peer.fetch([target.want], AMPLE_S) == [None], number
                        assert target.right
                    while len(wiped) > 12:
                        assert wiped.pop(0).wiped
                await until(lambda: lender.loans == 0)
                assert await peer.probe(AMPLE_S) < AMPLE_S
                assert all(target.wiped for target in wiped)

        self.run(scenario)

    async def _cancelled(self, peer: Peer, targets: list[Target], steps: int) -> None:
        async def fetched() -> None:
            try:
                await peer.fetch([target.want for target in targets], AMPLE_S)
            finally:  # In the very step in which it returns.
                for target in targets:
                    assert target.guarded
                    target.wipe()

        async with asyncio.TaskGroup() as group:
            call = group.create_task(fetched())
            for _ in range(steps):
                await asyncio.sleep(0)
            call.cancel()

    def test_a_listener_that_closes(self) -> None:
        """Fetches that wait are LOST, at once, and everything lent is released."""
        lender = Lender({b"k": MIB})

        async def scenario() -> None:
            async with self.pair(lender) as (listener, peer):
                lender.held = []
                target = Target(b"k", MIB)
                async with asyncio.TaskGroup() as group:
                    call = group.create_task(peer.fetch([target.want], AMPLE_S))
                    await until(lambda: lender.asked == 1)
                    await listener.close()
                assert faults_of(call.result()) == [PeerFault.LOST]
                target.wipe()
                lender.give()
                assert lender.loans == 0
                assert target.wiped
                await until(lambda: peer.closed)
                assert faults_of(await peer.fetch([target.want], AMPLE_S)) == [PeerFault.LOST]
                with pytest.raises(TransportFault, match="lost"):
                    await peer.probe(AMPLE_S)
                await listener.close()

        self.run(scenario)

    def test_a_taker_that_closes(self) -> None:
        """Its own fetches are LOST, and what it was lent is released."""
        lender = Lender({b"k": 8 * MIB})

        async def scenario() -> None:
            async with self.pair(lender) as (listener, peer):
                assert listener.connections == 1
                target = Target(b"k", 8 * MIB)
                async with asyncio.TaskGroup() as group:
                    call = group.create_task(peer.fetch([target.want], AMPLE_S))
                    await until(lambda: lender.loans == 1)
                    await peer.close()
                assert faults_of(call.result()) == [PeerFault.LOST]
                target.wipe()
                await until(lambda: lender.loans == 0 and listener.connections == 0)
                assert target.wiped
                await peer.close()

        self.run(scenario)

    def test_nobody_there(self) -> None:
        """Is LOST, soon."""

        async def scenario() -> None:
            transport = self.transport("lender", SMALL)
            listener = await transport.listen(self.address(), Lender())
            address = listener.address
            await listener.close()
            with pytest.raises(TransportFault) as fault:
                await transport.dial(address, AMPLE_S)
            assert fault.value.fault is PeerFault.LOST
            assert fault.value.retry is Retry.LATER

        self.run(scenario)

    def test_says_who_asks(self) -> None:
        """A source hears the name of the one who asks."""
        lender = Lender({b"k": 1})

        async def scenario() -> None:
            async with self.pair(lender) as (_, peer):
                assert await peer.fetch([Target(b"k", 1).want], AMPLE_S) == [None]
            assert lender.peers == {"taker"}

        self.run(scenario)

    @pytest.mark.slow
    def test_reconnecting_leaves_nothing_behind(self) -> None:
        """No descriptor and no loan, however often."""
        lender = Lender({b"k": 100})

        async def scenario() -> None:
            async with self.pair(lender) as (listener, _):
                transport = self.transport("taker", SMALL)
                before = 0
                for number in range(self.RECONNECTS):
                    peer = await transport.dial(listener.address, AMPLE_S)
                    if number % 3:
                        target = Target(b"k", 100)
                        assert await peer.fetch([target.want], AMPLE_S) == [None]
                        assert target.right
                    await peer.close()
                    if number == 20:
                        await until(lambda: listener.connections == 1)
                        before = _descriptors()
                # Libraries that other tests loaded may open and close some in threads of their own.
                await until(lambda: _descriptors() <= before)

        self.run(scenario)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
