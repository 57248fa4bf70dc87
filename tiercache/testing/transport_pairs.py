"""How contracts of transports get at what they test, and what they all need."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ClassVar

import uvloop

from tiercache.errors import PeerFault, TransportFault
from tiercache.testing.lenders import Lender
from tiercache.transport.base import Limits, Listener, Peer, Transport

SMALL = Limits(chunk_bytes_max=64 << 10, window_bytes=256 << 10, calls_max=64, batch_max=64)
"""Limits that a test reaches."""

AMPLE_S = 60.0
"""A deadline that is not meant to pass."""

SOON_S = 0.05
SLACK_S = 5.0
"""How late a deadline may be noticed on a machine that others use."""

KIB = 1 << 10
MIB = 1 << 20


def faults_of(outcomes: list[TransportFault | None]) -> list[PeerFault | None]:
    """Return how each want failed."""
    return [outcome.fault if outcome else None for outcome in outcomes]


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until `condition` holds; TimeoutError when it never does."""
    async with asyncio.timeout(AMPLE_S):
        while not condition():  # noqa: ASYNC110 (the condition is no event)
            await asyncio.sleep(0)


class TransportUnderTest:
    """How a contract gets at a transport."""

    CANCELS: ClassVar[int] = 5000
    RECONNECTS: ClassVar[int] = 10_000

    def transport(self, node: str, limits: Limits) -> Transport:
        """Return a transport of the kind under test; all of one test find each other."""
        raise NotImplementedError

    def address(self) -> str:
        """Return where a listener of this test may listen."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let go of what `transport` made; its event loop is still running."""

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return a new event loop."""
        return uvloop.new_event_loop()

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        """Run a scenario to its end; nothing of it may be left."""

        async def whole() -> None:
            before = asyncio.all_tasks()
            try:
                await scenario()
            finally:
                self.finish()
            assert asyncio.all_tasks() <= before

        with asyncio.Runner(loop_factory=self.loop) as runner:
            runner.run(whole())

    @asynccontextmanager
    async def pair(
        self, lender: Lender, limits: Limits = SMALL
    ) -> AsyncIterator[tuple[Listener, Peer]]:
        """Yield a listener and a peer that dialled it; afterwards nothing is lent any more."""
        listener = await self.transport("lender", limits).listen(self.address(), lender)
        try:
            peer = await self.transport("taker", limits).dial(listener.address, AMPLE_S)
            try:
                yield listener, peer
            finally:
                await peer.close()
        finally:
            await listener.close()
        assert listener.connections == 0
        assert lender.loans == 0
        assert lender.unchanged()
