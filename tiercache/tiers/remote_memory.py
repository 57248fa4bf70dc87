"""The reference pool, in this process: what the others must behave like."""

import threading
from collections.abc import Callable, Sequence

from tiercache.errors import Fault, StorageFault
from tiercache.tiers.remote import Blob, Name, epoch_text, no_time, other_size

_Move = Callable[[bytes, Blob], bool | StorageFault]


class MemoryPool:
    """A `Pool` in memory, of `capacity_bytes` at most. Several stores share it by sharing this object.

    `objects` maps paths to bytes. Tests damage it there, behind the pool's back.
    """

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.name = "memory"
        self.objects: dict[str, bytes] = {}
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()

    def register(self, memory: memoryview) -> None:
        """See `Pool.register`."""

    def put(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.put`."""
        if within_s <= 0:
            return [no_time()] * len(blobs)
        return [self._put(blob) for blob in blobs]

    def get(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.get`."""
        return self._each(blobs, within_s, _fill)

    def heads(self, blobs: Sequence[Blob], within_s: float) -> list[bool | StorageFault]:
        """See `Pool.heads`."""
        return self._each(blobs, within_s, _fill_header)

    def holds(self, names: Sequence[Name], within_s: float) -> list[bool]:
        """See `Pool.holds`."""
        if within_s <= 0:
            raise no_time()
        return [name.path in self.objects for name in names]

    def remove(self, names: Sequence[Name], within_s: float) -> StorageFault | None:
        """See `Pool.remove`."""
        if within_s <= 0:
            return no_time()
        with self._lock:
            for name in names:
                self.objects.pop(name.path, None)
        return None

    def remove_before(self, space: str, epoch: int, within_s: float) -> StorageFault | None:
        """See `Pool.remove_before`."""
        if within_s <= 0:
            return no_time()
        first, end = f"{space}/", f"{space}/{epoch_text(epoch)}"
        with self._lock:
            for path in [path for path in self.objects if first <= path < end]:
                del self.objects[path]
        return None

    def close(self, within_s: float) -> StorageFault | None:
        """See `Pool.close`."""
        return None

    def _put(self, blob: Blob) -> bool | StorageFault:
        whole = b"".join((blob.header, blob.body))
        with self._lock:
            if blob.name.path in self.objects:
                return False
            if sum(map(len, self.objects.values())) + len(whole) > self._capacity_bytes:
                return StorageFault(Fault.NO_SPACE, "the pool is full")
            self.objects[blob.name.path] = whole
        return True

    def _each(
        self, blobs: Sequence[Blob], within_s: float, move: _Move
    ) -> list[bool | StorageFault]:
        if within_s <= 0:
            return [no_time()] * len(blobs)
        outcomes: list[bool | StorageFault] = []
        for blob in blobs:
            whole = self.objects.get(blob.name.path)
            outcomes.append(False if whole is None else move(whole, blob))
        return outcomes


def _fill(whole: bytes, blob: Blob) -> bool | StorageFault:
    at = len(blob.header)
    if len(whole) != at + len(blob.body):
        return other_size(blob.name)
    blob.header[:], blob.body[:] = whole[:at], whole[at:]
    return True


def _fill_header(whole: bytes, blob: Blob) -> bool | StorageFault:
    if len(whole) < len(blob.header):
        return other_size(blob.name)
    blob.header[:] = whole[: len(blob.header)]
    return True
