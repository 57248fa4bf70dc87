"""What a transport between processes must do when the other one is stopped, or dies."""

import asyncio
import signal
import time

import pytest

from tiercache.errors import PeerFault, TransportFault
from tiercache.testing.lenders import GUARD, Target
from tiercache.testing.lending import SIZES, LendingProcess
from tiercache.testing.transport_pairs import (
    AMPLE_S,
    SLACK_S,
    SMALL,
    TransportUnderTest,
    faults_of,
    until,
)

FROZEN_S = 0.3


class ProcessContract(TransportUnderTest):
    """Subclass it beside `TransportContract`; its transports must know the key of `lending`."""

    KIND = "tcp"

    @pytest.mark.slow
    def test_a_frozen_peer_costs_no_more_than_the_deadline(self) -> None:
        """In the middle of an object too; what comes when it wakes reaches no target."""

        async def scenario() -> None:
            with LendingProcess(self.KIND) as child:
                peer = await self.transport("taker", SMALL).dial(child.address, AMPLE_S)
                target = Target(b"large", SIZES[b"large"])
                async with asyncio.TaskGroup() as group:
                    call = group.create_task(peer.fetch([target.want], FROZEN_S))
                    await until(lambda: target.view[0] != GUARD)
                    child.process.send_signal(signal.SIGSTOP)
                    began = time.monotonic()
                assert faults_of(call.result()) in ([PeerFault.LATE], [None])
                assert time.monotonic() - began < FROZEN_S + SLACK_S
                target.wipe()
                began = time.monotonic()
                outcomes = await peer.fetch([Target(b"tiny", 1).want], FROZEN_S)
                assert faults_of(outcomes) in ([PeerFault.LATE], [PeerFault.LOST])
                with pytest.raises(TransportFault):
                    await peer.probe(FROZEN_S)
                assert time.monotonic() - began < 2 * FROZEN_S + SLACK_S
                child.process.send_signal(signal.SIGCONT)
                if peer.closed:
                    peer = await self.transport("taker", SMALL).dial(child.address, AMPLE_S)
                again = Target(b"small", SIZES[b"small"])
                assert await peer.fetch([again.want], AMPLE_S) == [None]
                assert again.right
                assert target.wiped
                await peer.close()

        self.run(scenario)

    @pytest.mark.slow
    def test_a_frozen_peer_is_not_dialled_for_ever(self) -> None:
        """The deadline covers the handshake."""

        async def scenario() -> None:
            with LendingProcess(self.KIND) as child:
                child.process.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                with pytest.raises(TransportFault) as fault:
                    await self.transport("taker", SMALL).dial(child.address, FROZEN_S)
                assert fault.value.fault is PeerFault.LATE
                assert time.monotonic() - began < FROZEN_S + SLACK_S

        self.run(scenario)

    @pytest.mark.slow
    def test_a_peer_that_is_killed(self) -> None:
        """In the middle of an object: LOST, long before the deadline, and nothing comes later."""

        async def scenario() -> None:
            with LendingProcess(self.KIND) as child:
                transport = self.transport("taker", SMALL)
                peer = await transport.dial(child.address, AMPLE_S)
                small, large = (Target(name, SIZES[name]) for name in (b"small", b"large"))
                wants = [small.want, *[large.want] * 8]
                async with asyncio.TaskGroup() as group:
                    call = group.create_task(peer.fetch(wants, AMPLE_S))
                    await until(lambda: large.view[0] != GUARD)
                    child.process.kill()
                    began = time.monotonic()
                assert time.monotonic() - began < SLACK_S
                outcomes = faults_of(call.result())
                assert outcomes[0] is None
                assert small.right
                assert outcomes[-1] is PeerFault.LOST
                large.wipe()
                assert peer.closed
                assert faults_of(await peer.fetch([small.want], AMPLE_S)) == [PeerFault.LOST]
                await peer.close()
                assert large.wiped

        self.run(scenario)
