"""What any store or pool can be given: measurement, a rate limit, faults. See `wrap.py` for tiers."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiercache.errors import Fault, StorageFault
from tiercache.state import Key, Record
from tiercache.tiers.remote import Blob, Get, Had, Kept, Late, Name, Pool, Put, Store, no_time
from tiercache.tiers.wrap import Clock, Delay, Fail, Flip, Lose, Script, Sleep


class WrappedStore:
    """A store that passes every call on. Subclasses change what they are about."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.name = inner.name

    def register(self, memory: memoryview) -> None:
        """See `Store.register`."""
        self.inner.register(memory)

    def put(self, batch: Sequence[Put], within_s: float) -> list[Kept]:
        """See `Store.put`."""
        return self.inner.put(batch, within_s)

    def get(self, batch: Sequence[Get], within_s: float) -> list[Had]:
        """See `Store.get`."""
        return self.inner.get(batch, within_s)

    def describe(self, keys: Sequence[Key], within_s: float) -> list[Had]:
        """See `Store.describe`."""
        return self.inner.describe(keys, within_s)

    def holds(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `Store.holds`."""
        return self.inner.holds(keys, within_s)

    def forget(self, keys: Iterable[Key], within_s: float) -> StorageFault | None:
        """See `Store.forget`."""
        return self.inner.forget(keys, within_s)

    def enter(self, namespace: bytes, epoch: int) -> None:
        """See `Store.enter`."""
        self.inner.enter(namespace, epoch)

    def flush(self, namespace: bytes, epoch: int, within_s: float) -> StorageFault | None:
        """See `Store.flush`."""
        return self.inner.flush(namespace, epoch, within_s)

    def close(self, within_s: float) -> StorageFault | None:
        """See `Store.close`."""
        return self.inner.close(within_s)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one kind of call has done so far.

    Of `objects`, `whole` came or stayed under a record, `misses` were not there, and `faults` failed,
    by how; `late` of those may still hold memory. `nbytes` is what moved for the caller: the bodies of
    whole objects, those of a put that others had stored before included. `seconds` is time inside the
    store, summed over threads.
    """

    calls: int
    objects: int
    whole: int
    misses: int
    late: int
    nbytes: int
    seconds: float
    faults: Mapping[Fault, int]


NO_TRAFFIC = Traffic(0, 0, 0, 0, 0, 0, 0.0, dict.fromkeys(Fault, 0))


class MeasuredStore(WrappedStore):
    """Counts what goes through."""

    def __init__(self, inner: Store, clock: Clock = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._put = self._got = self._asked = NO_TRAFFIC

    @property
    def stored(self) -> Traffic:
        """What `put` has done."""
        with self._lock:
            return self._put

    @property
    def fetched(self) -> Traffic:
        """What `get` has done."""
        with self._lock:
            return self._got

    @property
    def asked(self) -> Traffic:
        """What `holds` has done: whole is what there was something for."""
        with self._lock:
            return self._asked

    def put(self, batch: Sequence[Put], within_s: float) -> list[Kept]:
        """See `Store.put`."""
        start = self._clock()
        outcomes = self.inner.put(batch, within_s)
        seconds = self._clock() - start
        sizes = [put.record.nbytes for put in batch]
        with self._lock:
            self._put = _add(self._put, outcomes, sizes, seconds)
        return outcomes

    def get(self, batch: Sequence[Get], within_s: float) -> list[Had]:
        """See `Store.get`."""
        start = self._clock()
        outcomes = self.inner.get(batch, within_s)
        seconds = self._clock() - start
        sizes = [get.target.nbytes for get in batch]
        with self._lock:
            self._got = _add(self._got, outcomes, sizes, seconds)
        return outcomes

    def holds(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `Store.holds`."""
        start = self._clock()
        try:
            found = self.inner.holds(keys, within_s)
        except StorageFault as fault:
            seconds = self._clock() - start
            with self._lock:
                self._asked = _add(self._asked, [fault] * len(keys), [0] * len(keys), seconds)
            raise
        seconds = self._clock() - start
        with self._lock:
            self._asked = replace(
                self._asked,
                calls=self._asked.calls + 1,
                objects=self._asked.objects + len(keys),
                whole=self._asked.whole + sum(found),
                misses=self._asked.misses + len(found) - sum(found),
                seconds=self._asked.seconds + seconds,
            )
        return found


class ThrottledStore(WrappedStore):
    """Puts at most `bytes_per_s` in the long run, so that the network is left to those who read.

    A put of any size goes through at once; the next one first waits until that one is paid for. One
    that would wait beyond its deadline fails at once.
    """

    def __init__(
        self,
        inner: Store,
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
        self._lock = threading.Lock()
        self._paid_at = clock()

    def put(self, batch: Sequence[Put], within_s: float) -> list[Kept]:
        """See `Store.put`."""
        now = self._clock()
        nbytes = sum(put.record.nbytes for put in batch)
        with self._lock:
            start = max(now, self._paid_at)
            if start - now >= within_s:
                return [no_time()] * len(batch)
            self._paid_at = start + nbytes / self._bytes_per_s
        if start > now:
            self._sleep(start - now)
        return self.inner.put(batch, within_s - (start - now))


class FaultyPool:
    """A pool that misbehaves as its script says, of which the calls are "put" and "get". For tests.

    A header counts as part of an object: `Flip` counts bits from its start.
    """

    def __init__(self, inner: Pool, script: Script, sleep: Sleep = time.sleep) -> None:
        self.inner = inner
        self.name = inner.name
        self._script = script
        self._sleep = sleep
        self._lock = threading.Lock()
        self._counts = {"put": 0, "get": 0}

    def register(self, memory: memoryview) -> None:
        """See `Pool.register`."""
        self.inner.register(memory)

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.put`."""
        return [self._put(blob, within_s) for blob in blobs]

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.get`."""
        return [self._get(blob, within_s) for blob in blobs]

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.heads`."""
        return self.inner.heads(blobs, within_s)

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        """See `Pool.holds`."""
        return self.inner.holds(names, within_s)

    def remove(self, names: Sequence[Name], within_s: float) -> StorageFault | None:
        """See `Pool.remove`."""
        return self.inner.remove(names, within_s)

    def remove_before(self, space: str, epoch: int, within_s: float) -> StorageFault | None:
        """See `Pool.remove_before`."""
        return self.inner.remove_before(space, epoch, within_s)

    def close(self, within_s: float) -> StorageFault | None:
        """See `Pool.close`."""
        return self.inner.close(within_s)

    def _put(self, blob: Blob, within_s: float) -> bool | StorageFault:
        match self._next("put"):
            case Fail(fault):
                return StorageFault(fault, "as the script says")
            case Lose():
                return True
            case Flip(bit):
                copy = _copied(blob)
                _flip(copy, bit)
                blob = copy
            case Delay(seconds):
                self._sleep(seconds)
            case None:
                pass
        return self.inner.put([blob], within_s)[0]

    def _get(self, blob: Blob, within_s: float) -> bool | StorageFault:
        trouble = self._next("get")
        if isinstance(trouble, Fail):
            return StorageFault(trouble.fault, "as the script says")
        if isinstance(trouble, Delay):
            self._sleep(trouble.seconds)
        outcome = self.inner.get([blob], within_s)[0]
        if isinstance(trouble, Flip) and outcome is True:
            _flip(blob, trouble.bit)
        return outcome

    def _next(self, call: str) -> object:
        with self._lock:
            nth = self._counts[call]
            self._counts[call] = nth + 1
        return self._script(call, nth)


def _add(
    traffic: Traffic, outcomes: Sequence[Had], sizes: Sequence[int], seconds: float
) -> Traffic:
    faults = dict(traffic.faults)
    whole = misses = late = nbytes = 0
    for outcome, size in zip(outcomes, sizes, strict=True):
        match outcome:
            case Record():
                whole += 1
                nbytes += size
            case None:
                misses += 1
            case StorageFault():
                faults[outcome.fault] += 1
                late += isinstance(outcome, Late)
    return Traffic(
        traffic.calls + 1,
        traffic.objects + len(outcomes),
        traffic.whole + whole,
        traffic.misses + misses,
        traffic.late + late,
        traffic.nbytes + nbytes,
        traffic.seconds + seconds,
        faults,
    )


def _copied(blob: Blob) -> Blob:
    return Blob(blob.name, memoryview(bytearray(blob.header)), memoryview(bytearray(blob.body)))


def _flip(blob: Blob, bit: int) -> None:
    size = len(blob.header) + len(blob.body)
    byte, shift = divmod(bit % (8 * size), 8)
    if byte < len(blob.header):
        blob.header[byte] ^= 1 << shift
    else:
        blob.body[byte - len(blob.header)] ^= 1 << shift
