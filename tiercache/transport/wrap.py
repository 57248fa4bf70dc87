"""What any peer can be given: measurement, a rate limit. Each is a peer around a peer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiercache.errors import PeerFault, TransportFault
from tiercache.transport.base import Peer, Want

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]


class Wrapped:
    """A peer that passes every call on. Subclasses change what they are about."""

    def __init__(self, inner: Peer) -> None:
        self.inner = inner

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`."""
        return await self.inner.fetch(wants, within_s)

    async def ask(self, body: bytes, within_s: float) -> bytes:
        """See `Peer.ask`."""
        return await self.inner.ask(body, within_s)

    async def probe(self, within_s: float) -> float:
        """See `Peer.probe`."""
        return await self.inner.probe(within_s)

    @property
    def closed(self) -> bool:
        """See `Peer.closed`."""
        return self.inner.closed

    async def close(self) -> None:
        """See `Peer.close`."""
        await self.inner.close()


class Throttled(Wrapped):
    """Fetches at most `bytes_per_s` in the long run.

    A fetch of any size goes through at once; the next one first waits until that one is paid for, and
    is LATE at once when that is after its deadline. So nothing is ever too large, and waiters go
    in the order they came. What was not fetched is not given back.
    """

    def __init__(
        self,
        inner: Peer,
        bytes_per_s: int,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if bytes_per_s < 1:
            raise ValueError("bytes_per_s must be at least 1")
        super().__init__(inner)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._paid_at = clock()

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`."""
        now = self._clock()
        start = max(now, self._paid_at)
        wait_s = start - now
        if wait_s >= within_s:
            late = TransportFault(PeerFault.LATE, f"the rate limit asks for {wait_s:.3g} s first")
            return [late] * len(wants)
        # Taken before the wait: whoever comes meanwhile queues behind.
        self._paid_at = start + sum(len(want.target) for want in wants) / self._bytes_per_s
        if wait_s > 0:
            await self._sleep(wait_s)
        return await self.inner.fetch(wants, within_s - wait_s)


@dataclass(frozen=True, slots=True)
class Tally:
    """What fetching from one peer has done so far. `nbytes` counts ranges that came whole; `seconds` is
    time inside, summed over calls; `faults` counts the others by how they failed; `cancelled` counts
    calls."""

    calls: int
    ranges: int
    nbytes: int
    seconds: float
    cancelled: int
    faults: Mapping[PeerFault, int]


class Measured(Wrapped):
    """Counts what goes through."""

    def __init__(self, inner: Peer, clock: Clock = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self.fetched = Tally(0, 0, 0, 0.0, 0, dict.fromkeys(PeerFault, 0))

    async def fetch(self, wants: Sequence[Want], within_s: float) -> list[TransportFault | None]:
        """See `Peer.fetch`."""
        start = self._clock()
        try:
            outcomes = await self.inner.fetch(wants, within_s)
        except asyncio.CancelledError:
            self.fetched = replace(self.fetched, cancelled=self.fetched.cancelled + 1)
            raise
        faults = dict(self.fetched.faults)
        nbytes = 0
        for want, outcome in zip(wants, outcomes, strict=True):
            if outcome is None:
                nbytes += len(want.target)
            else:
                faults[outcome.fault] += 1
        self.fetched = replace(
            self.fetched,
            calls=self.fetched.calls + 1,
            ranges=self.fetched.ranges + len(wants),
            nbytes=self.fetched.nbytes + nbytes,
            seconds=self.fetched.seconds + self._clock() - start,
            faults=faults,
        )
        return outcomes
