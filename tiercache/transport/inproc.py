"""The reference transport: two nodes in one process. What the others must behave like."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import xxhash

from tiercache.errors import ConfigError, PeerFault, TransportFault
from tiercache.transport.base import Asked, Lent, Limits, Loan, Source, Want, check_wants
from tiercache.transport.serving import release


@dataclass(slots=True)
class Space:
    """Where nodes of one process find each other: listeners by their address."""

    listeners: "dict[str, InprocListener]" = field(default_factory=dict)


class InprocListener:
    """A `Listener` that is only a name."""

    def __init__(self, space: Space, address: str, source: Source) -> None:
        self._space = space
        self.address = address
        self.source = source
        self.peers: set[InprocPeer] = set()

    @property
    def connections(self) -> int:
        """See `Listener.connections`."""
        return len(self.peers)

    async def close(self) -> None:
        """See `Listener.close`."""
        if self._space.listeners.get(self.address) is self:
            del self._space.listeners[self.address]
        for peer in list(self.peers):
            await peer.close()


class InprocPeer:
    """A `Peer` that copies, a chunk at a time, and lets others run in between."""

    def __init__(self, node: str, listener: InprocListener, limits: Limits) -> None:
        self._node = node
        self._listener = listener
        self._limits = limits
        self._waiting: set[asyncio.Future[Sequence[Lent]]] = set()
        self._asking: set[asyncio.Future[bytes]] = set()
        self._calls = 0
        self.closed = False
        listener.peers.add(self)

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`."""
        check_wants(wants, self._limits.batch_max)
        if within_s <= 0:
            return [TransportFault(PeerFault.LATE, "no time was left")] * len(wants)
        if self._calls >= self._limits.calls_max:
            return [TransportFault(PeerFault.BUSY, "too many calls wait")] * len(wants)
        late = TransportFault(PeerFault.LATE, "the deadline passed")
        outcomes: list[TransportFault | None] = [late] * len(wants)
        self._calls += 1
        try:
            async with asyncio.timeout(within_s):
                await self._fetch(wants, outcomes)
        except TimeoutError:
            pass  # What has no other outcome is late.
        finally:
            self._calls -= 1
        return outcomes

    async def ask(self, body: bytes, within_s: float) -> bytes:
        """See `Peer.ask`."""
        if self.closed:
            raise _lost()
        if within_s <= 0:
            raise TransportFault(PeerFault.LATE, "no time was left")
        if len(body) > self._limits.frame_bytes_max:
            raise ValueError(f"a question of {len(body)} bytes; {self._limits.frame_bytes_max} go")
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asking.add(waiting)

        def answer(said: bytes) -> None:
            if waiting.done():
                return
            if len(said) > self._limits.frame_bytes_max:
                waiting.set_exception(TransportFault(PeerFault.MISMATCH, "the answer is too large"))
            else:
                waiting.set_result(said)

        self._listener.source.ask(self._node, body, answer)
        try:
            async with asyncio.timeout(within_s):
                return await waiting
        except TimeoutError:
            raise TransportFault(PeerFault.LATE, "no answer to a question") from None
        finally:
            self._asking.discard(waiting)

    async def probe(self, within_s: float) -> float:
        """See `Peer.probe`."""
        if self.closed:
            raise _lost()
        if within_s <= 0:
            raise TransportFault(PeerFault.LATE, "no time was left")
        began = monotonic()
        await asyncio.sleep(0)
        return monotonic() - began

    async def close(self) -> None:
        """See `Peer.close`."""
        self.closed = True
        self._listener.peers.discard(self)
        everybody: list[asyncio.Future[Any]] = [*self._waiting, *self._asking]
        for waiting in everybody:
            if not waiting.done():
                waiting.set_exception(_lost())

    async def _fetch(self, wants: Sequence[Want], outcomes: list[TransportFault | None]) -> None:
        if self.closed:
            outcomes[:] = [_lost()] * len(wants)
            return
        waiting: asyncio.Future[Sequence[Lent]] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)

        def answer(lent: Sequence[Lent]) -> None:
            if waiting.done():
                release(lent)
            else:
                waiting.set_result(lent)

        asked = [Asked(w.key, w.object_bytes, w.offset, len(w.target)) for w in wants]
        self._listener.source.lend(self._node, asked, answer)
        try:
            lent = await waiting
        except TransportFault as fault:
            outcomes[:] = [fault] * len(wants)
            return
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and not waiting.exception():
                release(waiting.result())
            raise
        finally:
            self._waiting.discard(waiting)
        try:
            for index, want in enumerate(wants):
                outcomes[index] = await self._copy(want, lent[index])
        finally:
            release(lent)

    async def _copy(self, want: Want, lent: Lent) -> TransportFault | None:
        if not isinstance(lent, Loan):
            return TransportFault(lent, "says the peer")
        if len(lent.view) != want.object_bytes:
            return TransportFault(PeerFault.MISMATCH, f"the object has {len(lent.view)} bytes")
        nbytes, step = len(want.target), self._limits.chunk_bytes_max
        for at in range(0, nbytes, step):
            stop = min(at + step, nbytes)
            want.target[at:stop] = lent.view[want.offset + at : want.offset + stop]
            await asyncio.sleep(0)
            if self.closed:
                return _lost()
        found = xxhash.xxh3_128_digest(want.target)
        whole = nbytes == want.object_bytes
        if (whole and found != lent.checksum) or (want.checksum and found != want.checksum):
            return TransportFault(PeerFault.DAMAGED, "not the bytes that were sealed")
        return None


class InprocTransport:
    """A `Transport` inside a process; an address is any text."""

    def __init__(self, node: str, space: Space, limits: Limits | None = None) -> None:
        self._node = node
        self._space = space
        self._limits = limits or Limits()

    async def listen(self, address: str, source: Source) -> InprocListener:
        """See `Transport.listen`."""
        if address in self._space.listeners:
            raise ConfigError(f"somebody listens at {address!r}")
        listener = InprocListener(self._space, address, source)
        self._space.listeners[address] = listener
        return listener

    async def dial(self, address: str, within_s: float) -> InprocPeer:
        """See `Transport.dial`."""
        await asyncio.sleep(0)
        listener = self._space.listeners.get(address)
        if listener is None or within_s <= 0:
            raise TransportFault(PeerFault.LOST, f"nobody listens at {address!r}")
        return InprocPeer(self._node, listener, self._limits)


def _lost() -> TransportFault:
    return TransportFault(PeerFault.LOST, "the connection ended")
