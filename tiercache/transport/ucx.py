"""UCX, for fabrics that have more than TCP: an extra, through `ucxx`.

Messages go over UCX streams, chunks as tagged messages straight from and into the memory of both
ends.

UCX listens at every address of the machine and keeps what comes before anybody asked for it. So a shared
key is required, and it is meant for networks whose machines are trusted.
"""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Final

from tiercache.errors import ConfigError, PeerFault, TransportFault
from tiercache.transport.base import Source, Want
from tiercache.transport.handshake import End
from tiercache.transport.lending import Lending
from tiercache.transport.messages import NONCE_BYTES
from tiercache.transport.security import Place, SharedKey, place_of
from tiercache.transport.taking import Taking
from tiercache.transport.ucx_pipe import CLOSE_NS_MAX, Pipe, Ucx, Worker

GRACE_S: Final = 0.5
"""A chunk that is on its way into a target that was let go may take so long; then the connection is
ended, since UCX cannot take a receive back."""


class UcxTaking(Taking):
    """A `Peer` over UCX. A call may last `GRACE_S` longer than its deadline says."""

    pipe: Pipe

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`."""
        try:
            return await super().fetch(wants, within_s)
        finally:
            while self.pipe.direct is not None and self.pipe.direct.gone:
                await self._hands_off()

    async def _hands_off(self) -> None:
        """Return when UCX no longer writes into what was let go, whatever it takes."""
        received = self.pipe.received
        assert received is not None
        timer = self._loop.call_later(GRACE_S, self.abort)
        cancelled: asyncio.CancelledError | None = None
        while not received.done():
            try:
                await asyncio.wait([received])
            except asyncio.CancelledError as again:
                cancelled = again
        timer.cancel()
        if cancelled is not None:
            raise cancelled


class UcxListener:
    """A `Listener` of UCX, at every address of this machine."""

    def __init__(self, worker: Worker, end: End, source: Source, place: Place) -> None:
        self._worker = worker
        self._end = end
        self._source = source
        self._host = place.host
        self._open: set[Lending] = set()
        self._pipes: set[Pipe] = set()
        try:
            self._listener: Ucx = worker.ucx.UCXListener.create(
                worker.worker, place.port, self._accept, deliver_endpoint=True
            )
        except worker.ucx.UCXError as error:
            raise ConfigError(f"cannot listen at {place}: {error}") from error
        self._port = int(self._listener.port)
        limits = end.limits
        self._tick_s = min(limits.serve_s_max, limits.stall_s_max, limits.idle_s_max, 4.0) / 4
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    @property
    def address(self) -> str:
        """See `Listener.address`."""
        return str(Place(self._host, self._port))

    @property
    def connections(self) -> int:
        """See `Listener.connections`."""
        return len(self._open)

    async def close(self) -> None:
        """See `Listener.close`."""
        self._timer.cancel()
        self._listener = None
        ends = [each.lost for each in self._open]
        for each in list(self._open):
            each.abort()
        if ends:
            await asyncio.wait(ends)

    def _accept(self, endpoint: Ucx) -> None:
        # Called by UCX while it works: nothing of UCX may be called here.
        self._loop.call_soon(self._accepted, endpoint)

    def _accepted(self, endpoint: Ucx) -> None:
        if self._listener is None:
            endpoint.close_blocking(period=CLOSE_NS_MAX, max_attempts=1)
            return
        link = Lending(self._end, self._source, secrets.token_bytes(NONCE_BYTES), self._open)
        Pipe(self._worker, endpoint, link)

    def _tick(self) -> None:
        for each in list(self._open):
            each.tick(self._loop.time())
        self._timer = self._loop.call_later(self._tick_s, self._tick)


class UcxTransport:
    """A `Transport` over UCX ("10.0.0.7:7411"), made in the event loop that it works in.

    `options` are UCX's own, without their prefix: {"NET_DEVICES": "mlx5_0:1"}.
    """

    def __init__(self, end: End, options: dict[str, str] | None = None) -> None:
        if not isinstance(end.security, SharedKey):
            raise ConfigError("UCX listens at every address: it needs a shared key")
        self._end = end
        self._worker = Worker(options or {})

    async def listen(self, address: str, source: Source) -> UcxListener:
        """See `Transport.listen`. Of the address, only the port is used to listen."""
        return UcxListener(self._worker, self._end, source, _place(address))

    async def dial(self, address: str, within_s: float) -> UcxTaking:
        """See `Transport.dial`."""
        place = _place(address)
        worker = self._worker
        try:
            endpoint = worker.ucx.UCXEndpoint.create(worker.worker, place.host, place.port, True)
        except worker.ucx.UCXError as error:
            raise TransportFault(PeerFault.LOST, f"{address}: {error}") from error
        peer = UcxTaking(self._end, secrets.token_bytes(NONCE_BYTES))
        peer.pipe = Pipe(worker, endpoint, peer)
        try:
            async with asyncio.timeout(within_s):
                await peer.greet()
        except TimeoutError:
            await peer.close()
            raise TransportFault(PeerFault.LATE, f"{address} did not answer in time") from None
        except BaseException:
            peer.abort()
            raise
        return peer

    def close(self) -> None:
        """Let go of the loop, when all listeners and peers are closed."""
        self._worker.close()


def _place(address: str) -> Place:
    place = place_of(address)
    if place.path:
        raise ConfigError(f"UCX cannot use {address}: a host and a port, please")
    return place
