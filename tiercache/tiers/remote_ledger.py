"""What a pool says of itself: which boundaries it holds, in short, and which flushes there were.

A pool cannot be listed. So who announces a boundary writes its short name into a page, a sealed object
that all know the name of, and who wants to know reads the pages: one look at their headers, as long as
nothing has changed. There are a few pages for each namespace and epoch; a node writes into one of them,
which depends on its name, so that writers seldom meet. A page is replaced as a whole and without a lock: of
two who replace it at once, one may undo what the other has added. Who has added a name looks for it later,
and adds it again. Names that are missing, or of boundaries that are lost, cost a miss and no more.

Flushes are numbered, and each leaves a mark that is never removed.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence

import xxhash

from tiercache.errors import Fault, StorageFault
from tiercache.state import Key, Record, Shard
from tiercache.state.canonical import DIGEST_BYTES, digest
from tiercache.state.names import NAME_BYTES, packed, unpacked
from tiercache.tiers.remote import Get, Put
from tiercache.tiers.remote_store import SealedStore

PAGES = 8
"""For each namespace and epoch. All their headers are looked at each time."""

PAGE_PART, FLUSH_PART = "/page", "/flush"
"""No part of a layout is called that: their names have no slash."""

LOOKED_TOGETHER = 8
"""Marks of flushes that are looked for in one call."""

MARKS_MAX = 4096
"""A pool with more flushes of one namespace than this is not believed."""

NUMBER_BYTES = 8
MARK_BYTES = NUMBER_BYTES + 16

WRITES_MAX = 3
"""How often one who is always overtaken tries to replace a page."""

_ANYTHING = bytes(DIGEST_BYTES)


class Pages:
    """The names that a pool holds of one namespace in one epoch, as they were read last.

    `names_max` bounds what is kept of all pages together. One thread at a time.
    """

    def __init__(
        self, store: SealedStore, namespace: bytes, epoch: int, writer: str, names_max: int
    ) -> None:
        self._store = store.at(namespace, epoch)
        self._writer = writer
        self._names_max = names_max
        self._keys = [
            Key(namespace, PAGE_PART, Shard(page, page + 1), "names", _ANYTHING)
            for page in range(PAGES)
        ]
        self._own = hashlib.sha256(writer.encode()).digest()[0] % PAGES
        self._sums = [b""] * PAGES
        self._pages: list[list[int]] = [[] for _ in range(PAGES)]
        self._absent = [0] * PAGES
        self.version = 0
        """How often what they say has changed."""

    @property
    def names(self) -> set[int]:
        """All names, as far as there is room for them."""
        found: set[int] = set()
        for page in self._pages:
            found.update(page[: max(0, self._names_max - len(found))])
        return found

    @property
    def own(self) -> Sequence[int]:
        """The names of the page that this node writes into."""
        return self._pages[self._own]

    def read(self, within_s: float) -> None:
        """Look at what has changed; raises StorageFault when the pool does not answer.

        A page that is missing counts as empty the second time: it may be on its way to be replaced.
        """
        until = time.monotonic() + within_s
        heads = self._store.describe(self._keys, within_s)
        for fault in heads:
            if isinstance(fault, StorageFault) and fault.fault is Fault.IO:
                raise fault
        for page, head in enumerate(heads):
            if isinstance(head, Record) and head.checksum == self._sums[page]:
                self._absent[page] = 0
            elif isinstance(head, Record):
                self._take(page, head, until)
            else:
                self._absent[page] += 1
                if self._absent[page] > 1 and self._sums[page]:
                    self._sums[page], self._pages[page] = b"", []
                    self.version += 1

    def _take(self, page: int, head: Record, until: float) -> None:
        """Read one page. What is no page is one without names."""
        names: list[int] = []
        if head.nbytes <= self._names_max * NAME_BYTES and head.nbytes % NAME_BYTES == 0:
            body = bytearray(head.nbytes)
            get = Get(self._keys[page], memoryview(body), head.checksum)
            (had,) = self._store.get([get], until - time.monotonic())
            if isinstance(had, StorageFault) and had.fault is Fault.IO:
                raise had
            if not isinstance(had, Record):
                return  # Replaced meanwhile: the next look finds the new one.
            names = unpacked(bytes(body))
        self._sums[page], self._pages[page], self._absent[page] = head.checksum, names, 0
        self.version += 1

    def change(
        self, added: Iterable[int], removed: Iterable[int], within_s: float
    ) -> StorageFault | None:
        """Replace the page that this node writes into by one with these changes to it."""
        until = time.monotonic() + within_s
        page, key = self._own, self._keys[self._own]
        gone, fresh = set(removed), list(dict.fromkeys(added))
        try:
            for _ in range(WRITES_MAX):
                self.read(until - time.monotonic())
                kept = [name for name in self._pages[page] if name not in gone]
                known = set(kept)
                kept += [name for name in fresh if name not in known]
                kept = kept[-self._names_max :]
                if kept == self._pages[page]:
                    return None
                done = self._replace(page, key, kept, until)
                if isinstance(done, StorageFault):
                    return done
                if done:
                    return None
        except StorageFault as fault:
            return fault
        return StorageFault(Fault.IO, f"{key}: others replace it all the time")

    def _replace(self, page: int, key: Key, names: list[int], until: float) -> bool | StorageFault:
        fault = self._store.forget([key], until - time.monotonic())
        if fault is not None:
            return fault
        body = packed(names)
        if body:
            record = Record(key, 0, 0, len(body), xxhash.xxh3_128_digest(body), self._writer, 0.0)
            left_s = until - time.monotonic()
            (kept,) = self._store.put([Put(record, memoryview(body))], left_s)
            if isinstance(kept, StorageFault):
                return kept
            if kept.checksum != record.checksum:
                return False
            self._sums[page] = record.checksum
        self._pages[page] = names
        self.version += 1
        return True


class Marks:
    """The flushes of namespaces, as the pool knows them: a list that is only added to.

    For one thread at a time. Each mark has a place in the list, which only one can take, and says the
    number of a flush. Numbers ascend, and need not follow one another.
    """

    def __init__(self, store: SealedStore) -> None:
        self._store = store
        self._known: dict[bytes, tuple[int, int]] = {}  # Namespace -> marks, last number.

    def last(self, namespace: bytes, within_s: float) -> int:
        """Return the number of the last flush, 0 for none; raises StorageFault.

        It may go back: a pool that loses its marks knows of no flush. Who does says so again.
        """
        until = time.monotonic() + within_s
        space = _space(namespace)
        view = self._store.at(space, 0)
        while True:
            count, number = self._known.get(namespace, (0, 0))
            if count >= MARKS_MAX:
                raise StorageFault(Fault.DAMAGED, "more flushes than there can have been")
            first = max(0, count - 1)
            keys = [_mark(space, first + ahead) for ahead in range(LOOKED_TOGETHER)]
            there = view.holds(keys, until - time.monotonic())
            if count and not there[0]:
                del self._known[namespace]  # The pool has lost its list, and begins another.
                continue
            ahead = there.index(False) if False in there else len(there)
            fresh = keys[count - first : ahead]
            if fresh:
                number = max(number, *self._numbers(view, fresh, until))
                self._known[namespace] = (first + ahead, number)
            if ahead < LOOKED_TOGETHER:
                return number

    def _numbers(self, view: SealedStore, keys: Sequence[Key], until: float) -> list[int]:
        """Return what marks say. One that cannot be read may be any flush: that is a fault."""
        bodies = [bytearray(MARK_BYTES) for _ in keys]
        gets = [Get(key, memoryview(body)) for key, body in zip(keys, bodies, strict=True)]
        for key, had in zip(keys, view.get(gets, until - time.monotonic()), strict=True):
            if isinstance(had, StorageFault):
                raise had
            if had is None:
                raise StorageFault(Fault.IO, f"{key}: a flush that was there a moment ago")
        return [int.from_bytes(body[:NUMBER_BYTES]) for body in bodies]

    def begin(self, namespace: bytes, number: int, nonce: bytes, within_s: float) -> int:
        """Mark a flush of that number, or of the next one when there was one of that number; return which.

        `nonce` is 16 bytes of this call only. Raises StorageFault.
        """
        until = time.monotonic() + within_s
        while True:
            number = max(number, self.last(namespace, until - time.monotonic()) + 1)
            if self._add(namespace, number, nonce, until):
                return number

    def ensure(self, namespace: bytes, number: int, nonce: bytes, within_s: float) -> None:
        """See to it that this flush is marked, or a later one; raises StorageFault."""
        until = time.monotonic() + within_s
        while self.last(namespace, until - time.monotonic()) < number:
            self._add(namespace, number, nonce, until)

    def _add(self, namespace: bytes, number: int, nonce: bytes, until: float) -> bool:
        """Add to the end of the list; False when another one was faster."""
        space = _space(namespace)
        key = _mark(space, self._known.get(namespace, (0, 0))[0])
        body = number.to_bytes(NUMBER_BYTES) + nonce
        record = Record(key, 0, 0, len(body), xxhash.xxh3_128_digest(body), "", 0.0)
        left_s = until - time.monotonic()
        (kept,) = self._store.at(space, 0).put([Put(record, memoryview(body))], left_s)
        if isinstance(kept, StorageFault):
            raise kept
        return kept.checksum == record.checksum


def _space(namespace: bytes) -> bytes:
    """Return where the marks of a namespace are: its own objects go with each flush."""
    return digest("pool/flushes", namespace)


def _mark(space: bytes, number: int) -> Key:
    return Key(space, FLUSH_PART, Shard(number, number + 1), "mark", _ANYTHING)
