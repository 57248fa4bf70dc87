"""TCP, and Unix sockets: straight from the memory of one node into that of the other.

Received bytes go from the kernel into their target, sent ones from the lent memory to the kernel:
nothing is gathered in between. Made for uvloop; asyncio's own loop copies what it sends.
"""

import asyncio
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from tiercache.errors import ConfigError, PeerFault, ProtocolError, TransportFault
from tiercache.transport.base import Source
from tiercache.transport.handshake import End
from tiercache.transport.lending import Lending
from tiercache.transport.messages import NONCE_BYTES
from tiercache.transport.security import (
    MutualTls,
    Place,
    Plain,
    check_place,
    is_loopback,
    place_of,
)
from tiercache.transport.taking import Taking

DEAD_MS_MAX = 30_000
"""The kernel ends a connection whose bytes are not acknowledged for so long."""

TICKS = 4
"""How often a limit in seconds is looked at before it is over."""


class TcpListener:
    """A `Listener` of TCP or a Unix socket."""

    def __init__(self, end: End, source: Source, place: Place) -> None:
        self._end = end
        self._source = source
        self._place = place
        self.open: set[Lending] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._inode = (0, 0)
        limits = end.limits
        self._tick_s = min(limits.serve_s_max, limits.stall_s_max, limits.idle_s_max, TICKS) / TICKS

    @property
    def address(self) -> str:
        """See `Listener.address`."""
        return str(self._place)

    @property
    def connections(self) -> int:
        """See `Listener.connections`."""
        return len(self.open)

    async def start(self) -> None:
        """Begin to listen; raises ConfigError."""
        loop = asyncio.get_running_loop()
        security = self._end.security
        options: dict[str, Any] = {}
        if isinstance(security, MutualTls):
            options["ssl"] = security.listening
            options["ssl_handshake_timeout"] = self._end.limits.handshake_s_max
        try:
            if self._place.path:
                sock = _unix_socket(self._place.path)
                found = os.stat(self._place.path)
                self._inode = (found.st_dev, found.st_ino)
                self._server = await loop.create_unix_server(self._accept, sock=sock, **options)
            else:
                self._server = await loop.create_server(
                    self._accept, self._place.host, self._place.port, **options
                )
                port = self._server.sockets[0].getsockname()[1]
                self._place = Place(self._place.host, port)
        except OSError as error:
            raise ConfigError(f"cannot listen at {self._place}: {error}") from error
        self._timer = loop.call_later(self._tick_s, self._tick)

    async def close(self) -> None:
        """See `Listener.close`."""
        if self._timer is not None:
            self._timer.cancel()
        server, self._server = self._server, None
        if server is not None:
            server.close()
            if self._place.path:
                self._unlink()
        ends = [each.lost for each in self.open]
        for each in list(self.open):
            each.abort()
        if ends:
            await asyncio.wait(ends)
        if server is not None:
            await server.wait_closed()

    def _unlink(self) -> None:
        with suppress(OSError):
            found = os.stat(self._place.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self._place.path)

    def _accept(self) -> Lending:
        return Lending(self._end, self._source, secrets.token_bytes(NONCE_BYTES), self.open)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for each in list(self.open):
            each.tick(loop.time())
        self._timer = loop.call_later(self._tick_s, self._tick)


class TcpTransport:
    """A `Transport` over TCP ("10.0.0.7:7411") and Unix sockets ("unix:PATH")."""

    def __init__(self, end: End) -> None:
        self._end = end

    async def listen(self, address: str, source: Source) -> TcpListener:
        """See `Transport.listen`."""
        place = place_of(address)
        check_place(place, self._end.security)
        listener = TcpListener(self._end, source, place)
        await listener.start()
        return listener

    async def dial(self, address: str, within_s: float) -> Taking:
        """See `Transport.dial`."""
        place = place_of(address)
        check_place(place, self._end.security)
        peer = Taking(self._end, secrets.token_bytes(NONCE_BYTES))
        try:
            async with asyncio.timeout(within_s):
                await self._connect(place, lambda: peer)
                self._prepare(place, peer)
                await peer.greet()
        except BaseException as error:
            peer.abort()
            raise _said(error, address) from error
        return peer

    def _connect(
        self, place: Place, make: Callable[[], Taking]
    ) -> Coroutine[Any, Any, tuple[asyncio.BaseTransport, Taking]]:
        loop = asyncio.get_running_loop()
        security = self._end.security
        options: dict[str, Any] = {}
        if isinstance(security, MutualTls):
            options["ssl"] = security.dialling
            options["server_hostname"] = security.peer_name or place.host
        if place.path:
            return loop.create_unix_connection(make, place.path, **options)
        return loop.create_connection(make, place.host, place.port, **options)

    def _prepare(self, place: Place, peer: Taking) -> None:
        if place.path:
            return
        if isinstance(self._end.security, Plain) and not is_loopback(peer.host):
            raise ConfigError(f"{place} is {peer.host}: not on this machine")
        sock = peer.socket
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_MS_MAX)


def _unix_socket(path: str) -> socket.socket:
    """Return a bound socket that only this user may connect to, from its first moment on."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


def _said(error: BaseException, address: str) -> BaseException:
    """Return what a failure to connect is called here."""
    match error:
        case TimeoutError():
            return TransportFault(PeerFault.LATE, f"{address} did not answer in time")
        case ssl.SSLError():
            return TransportFault(PeerFault.REFUSED, f"{address}: {error}")
        case ProtocolError():
            return TransportFault(PeerFault.PROTOCOL, f"{address}: {error}")
        case OSError():
            return TransportFault(PeerFault.LOST, f"{address}: {error}")
    return error
