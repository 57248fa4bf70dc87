"""What a node has instead of an NVMe tier whose device failed before it could be used."""

from collections.abc import Iterable, Iterator, Sequence

from tiercache.errors import StorageFault
from tiercache.state import Key, Label, Layout
from tiercache.tiers.base import Found, Read, Write


class AbsentTier:
    """A `Tier` that holds nothing and answers everything with one fault."""

    def __init__(self, fault: StorageFault) -> None:
        self.name = "absent"
        self._fault = fault

    def write(self, batch: Sequence[Write]) -> list[StorageFault | None]:
        """See `Tier.write`."""
        return [self._fault] * len(batch)

    def read(self, batch: Sequence[Read]) -> list[StorageFault | None]:
        """See `Tier.read`."""
        return [self._fault] * len(batch)

    def forget(self, keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.forget`."""
        del keys
        return self._fault

    def reclaim(self, segments: Iterable[int], keys: Iterable[Key]) -> StorageFault | None:
        """See `Tier.reclaim`."""
        del segments, keys
        return self._fault

    def remember(self, label: Label, layout: Layout) -> StorageFault | None:
        """See `Tier.remember`."""
        del label, layout
        return self._fault

    def namespaces(self) -> list[tuple[Label, Layout]]:
        """See `Tier.namespaces`."""
        return []

    def scan(self, batch: int) -> Iterator[list[Found]]:
        """See `Tier.scan`."""
        del batch
        return iter(())

    def segment_bytes(self) -> dict[int, int]:
        """See `Tier.segment_bytes`."""
        return {}

    def used_bytes(self) -> int:
        """See `Tier.used_bytes`."""
        return 0

    def close(self) -> None:
        """See `Tier.close`."""
