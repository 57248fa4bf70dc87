"""The end of a stream that dialled: a `Peer`."""

import asyncio
import ssl
from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Any

from tiercache.errors import PeerFault, ProtocolError, TransportFault
from tiercache.transport.base import WITHIN_S_MAX, Want, check_wants
from tiercache.transport.fetching import FetchSide, Outcomes, Ponged, Settled, Told
from tiercache.transport.handshake import Agreed, Dialling, End
from tiercache.transport.link import Link, as_fault
from tiercache.transport.stream import framed


class Taking(Link):
    """A `Peer` at the other end of a stream."""

    def __init__(self, end: End, nonce: bytes) -> None:
        super().__init__()
        self._end = end
        self._dialling = Dialling(end, nonce)
        self._side: FetchSide | None = None
        self._loop = asyncio.get_running_loop()
        self._agreed: asyncio.Future[Agreed] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, asyncio.Future[Outcomes]] = {}
        self._deadlines: dict[int, float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = inf
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._challenged = False
        self._why = TransportFault(PeerFault.LOST, "the connection ended")

    async def greet(self) -> Agreed:
        """Shake hands. Raises TransportFault."""
        self._send(self._dialling.hello())
        return await self._agreed

    @property
    def closed(self) -> bool:
        """See `Peer.closed`."""
        return self.over

    @property
    def owed(self) -> int:
        """Bytes that arrived, for which no credit was given yet."""
        return self._side.owed if self._side is not None else 0

    @property
    def waiting(self) -> int:
        """Calls that the peer is not done with."""
        return self._side.waiting if self._side is not None else 0

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`."""
        if not wants:
            return []
        within_s = min(within_s, WITHIN_S_MAX)
        try:
            side = self._ready(within_s)
            call, body = side.ask(wants, int(within_s * 1e3))
        except TransportFault as fault:
            check_wants(wants, self._end.limits.batch_max)
            return [fault] * len(wants)
        waiting: asyncio.Future[Outcomes] = self._loop.create_future()
        self._waiting[call] = waiting
        self._send(body)
        self._deadlines[call] = deadline = self._loop.time() + within_s
        if deadline < self._alarm_at:
            self._set_alarm(deadline)
        try:
            return await waiting
        finally:
            del self._waiting[call]
            del self._deadlines[call]
            self._send(side.let_go(call))

    async def ask(self, body: bytes, within_s: float) -> bytes:
        """See `Peer.ask`."""
        side = self._ready(within_s)
        call, frame = side.question(body, int(within_s * 1e3))
        waiting: asyncio.Future[bytes] = self._loop.create_future()
        self._questions[call] = waiting
        self._send(frame)
        try:
            async with asyncio.timeout(within_s):
                return await waiting
        except TimeoutError:
            raise TransportFault(PeerFault.LATE, "no answer to a question") from None
        finally:
            del self._questions[call]
            self._send(side.let_go(call))

    async def probe(self, within_s: float) -> float:
        """See `Peer.probe`."""
        side = self._ready(within_s)
        call, body = side.ping()
        waiting: asyncio.Future[None] = self._loop.create_future()
        began = monotonic()
        self._pings[call] = waiting
        self._send(body)
        try:
            async with asyncio.timeout(within_s):
                await waiting
        except TimeoutError:
            raise TransportFault(PeerFault.LATE, "no answer to a probe") from None
        finally:
            del self._pings[call]
        return monotonic() - began

    async def close(self) -> None:
        """See `Peer.close`."""
        self.abort()
        if self._transport is not None:
            await asyncio.shield(self._lost)

    def abort(self) -> None:
        """See `Link.abort`."""
        self._end_calls()
        super().abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.BaseProtocol."""
        if isinstance(exc, ssl.SSLError):
            self._why = TransportFault(PeerFault.REFUSED, str(exc))
        self.over = True
        self._end_calls()
        if self._alarm is not None:
            self._alarm.cancel()
        if not self._lost.done():
            self._lost.set_result(None)

    def _ready(self, within_s: float) -> FetchSide:
        if self.over or self._side is None or self._transport is None:
            raise TransportFault(PeerFault.LOST, self._why.detail)
        if within_s <= 0:
            raise TransportFault(PeerFault.LATE, "no time was left")
        if self._transport.get_write_buffer_size() > self._end.limits.frame_bytes_max:
            raise TransportFault(PeerFault.BUSY, "the peer does not read its requests")
        return self._side

    def _set_alarm(self, at: float) -> None:
        """One timer for all calls: most of them end before it has to ring."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, inf
        now = self._loop.time()
        for call, deadline in self._deadlines.items():
            if deadline <= now:
                self._late(call)
        later = min((each for each in self._deadlines.values() if each > now), default=inf)
        if later < inf:
            self._set_alarm(later)

    def _late(self, call: int) -> None:
        waiting = self._waiting[call]
        if waiting.done() or self._side is None:
            return
        late = TransportFault(PeerFault.LATE, "the deadline passed")
        outcomes, body = self._side.give_up(call, late)
        self._send(body)
        waiting.set_result(outcomes)

    def _heard(self, body: memoryview) -> None:
        side = self._side
        if side is None:
            self._greeted(body)
            return
        landing = side.take(body)
        if landing is not None:
            self._inlet.land(landing)

    def _greeted(self, body: memoryview) -> None:
        if not self._challenged:
            self._send(self._dialling.challenged(body))
            self._challenged = True
            return
        agreed = self._dialling.ready(body)
        self.agreed = agreed
        self._side = FetchSide(agreed)
        self._inlet.frame_bytes_max = agreed.frame_bytes_max
        if not self._agreed.done():
            self._agreed.set_result(agreed)

    def _after(self) -> None:
        side = self._side
        if side is None:
            return
        for event in side.events():
            match event:
                case Settled(call, outcomes):
                    waiting = self._waiting.get(call)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(outcomes)
                case Told(call, answer):
                    asked = self._questions.get(call)
                    if asked is None or asked.done():
                        continue
                    if isinstance(answer, TransportFault):
                        asked.set_exception(answer)
                    else:
                        asked.set_result(answer)
                case Ponged(call):
                    ping = self._pings.get(call)
                    if ping is not None and not ping.done():
                        ping.set_result(None)
        self._send(side.credit())

    def _wrong(self, fault: ProtocolError | TransportFault) -> None:
        self._why = as_fault(fault)
        self.abort()

    def _end_calls(self) -> None:
        if self._side is not None:
            for settled in self._side.close(self._why):
                waiting = self._waiting.get(settled.call)
                if waiting is not None and not waiting.done():
                    waiting.set_result(settled.outcomes)
        others: list[asyncio.Future[Any]] = [*self._pings.values(), *self._questions.values()]
        for each in others:
            if not each.done():
                each.set_exception(self._why)
        if not self._agreed.done():
            self._agreed.set_exception(self._why)
            self._agreed.exception()  # Nobody may be waiting for it.

    def _send(self, body: bytes) -> None:
        if body and not self.over and self._transport is not None:
            self._transport.write(framed(body))
