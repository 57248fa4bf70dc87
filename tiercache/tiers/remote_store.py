"""A `Store` of any `Pool`: sealing, naming and checking, once for all of them."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Key, Record
from tiercache.tiers.remote import Blob, Get, Had, Kept, Late, Name, Pool, Put
from tiercache.tiers.remote_sealed import HEADER_BYTES, Realm, seal, unseal

RUN_OBJECTS_MAX = 256
RUN_BYTES_MAX = 64 << 20
"""What goes to the pool in one call, at most: one object may be larger."""

NAMESPACES_MAX = 65_536
"""Namespaces whose epoch is not 0."""

_PUTS_MAX = 3
"""How often a `put` finds its key taken, and then nothing under it, before it gives up."""

_Item = TypeVar("_Item")
_NOTHING = memoryview(b"")


class SealedStore:
    """See `Store`. `clock` counts seconds from anywhere, as `time.monotonic` does."""

    def __init__(
        self, pool: Pool, realm: Realm, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = pool.name
        self._pool = pool
        self._realm = realm
        self._clock = clock
        self._lock = threading.Lock()
        self._epochs: dict[bytes, int] = {}

    def at(self, namespace: bytes, epoch: int) -> "SealedStore":
        """Return the same store as it is in one epoch of a namespace, whatever is entered afterwards.

        A call that takes long must not end in another epoch than it began in.
        """
        view = SealedStore(self._pool, self._realm, clock=self._clock)
        view._epochs = {namespace: epoch}
        return view

    def register(self, memory: memoryview) -> None:
        """See `Store.register`."""
        self._pool.register(memory)

    def put(self, batch: Sequence[Put], within_s: float) -> list[Kept]:
        """See `Store.put`. ValueError when a source is not as long as its record says, LayoutError when
        a record has no room in a header."""
        for record, source in batch:
            if source.nbytes != record.nbytes:
                raise ValueError(f"{record.key}: {source.nbytes} bytes, not {record.nbytes}")
        until = self._clock() + within_s
        first: dict[Key, int] = {}
        for at, (record, _) in enumerate(batch):
            first.setdefault(record.key, at)
        kept: dict[Key, Kept] = {}
        chosen = [batch[at] for at in first.values()]
        for run in _runs(chosen, _record_key, _source_bytes):
            with _letting_go(kept.values()):
                for put, outcome in zip(run, self._put(run, until), strict=True):
                    kept[put.record.key] = outcome
        return [kept[record.key] for record, _ in batch]

    def get(self, batch: Sequence[Get], within_s: float) -> list[Had]:
        """See `Store.get`."""
        until = self._clock() + within_s
        found: list[Had] = []
        for run in _runs(batch, _get_key, _target_bytes):
            with _letting_go(found):
                found += self._get(run, until)
        return found

    def describe(self, keys: Sequence[Key], within_s: float) -> list[Had]:
        """See `Store.describe`."""
        until = self._clock() + within_s
        found: list[Had] = []
        for run in _runs(keys, _itself, _no_bytes):
            found += self._describe(run, until)
        return found

    def holds(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """See `Store.holds`."""
        until = self._clock() + within_s
        found: list[bool] = []
        for run in _runs(keys, _itself, _no_bytes):
            found += self._pool.holds([self._name(key) for key in run], self._left(until))
        return found

    def forget(self, keys: Iterable[Key], within_s: float) -> StorageFault | None:
        """See `Store.forget`."""
        until = self._clock() + within_s
        fault: StorageFault | None = None
        for run in _runs(list(keys), _itself, _no_bytes):
            names = [self._name(key) for key in run]
            fault = self._pool.remove(names, self._left(until)) or fault
        return fault

    def enter(self, namespace: bytes, epoch: int) -> None:
        """See `Store.enter`. ValueError beyond `NAMESPACES_MAX` of them."""
        with self._lock:
            if epoch > self._epochs.get(namespace, 0):
                if len(self._epochs) >= NAMESPACES_MAX and namespace not in self._epochs:
                    raise ValueError(f"more than {NAMESPACES_MAX} namespaces were flushed")
                self._epochs[namespace] = epoch

    def flush(self, namespace: bytes, epoch: int, within_s: float) -> StorageFault | None:
        """See `Store.flush`."""
        until = self._clock() + within_s
        self.enter(namespace, epoch)
        return self._pool.remove_before(self._realm.space(namespace), epoch, self._left(until))

    def close(self, within_s: float) -> StorageFault | None:
        """See `Store.close`."""
        return self._pool.close(within_s)

    def _put(self, run: Sequence[Put], until: float) -> list[Kept]:
        """Put until each is there, is somebody else's, or has failed."""
        kept: list[Kept] = [_taken(put.record) for put in run]
        waiting = list(range(len(run)))
        for _ in range(_PUTS_MAX):
            blobs = [self._sealed(run[at]) for at in waiting]
            outcomes = self._pool.put(blobs, self._left(until))
            taken = []
            for at, outcome in zip(waiting, outcomes, strict=True):
                if isinstance(outcome, StorageFault):
                    kept[at] = outcome
                elif outcome:
                    kept[at] = run[at].record
                else:
                    taken.append(at)
            waiting = self._yield_to(run, taken, kept, until) if taken else []
            if not waiting:
                break
        return kept

    def _yield_to(
        self, run: Sequence[Put], taken: Sequence[int], kept: list[Kept], until: float
    ) -> list[int]:
        """Settle those whose names are taken by sealed objects; return the others, with room made."""
        again, damaged = [], []
        there = self._describe([run[at].record.key for at in taken], until)
        for at, outcome in zip(taken, there, strict=True):
            match outcome:
                case Record():
                    kept[at] = outcome
                case StorageFault(fault=Fault.DAMAGED):
                    damaged.append(at)
                case None:
                    again.append(at)
                case StorageFault():
                    kept[at] = outcome
        if damaged:
            fault = self.forget([run[at].record.key for at in damaged], self._left(until))
            if fault is None:
                again += damaged
            else:
                for at in damaged:
                    kept[at] = fault
        return again

    def _get(self, run: Sequence[Get], until: float) -> list[Had]:
        names = [self._name(get.key) for get in run]
        headers = _headers(len(run))
        blobs = [
            Blob(name, header, get.target.cast("B"))
            for name, header, get in zip(names, headers, run, strict=True)
        ]
        outcomes = self._pool.get(blobs, self._left(until))
        found: list[Had] = []
        for get, blob, outcome in zip(run, blobs, outcomes, strict=True):
            if outcome is True:
                found.append(self._checked(get, blob))
            else:
                found.append(outcome or None)
        return found

    def _checked(self, get: Get, blob: Blob) -> Had:
        """Return what was delivered, when it is what was asked for and what was sealed."""
        key, target, checksum = get
        record = self._opened(key, blob.header)
        if isinstance(record, StorageFault):
            return record
        if record.nbytes != target.nbytes:
            return StorageFault(Fault.DAMAGED, f"{key}: {target.nbytes} bytes, not {record.nbytes}")
        if xxhash.xxh3_128_digest(target) != record.checksum:
            return StorageFault(Fault.DAMAGED, f"{key}: not the bytes that were sealed")
        if checksum and checksum != record.checksum:
            return None
        # A flush since the call began: what was read is of an epoch that is no more.
        return record if self._name(key) == blob.name else None

    def _describe(self, run: Sequence[Key], until: float) -> list[Had]:
        blobs = [
            Blob(self._name(key), header, _NOTHING)
            for key, header in zip(run, _headers(len(run)), strict=True)
        ]
        outcomes = self._pool.heads(blobs, self._left(until))
        found: list[Had] = []
        for key, blob, outcome in zip(run, blobs, outcomes, strict=True):
            if outcome is True:
                stays = self._name(key) == blob.name
                found.append(self._opened(key, blob.header) if stays else None)
            else:
                found.append(outcome or None)
        return found

    def _opened(self, key: Key, header: memoryview) -> Record | StorageFault:
        record = unseal(header, self._realm)
        if record is None:
            return StorageFault(Fault.DAMAGED, f"{key}: no sealed object of this cluster")
        if record.key != key:
            return StorageFault(Fault.DAMAGED, f"{key}: holds an object of {record.key}")
        return record

    def _sealed(self, put: Put) -> Blob:
        header = memoryview(seal(put.record, self._realm))
        return Blob(self._name(put.record.key), header, put.source.cast("B"))

    def _name(self, key: Key) -> Name:
        with self._lock:
            epoch = self._epochs.get(key.namespace, 0)
        return self._realm.name(key, epoch)

    def _left(self, until: float) -> float:
        return until - self._clock()


