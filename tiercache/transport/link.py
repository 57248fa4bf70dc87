"""What both ends of a stream share: bytes of a socket in, bodies of messages out."""

import asyncio
import socket
from typing import cast

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.transport.handshake import Agreed
from tiercache.transport.stream import Inlet

GREETING_BYTES_MAX = 4 << 10
"""Largest frame before the handshake is over: strangers get no more memory than this."""


class Link(asyncio.BufferedProtocol):
    """One end of one connection. What is heard goes to `_heard`, whatever the loop hands over."""

    def __init__(self) -> None:
        self._inlet = Inlet(GREETING_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self.agreed: Agreed | None = None
        self.over = False

    @property
    def inlet(self) -> Inlet:
        """Where received bytes go."""
        return self._inlet

    @property
    def host(self) -> str:
        """The address of the other end, "" for a Unix socket."""
        assert self._transport is not None
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    @property
    def socket(self) -> socket.socket:
        """The socket below, for its options."""
        assert self._transport is not None
        return cast("socket.socket", self._transport.get_extra_info("socket"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        self._transport = cast("asyncio.Transport", transport)
        # Nothing may wait in the loop's buffers unknown to us: lent memory is in them. (A limit of
        # nothing makes asyncio's TLS pause for ever.)
        tls = transport.get_extra_info("ssl_object") is not None
        self._transport.set_write_buffer_limits(high=int(tls), low=0)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        return self._inlet.space()

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        inlet = self._inlet
        inlet.filled(nbytes)
        try:
            while not self.over and (body := inlet.next()) is not None:
                self._heard(body)
        except (ProtocolError, TransportFault) as fault:
            self._wrong(fault)
            return
        self._after()

    def eof_received(self) -> bool:
        """See asyncio.BaseProtocol."""
        return False

    def pause_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._paused = True

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        self._paused = False

    def abort(self) -> None:
        """End the connection at once. Idempotent."""
        self.over = True
        if self._transport is not None:
            self._transport.abort()

    def _heard(self, body: memoryview) -> None:
        raise NotImplementedError

    def _after(self) -> None:
        """All that was received is dealt with."""

    def _wrong(self, fault: ProtocolError | TransportFault) -> None:
        raise NotImplementedError


def as_fault(fault: ProtocolError | TransportFault) -> TransportFault:
    """Return a fault that says of a connection why it ended."""
    if isinstance(fault, TransportFault):
        return fault
    return TransportFault(PeerFault.PROTOCOL, str(fault))
