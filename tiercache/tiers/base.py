"""What holds bytes. A tier knows nothing of models, policy or leases.

Two kinds. An `Arena` is memory that others can address: the host tier, shared with engine processes.
A `Tier` is somewhere bytes must be moved to and from: NVMe. Neither chooses anything: the core says
which extent is used for what, so a tier cannot lose track of space, and every choice can be replayed
without one.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tiercache.errors import StorageFault
from tiercache.state import Extent, Key, Label, Layout, Record

ALIGNMENT = 4096
"""Offsets and sizes of extents are multiples of this: direct I/O moves whole pages."""


class Write(NamedTuple):
    """One object to be stored: its label, where it goes, its bytes.

    `source` is `extent.size` bytes long (page-aligned in a real arena); the bytes beyond
    `record.nbytes` are zero.
    """

    record: Record
    extent: Extent
    source: memoryview


class Read(NamedTuple):
    """One object to be read: its label, where it is, where its bytes go.

    `target` is a writable view of `extent.size` bytes.
    """

    record: Record
    extent: Extent
    target: memoryview


class Found(NamedTuple):
    """One object that a tier held before this start."""

    record: Record
    extent: Extent


class Arena(Protocol):
    """Addressable memory in segments. Not promised: that bytes are zero before they are written."""

    @property
    def segments(self) -> Sequence[int]:
        """Size in bytes of each segment."""
        ...

    def view(self, extent: Extent) -> memoryview:
        """Return a writable view of the extent, `extent.size` bytes long."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        ...


class Tier(Protocol):
    """Stores sealed objects at extents that the core chose. All calls block; one thread may call
    `write`, `reclaim`, `forget` and `remember`, several may call `read` beside it.

    Faults are returned. Only what has another answer raises them: `namespaces`, `scan` (between two
    pages; those before it stand) and `used_bytes` raise StorageFault when the device fails.

    Not promised: that a write survives the loss of power (unless the tier says so), only that it
    survives the death of the process.
    """

    name: str

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """Store each object and then make it findable by `scan`; in that order.

        The core guarantees that the extents are free, and that those of one segment come in order.
        A segment comes to be with its first write. Returns one outcome per object, in order: None
        when it is durable against the death of the process.
        """
        ...

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """Fill each target and check it against the record's checksum.

        Returns one outcome per object: None only when the bytes are the ones that were sealed. A
        target whose outcome is a fault holds unspecified bytes.
        """
        ...

    def forget(self, keys: Iterable[Key]) -> StorageFault | None:
        """Make the objects unfindable. Unknown keys are no error."""
        ...

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault | None:
        """Forget `keys`, then give back the space of `segments`. Missing ones are no error."""
        ...

    def remember(self, label: Label, layout: Layout) -> StorageFault | None:
        """Keep what a namespace is called and how its state is laid out, for the next start."""
        ...

    def namespaces(self) -> list[tuple[Label, Layout]]:
        """Return what was remembered; raises StorageFault."""
        ...

    def scan(self, batch: int) -> Iterator[list[Found]]:
        """Yield what was stored before this start, at most `batch` objects at a time.

        Cheap: bytes are not read. Objects whose place cannot exist are left out and forgotten. Raises
        StorageFault.
        """
        ...

    def segment_bytes(self) -> dict[int, int]:
        """Return the size of each segment that exists, so that the core can account for it."""
        ...

    def used_bytes(self) -> int:
        """Return the space taken on the device, everything included; raises StorageFault."""
        ...

    def close(self) -> None:
        """Finish and let go of the device. Idempotent."""
        ...
