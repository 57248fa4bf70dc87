"""Which checkpoint leaves a full device pool. Policies choose; `tier` moves the bytes."""

from collections import OrderedDict
from typing import Protocol


class Placement(Protocol):
    """Knows the checkpoints on the device by digest, and names the one to go."""

    def used(self, digest: bytes) -> None:
        """A checkpoint came, or was resumed from."""
        ...

    def gone(self, digest: bytes) -> None:
        """A checkpoint left."""
        ...

    def victim(self) -> bytes | None:
        """Return the one to go, None when all should stay. It stays known until `gone`."""
        ...


class LeastRecent:
    """The one that was used least recently goes."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def used(self, digest: bytes) -> None:
        """Move to the end."""
        self._order[digest] = None
        self._order.move_to_end(digest)

    def gone(self, digest: bytes) -> None:
        """Forget it."""
        self._order.pop(digest, None)

    def victim(self) -> bytes | None:
        """Return the first."""
        return next(iter(self._order), None)


class Pinned:
    """All stay: a full pool takes nothing more."""

    def used(self, digest: bytes) -> None:
        """Nothing follows from it."""

    def gone(self, digest: bytes) -> None:
        """Nothing follows from it."""

    def victim(self) -> bytes | None:
        """Return None."""
        return None