@contextmanager
def _letting_go(outcomes: Iterable[Had]) -> Iterator[None]:
    """Raise nothing before the pool has let go of what it was late with: who hears of an error gives the
    memory away, and does not hear of `Late`."""
    try:
        yield
    except BaseException:
        for outcome in outcomes:
            if isinstance(outcome, Late):
                outcome.settled.wait()
        raise


def _taken(record: Record) -> StorageFault:
    return StorageFault(Fault.IO, f"{record.key}: others write and remove it all the time")


def _headers(count: int) -> list[memoryview]:
    whole = memoryview(bytearray(HEADER_BYTES * count))
    return [whole[at : at + HEADER_BYTES] for at in range(0, len(whole), HEADER_BYTES)]


def _runs(
    items: Sequence[_Item], key_of: Callable[[_Item], Key], bytes_of: Callable[[_Item], int]
) -> Iterator[Sequence[_Item]]:
    """Yield the items in order, in runs of `RUN_OBJECTS_MAX` and `RUN_BYTES_MAX` at most.

    No key is twice in one run: pools need not know what to do then.
    """
    start = nbytes = 0
    seen: set[Key] = set()
    for at, item in enumerate(items):
        key, size = key_of(item), bytes_of(item)
        full = at - start >= RUN_OBJECTS_MAX or nbytes + size > RUN_BYTES_MAX
        if at > start and (full or key in seen):
            yield items[start:at]
            start, nbytes = at, 0
            seen.clear()
        nbytes += size
        seen.add(key)
    if items:
        yield items[start:]


def _itself(key: Key) -> Key:
    return key


def _no_bytes(_: Key) -> int:
    return 0


def _record_key(put: Put) -> Key:
    return put.record.key


def _source_bytes(put: Put) -> int:
    return put.record.nbytes


def _get_key(get: Get) -> Key:
    return get.key


def _target_bytes(get: Get) -> int:
    return get.target.nbytes
