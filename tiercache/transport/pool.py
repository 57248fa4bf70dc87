"""Connections to one peer, made when they are needed and kept: a peer made of peers."""

import asyncio
import time
from collections.abc import Callable, Sequence

from tiercache.errors import PeerFault, TransportFault
from tiercache.transport.base import Peer, Transport, Want

REST_S_MIN = 0.1
REST_S_MAX = 5.0
"""After a failed dial nobody dials for so long, doubling up to that; who asks meanwhile gets the same
fault at once."""


class Pool:
    """A `Peer` over at most `connections_max` connections, each dialled when all others are busy.

    A connection that ended is forgotten, and its fetches are not tried again: the caller knows what
    is worth it. After `close` every fetch fails with LOST.
    """

    def __init__(
        self,
        transport: Transport,
        address: str,
        connections_max: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if connections_max < 1:
            raise ValueError("connections_max must be at least 1")
        self._transport = transport
        self._address = address
        self._connections_max = connections_max
        self._clock = clock
        self._busy: dict[Peer, int] = {}  # Calls on each open connection.
        self._dialling = asyncio.Lock()
        self._rest_s = 0.0
        self._rest_until = 0.0
        self._fault = TransportFault(PeerFault.LOST, f"nobody was reached at {address}")
        self.closed = False

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return sum(not peer.closed for peer in self._busy)

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`. Dialling counts."""
        until = self._clock() + within_s
        try:
            peer = await self._taken(within_s)
        except TransportFault as fault:
            return [fault] * len(wants)
        try:
            return await peer.fetch(wants, until - self._clock())
        finally:
            self._give_back(peer)

    async def ask(self, body: bytes, within_s: float) -> bytes:
        """See `Peer.ask`. Dialling counts."""
        until = self._clock() + within_s
        peer = await self._taken(within_s)
        try:
            return await peer.ask(body, until - self._clock())
        finally:
            self._give_back(peer)

    async def probe(self, within_s: float) -> float:
        """See `Peer.probe`: of one connection."""
        until = self._clock() + within_s
        peer = await self._taken(within_s)
        try:
            return await peer.probe(until - self._clock())
        finally:
            self._give_back(peer)

    async def close(self) -> None:
        """See `Peer.close`."""
        self.closed = True
        self._fault = TransportFault(PeerFault.LOST, f"the pool of {self._address} is closed")
        for peer in list(self._busy):
            await peer.close()
        self._busy.clear()

    async def _taken(self, within_s: float) -> Peer:
        """Return a connection, counted as busy. Raises TransportFault."""
        peer = self._best()
        if peer is None or (self._busy[peer] and self._may_dial() and not self._dialling.locked()):
            try:
                async with asyncio.timeout(within_s), self._dialling:
                    peer = await self._best_or_new(within_s)
            except TimeoutError:
                text = f"{self._address} did not answer in time"
                raise TransportFault(PeerFault.LATE, text) from None
        self._busy[peer] = self._busy.get(peer, 0) + 1
        return peer

    async def _best_or_new(self, within_s: float) -> Peer:
        peer = self._best()
        if peer is not None and not (self._busy[peer] and self._may_dial()):
            return peer
        try:
            return await self._dialled(within_s)
        except TransportFault:
            if peer is None or peer.closed:
                raise
            return peer

    def _best(self) -> Peer | None:
        """Return the least busy connection that is open."""
        if self.closed:
            raise self._fault
        for peer in [peer for peer in self._busy if peer.closed]:
            del self._busy[peer]
        return min(self._busy, key=self._busy.__getitem__, default=None)

    def _may_dial(self) -> bool:
        return len(self._busy) < self._connections_max

    async def _dialled(self, within_s: float) -> Peer:
        if self._clock() < self._rest_until:
            raise self._fault
        try:
            peer = await self._transport.dial(self._address, within_s)
        except TransportFault as fault:
            self._fault = fault
            self._rest_s = min(max(2 * self._rest_s, REST_S_MIN), REST_S_MAX)
            self._rest_until = self._clock() + self._rest_s
            raise
        self._rest_s = 0.0
        if self.closed:
            await peer.close()
            raise self._fault
        self._busy[peer] = 0
        return peer

    def _give_back(self, peer: Peer) -> None:
        if peer in self._busy:
            self._busy[peer] -= 1
