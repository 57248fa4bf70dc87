"""A pool that many nodes share. What is in it is addressed by key, not by place.

Two interfaces, one above the other. A `Pool` holds named bytes, and knows nothing else of them: a
distributed store, an object store, a dictionary. A `Store` is what a node uses: sealed objects that
say themselves what they are, under names that nobody can choose, checked whenever they come back.
`SealedStore` makes one of any pool.

The pool belongs to nobody. It may lose any object at any time, keep what was removed for a moment, and
be written by others; it is never asked for a transaction. So whatever comes out of it is a claim,
and is proved or is a miss. Every call ends within the seconds it was given.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from tiercache.errors import Fault, StorageFault
from tiercache.state import Key, Record


class Late(StorageFault):
    """The call ended at its deadline, but the pool has not let go of the memory.

    Until `settled` is set the pool may still write to the targets of a `get`, and read the sources of
    a `put`: keep them, and use them for nothing else. It is set once, soon after the limits of the
    pool's own transport. A late `put` may have stored its objects.
    """

    def __init__(self, detail: str, settled: threading.Event) -> None:
        super().__init__(Fault.IO, detail)
        self.settled = settled


class Put(NamedTuple):
    """One sealed object to be stored. `source` is contiguous and exactly `record.nbytes` long."""

    record: Record
    source: memoryview


class Get(NamedTuple):
    """One object to be had: its key, and where its bytes go.

    `target` is writable, contiguous, and exactly as long as the object: one of another size is another
    object. `checksum` is the XXH3-128 that its bytes must have; b"" when any whole object of that key
    will do.
    """

    key: Key
    target: memoryview
    checksum: bytes = b""


Kept: TypeAlias = Record | StorageFault
"""The answer to one `Put`: what the pool holds under the key now."""

Had: TypeAlias = Record | StorageFault | None
"""The answer to one `Get`: what was delivered, why it was not, or None for a miss."""


class Store(Protocol):
    """Sealed objects in a pool. All calls block; any number of threads may call at once.

    Faults are returned per object; only `holds`, which has another answer, raises them. IO says to
    try again later; NO_SPACE that the pool takes no more; DAMAGED that what is under the key is not
    a sealed object of this key, of this size and under this secret: `forget` it, and a `put` has room
    again.

    Not promised: that an object stays. That `holds` is still true a moment later. That two `put`s of a
    key store the bytes of the first: one of them wins whole, and both say which.
    """

    name: str

    def register(self, memory: memoryview) -> None:
        """Say that sources and targets will lie in this memory: then they are moved without a copy.

        Before the first call, and once per segment of the arena. Memory that was not registered is
        copied once more. The memory must outlive the store.
        """
        ...

    def put(self, batch: Sequence[Put], within_s: float) -> list[Kept]:
        """Store each object unless its key is taken; what is there is never changed.

        Returns for each, in order, the record that the pool holds under the key: the given one, or the
        earlier one's. They may differ in checksum, when the same state was computed twice.
        """
        ...

    def get(self, batch: Sequence[Get], within_s: float) -> list[Had]:
        """Fill each target.

        A record only when the target holds the bytes that were sealed under it. None when there is
        no such object: none of that key, or a whole one with another checksum than asked for. Targets
        without a record hold unspecified bytes; those of `Late` are not the caller's yet.
        """
        ...

    def describe(self, keys: Sequence[Key], within_s: float) -> list[Had]:
        """Return what the object of each key says of itself; its bytes are not looked at."""
        ...

    def holds(self, keys: Sequence[Key], within_s: float) -> list[bool]:
        """Return which keys there is something for; raises StorageFault.

        Cheap: not even headers are read.
        """
        ...

    def forget(self, keys: Iterable[Key], within_s: float) -> StorageFault | None:
        """Remove objects, for everybody. Unknown keys are no error."""
        ...

    def enter(self, namespace: bytes, epoch: int) -> None:
        """Know this namespace in this epoch (0 at first) from now on; an older one is left alone.

        Objects of different epochs have different names: what was stored before is not found any
        more, not even when it is still there, or a slow writer puts it there afterwards.
        """
        ...

    def flush(self, namespace: bytes, epoch: int, within_s: float) -> StorageFault | None:
        """`enter` the epoch, then remove what older ones left in the pool.

        Nothing of an older epoch is readable here when it returns, whatever it returns; a fault only
        says that space was not given back. Calls that run meanwhile deliver nothing of it. Other
        nodes must enter the epoch themselves.
        """
        ...

    def close(self, within_s: float) -> StorageFault | None:
        """Let go of the pool. Idempotent. Returns a fault when some memory is still in use: it must
        not be unmapped before the calls that were `Late` have settled."""
        ...


class Name(NamedTuple):
    """What a pool calls an object. All of it is made by hashing: hexadecimal digits, and nothing else.

    `space` stands for the cluster and the namespace, `leaf` for the key.
    """

    space: str
    epoch: int
    leaf: str

    @property
    def path(self) -> str:
        """The name in one: space, epoch and leaf, separated by slashes."""
        return f"{self.space}/{epoch_text(self.epoch)}/{self.leaf}"


EPOCH_MAX = (1 << 64) - 1


def epoch_text(epoch: int) -> str:
    """Return an epoch as names have it: 16 digits, in the order of the numbers."""
    return f"{epoch:016x}"


class Blob(NamedTuple):
    """One named object of a pool: a header of fixed size, then a body. Both in memory of the caller."""

    name: Name
    header: memoryview
    body: memoryview

    def take_in(self, at: int, piece: memoryview) -> None:
        """Copy a piece of the object, from byte `at` on, to where it belongs: the header, the body, or a
        bit of both. It must not be longer than what is left."""
        edge = len(self.header)
        before = max(0, min(len(piece), edge - at))
        self.header[at : at + before] = piece[:before]
        rest = piece[before:]
        start = at + before - edge
        if rest:
            self.body[start : start + len(rest)] = rest


class Pool(Protocol):
    """Named bytes that many nodes share. All calls block; any number of threads may call at once.

    Outcomes come per object and in order. Unknown names are no error; the names of one call differ.
    A `Late` keeps the bodies, as in `Store`, and the headers.
    """

    name: str

    def register(self, memory: memoryview) -> None:
        """See `Store.register`."""
        ...

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """Store header and body as one object; False when the name is taken, and nothing changed.

        An object becomes visible whole, or never.
        """
        ...

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """Fill header and body; False when there is no such object.

        DAMAGED when the object is not exactly as long as both together.
        """
        ...

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """Fill the headers from objects of any size; False when there is no such object.

        DAMAGED when the object is shorter. Bodies are left alone.
        """
        ...

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        """Return which names are taken; raises StorageFault."""
        ...

    def remove(self, names: Sequence[Name], within_s: float) -> StorageFault | None:
        """Remove objects."""
        ...

    def remove_before(self, space: str, epoch: int, within_s: float) -> StorageFault | None:
        """Remove all objects of the space whose epoch is smaller."""
        ...

    def close(self, within_s: float) -> StorageFault | None:
        """See `Store.close`."""
        ...


def no_time() -> StorageFault:
    """Return the fault of a call that had no time left when it began. It touches no memory."""
    return StorageFault(Fault.IO, "the deadline has passed")


def other_size(name: Name) -> StorageFault:
    """Return the fault of an object that has another size than it should."""
    return StorageFault(Fault.DAMAGED, f"{name.path} has another size")
