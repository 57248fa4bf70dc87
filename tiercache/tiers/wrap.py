"""What any tier can be given: measurement, a rate limit, faults. Each is a tier around a tier."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tiercache.errors import Fault, StorageFault
from tiercache.state import Extent, Key, Label, Layout
from tiercache.tiers.base import Found, Read, Tier, Write

Clock = Callable[[], float]
Sleep = Callable[[float], None]


class Wrapped:
    """A tier that passes every call on. Subclasses change what they are about."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        return self.inner.write(batch)

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """See `Tier.read`."""
        return self.inner.read(batch)

    def forget(self, keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.forget`."""
        return self.inner.forget(keys)

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.reclaim`."""
        return self.inner.reclaim(segments, keys)

    def remember(self, label: Label, layout: Layout) -> StorageFault | None:
        """See `Tier.remember`."""
        return self.inner.remember(label, layout)

    def namespaces(self) -> list[tuple[Label, Layout]]:
        """See `Tier.namespaces`."""
        return self.inner.namespaces()

    def scan(self, batch: int) -> Iterator[list[Found]]:
        """See `Tier.scan`."""
        return self.inner.scan(batch)

    def segment_bytes(self) -> dict[int, int]:
        """See `Tier.segment_bytes`."""
        return self.inner.segment_bytes()

    def used_bytes(self) -> int:
        """See `Tier.used_bytes`."""
        return self.inner.used_bytes()

    def close(self) -> None:
        """See `Tier.close`."""
        self.inner.close()


@dataclass(frozen=True, slots=True)
class Tally:
    """What one kind of call has done so far.

    `nbytes` counts the extents of the objects that succeeded; `seconds` is time inside the tier,
    summed over threads; `faults` counts failed objects by how they failed.
    """

    calls: int
    objects: int
    nbytes: int
    seconds: float
    faults: Mapping[Fault, int]


NOTHING = Tally(0, 0, 0, 0.0, dict.fromkeys(Fault, 0))


class Measured(Wrapped):
    """Counts what goes through. Safe for several threads."""

    def __init__(self, inner: Tier, clock: Clock = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._written = NOTHING
        self._read = NOTHING

    @property
    def written(self) -> Tally:
        """What `write` has done."""
        with self._lock:
            return self._written

    @property
    def read_back(self) -> Tally:
        """What `read` has done."""
        with self._lock:
            return self._read

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        start = self._clock()
        outcomes = self.inner.write(batch)
        seconds = self._clock() - start
        with self._lock:
            self._written = _add(
                self._written, [write.extent for write in batch], outcomes, seconds
            )
        return outcomes

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """See `Tier.read`."""
        start = self._clock()
        outcomes = self.inner.read(batch)
        seconds = self._clock() - start
        with self._lock:
            self._read = _add(self._read, [read.extent for read in batch], outcomes, seconds)
        return outcomes


class Throttled(Wrapped):
    """Writes at most `bytes_per_s` in the long run.

    A write of any size goes through at once; the next one first waits until that one is paid for.
    So nothing is ever too large, and the rate holds over any time longer than one write.
    """

    def __init__(
        self,
        inner: Tier,
        bytes_per_s: int,
        *,
        clock: Clock = time.monotonic,
        sleep: Sleep = time.sleep,
    ) -> None:
        if bytes_per_s < 1:
            raise ValueError("bytes_per_s must be at least 1")
        super().__init__(inner)
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._paid_at = clock()

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        now = self._clock()
        if now < self._paid_at:
            self._sleep(self._paid_at - now)
        start = max(now, self._paid_at)
        self._paid_at = start + sum(len(write.source) for write in batch) / self._bytes_per_s
        return self.inner.write(batch)


@dataclass(frozen=True, slots=True)
class Fail:
    """The call fails, and nothing is done."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Lose:
    """A write reports success, and the bytes never reach the device. Nothing for a read."""


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit is wrong: on the device after a write, in the target of a read.

    `bit` counts from the start of the object's bytes, modulo their number.
    """

    bit: int


@dataclass(frozen=True, slots=True)
class Delay:
    """The object takes so much longer."""

    seconds: float


Trouble = Fail | Lose | Flip | Delay
Script = Callable[[str, int], Trouble | None]
"""What happens to the nth object (from 0) of "write" or "read"."""


def scripted(troubles: Mapping[tuple[str, int], Trouble]) -> Script:
    """Return a script with these troubles and no others."""
    return lambda call, nth: troubles.get((call, nth))


def seeded(seed: int, rate: float, troubles: Sequence[Trouble]) -> Script:
    """Return a script that picks one of `troubles` for a share `rate` of all objects.

    The same for the same seed, whatever the order of calls.
    """

    def pick(call: str, nth: int) -> Trouble | None:
        drawn = random.Random(f"{seed}/{call}/{nth}")
        return drawn.choice(troubles) if drawn.random() < rate else None

    return pick


class Faulty(Wrapped):
    """A tier whose device misbehaves as its script says. For tests."""

    def __init__(self, inner: Tier, script: Script, sleep: Sleep = time.sleep) -> None:
        super().__init__(inner)
        self._script = script
        self._sleep = sleep
        self._lock = threading.Lock()
        self._counts = {"write": 0, "read": 0}

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        return [self._write(write) for write in batch]

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """See `Tier.read`."""
        return [self._read(read) for read in batch]

    def _write(self, write: Write) -> StorageFault | None:
        match self._next("write"):
            case Fail(fault):
                return StorageFault(fault, "as the script says")
            case Lose():
                write = write._replace(source=memoryview(bytearray(len(write.source))))
            case Flip(bit):
                write = write._replace(source=_flipped(write.source, write.record.nbytes, bit))
            case Delay(seconds):
                self._sleep(seconds)
            case None:
                pass
        return self.inner.write([write])[0]

    def _read(self, read: Read) -> StorageFault | None:
        trouble = self._next("read")
        if isinstance(trouble, Fail):
            return StorageFault(trouble.fault, "as the script says")
        if isinstance(trouble, Delay):
            self._sleep(trouble.seconds)
        outcome = self.inner.read([read])[0]
        if isinstance(trouble, Flip):
            read.target[:] = _flipped(read.target, read.record.nbytes, trouble.bit)
            return outcome or StorageFault(Fault.DAMAGED, "as the script says")
        return outcome

    def _next(self, call: str) -> Trouble | None:
        with self._lock:
            nth = self._counts[call]
            self._counts[call] = nth + 1
        return self._script(call, nth)


def _add(
    tally: Tally,
    extents: Sequence[Extent],
    outcomes: Sequence[StorageFault | None],
    seconds: float,
) -> Tally:
    faults = dict(tally.faults)
    nbytes = 0
    for extent, outcome in zip(extents, outcomes, strict=True):
        if outcome is None:
            nbytes += extent.size
        else:
            faults[outcome.fault] += 1
    return replace(
        tally,
        calls=tally.calls + 1,
        objects=tally.objects + len(extents),
        nbytes=tally.nbytes + nbytes,
        seconds=tally.seconds + seconds,
        faults=faults,
    )


def _flipped(view: memoryview, nbytes: int, bit: int) -> memoryview:
    copy = bytearray(view)
    byte, shift = divmod(bit % (8 * max(nbytes, 1)), 8)
    copy[byte] ^= 1 << shift
    return memoryview(copy)
