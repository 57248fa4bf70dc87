"""The end of a stream that listened: lends what its source has."""

import asyncio
import socket
from collections.abc import Sequence
from functools import partial

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.transport.base import Lent, Source
from tiercache.transport.handshake import End, Listening, refusal
from tiercache.transport.link import Link
from tiercache.transport.serving import Part, Question, Request, ServeSide
from tiercache.transport.stream import framed


class Lending(Link):
    """One connection of a listener. It puts itself into `everyone`, and out again when it is over."""

    def __init__(self, end: End, source: Source, nonce: bytes, everyone: "set[Lending]") -> None:
        super().__init__()
        self._end = end
        self._source = source
        self._everyone = everyone
        self._handshake = Listening(end, nonce)
        self._greeted = False
        self._side: ServeSide | None = None
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._written_at = self.born_at = self._loop.time()
        self._reading = True
        self._pumping = False
        self.lost: asyncio.Future[None] = self._loop.create_future()

    @property
    def unpaid(self) -> int:
        """Bytes that were sent and not credited."""
        return self._side.unpaid if self._side is not None else 0

    @property
    def backlog(self) -> int:
        """Replies that wait for the other end to read."""
        return self._side.backlog if self._side is not None else 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait in the loop to be taken by the kernel."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.BaseProtocol."""
        super().connection_made(transport)
        sock, nbytes = transport.get_extra_info("socket"), self._end.limits.send_buffer_bytes
        if nbytes and sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        strangers = [each for each in self._everyone if each.agreed is None]
        if len(strangers) >= self._end.limits.connections_max:
            min(strangers, key=lambda each: each.born_at).abort()
        self._everyone.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        self.over = True
        self._everyone.discard(self)
        if self._side is not None:
            self._side.close()
        if not self.lost.done():
            self.lost.set_result(None)

    def resume_writing(self) -> None:
        """See asyncio.BaseProtocol."""
        super().resume_writing()
        self._written_at = self._loop.time()
        if self._side is not None:
            self._side.left()
            self._pump()

    def tick(self, now: float) -> None:
        """Drop what is late; end the connection when its other end does nothing."""
        limits = self._end.limits
        if self._side is None:
            if now - self.born_at > limits.handshake_s_max:
                self.abort()
            return
        self._side.expire(now)
        if self._paused:
            if now - self._written_at > limits.stall_s_max:
                self.abort()
            return
        if not self._side.calls and now - self._heard_at > limits.idle_s_max:
            self.abort()
            return
        self._pump()

    def _heard(self, body: memoryview) -> None:
        self._heard_at = self._loop.time()
        side = self._side
        if side is None:
            self._greet(body)
            return
        request = side.take(body, self._heard_at)
        if request is None or self.agreed is None:
            return
        if isinstance(request, Question):
            self._source.ask(self.agreed.peer, request.body, partial(self._told, request))
        else:
            self._source.lend(self.agreed.peer, request.asked, partial(self._lent, request))

    def _greet(self, body: memoryview) -> None:
        if not self._greeted:
            challenge = self._handshake.greeted(body)
            self._greeted = True
            self._write([(challenge, None)])
            return
        ready, agreed = self._handshake.answered(body)
        peers_max = self._end.limits.connections_max
        if sum(each.agreed is not None for each in self._everyone) >= peers_max:
            raise TransportFault(PeerFault.BUSY, f"{peers_max} peers are connected")
        self._write([(ready, None)])
        self.agreed = agreed
        self._side = ServeSide(agreed, self._end.limits)
        self._inlet.frame_bytes_max = agreed.frame_bytes_max

    def _lent(self, request: Request, lent: Sequence[Lent]) -> None:
        assert self._side is not None
        self._side.lent(request, lent)
        self._pump()

    def _told(self, question: Question, answer: bytes) -> None:
        assert self._side is not None
        self._side.told(question, answer)
        self._pump()

    def _after(self) -> None:
        self._pump()

    def _pump(self) -> None:
        side, transport = self._side, self._transport
        if side is None or transport is None or self._pumping:
            return
        self._pumping = True  # A source that answers at once comes back here.
        try:
            while not self._paused and not self.over:
                parts = side.next()
                if not parts:
                    break
                self._write(parts)
                if not self._paused:
                    side.left()
        finally:
            self._pumping = False
        if side.full == self._reading and not self.over:
            self._reading = not side.full
            (transport.resume_reading if self._reading else transport.pause_reading)()

    def _write(self, parts: Sequence[Part]) -> None:
        assert self._transport is not None
        buffers: list[bytes | memoryview] = []
        gathered = b""
        for body, raw in parts:
            gathered += framed(body)
            if raw is not None:
                buffers += [gathered, raw]
                gathered = b""
        if gathered:
            buffers.append(gathered)
        self._written_at = self._loop.time()
        self._transport.writelines(buffers)

    def _wrong(self, fault: ProtocolError | TransportFault) -> None:
        """Say why, as far as the other end listens, and end the connection."""
        self.over = True
        if self._transport is not None and not self._transport.is_closing():
            if not self._paused:
                self._transport.write(framed(refusal(fault)))
            self._transport.close()
