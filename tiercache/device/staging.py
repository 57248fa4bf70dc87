"""Between slots and the bytes of objects: device to host, and the arena's memory to the device.

*Outward*, a slot's parts become blobs in host memory of this process, to be saved. *Inward*, blobs (views
of leased arena memory) are written into a slot. Both run on a lane; what they read stays held, and
what they write is nobody else's, until the fence is passed. Bytes on the device are exactly those of the
object, in the codec of the pool: nothing is converted on the way.

Host memory for outward copies is bounded by `host_bytes_max`; beyond, an outward copy is skipped.
"""

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from tiercache.client import Blob
from tiercache.device.lanes import Copy, Fence, Lane
from tiercache.device.slots import Hold, Skipped
from tiercache.device.stacks import Store
from tiercache.errors import LayoutError

NO_HOST_MEMORY: Final = "no_staging_memory"


@dataclass(frozen=True, slots=True)
class Named:
    """How the objects of one slot are called: `end` tokens, and the codec of each part by name."""

    end: int
    codecs: dict[str, str]
    requantised: int = 0


@dataclass(eq=False)
class Outward:
    """A copy of one slot to host memory. `close` when its blobs are no longer needed."""

    fence: Fence
    named: Named
    _buffers: dict[str, torch.Tensor]
    _hold: Hold
    _closed: Callable[[int], None]
    _open: bool = field(default=True)
    _views: list[memoryview] = field(default_factory=list)

    def done(self) -> bool:
        """Whether the bytes are there; from then on the slot may be used again. Never blocks."""
        if not self.fence.done():
            return False
        self._hold.release()
        return True

    def wait(self) -> None:
        """Return when the bytes are there."""
        self.fence.wait()
        self._hold.release()

    def blobs(self) -> list[Blob]:
        """Return one blob per part; ValueError before `done`, or after `close`.

        Read-only views, which end with `close`: to touch one afterwards raises ValueError.
        """
        if not (self._open and self.fence.done()):
            raise ValueError("the bytes are not there yet, or not any more")
        return [
            Blob(
                part=name,
                end=self.named.end,
                data=self._view(buffer),
                codec=self.named.codecs[name],
                requantised=self.named.requantised,
            )
            for name, buffer in self._buffers.items()
        ]

    def close(self) -> None:
        """Give the host memory back, after waiting for the copy. Idempotent.

        An array that was made of a blob's `data` stays as it is, and keeps its memory: no bytes of
        another copy are ever written there.
        """
        if self._open:
            self.wait()
            self._open = False
            for view in self._views:
                with suppress(BufferError):  # Somebody's array holds it, see above.
                    view.release()
            self._views.clear()
            self._closed(sum(buffer.numel() for buffer in self._buffers.values()))
            self._buffers = {}

    def _view(self, buffer: torch.Tensor) -> memoryview:
        view = buffer.numpy().data.toreadonly()
        self._views.append(view)
        return view


class Staging:
    """Copies between one store's slots and bytes in host memory. For one thread."""

    def __init__(self, store: Store, lane: Lane, host_bytes_max: int) -> None:
        self._store = store
        self._lane = lane
        self._left = host_bytes_max
        self._pinned = store.device.type == "cuda"

    @property
    def host_bytes_left(self) -> int:
        """Host memory that outward copies may still take."""
        return self._left

    def outward(self, number: int, named: Named, hold: Hold) -> Outward | Skipped:
        """Begin to copy slot `number` to host memory; takes over `hold`, in every case."""
        sizes = {part.name: self._store.object_nbytes(part.name) for part in self._store.parts}
        if sum(sizes.values()) > self._left:
            hold.release()
            return Skipped(NO_HOST_MEMORY)
        try:
            buffers = {name: self._buffer(nbytes) for name, nbytes in sizes.items()}
            copies = [
                copy
                for name, buffer in buffers.items()
                for copy in self._pairs(name, number, buffer)
            ]
            fence = self._lane.run(copies)
        except BaseException:
            hold.release()
            raise
        self._left -= sum(sizes.values())
        return Outward(fence, named, buffers, hold, self._give)

    def inward(self, blobs: Sequence[Blob], number: int) -> Fence:
        """Begin to write blobs into slot `number`, which must be the caller's and unread till then.

        Raises LayoutError, before anything is written, unless the blobs are exactly the parts of the
        store, for this rank, each of its size. The blobs' memory must stay leased until the fence.
        Codecs are the caller's to check: bytes do not say what they are.
        """
        found = {blob.part: blob for blob in blobs}
        wanted = {part.name for part in self._store.parts}
        if found.keys() != wanted or len(found) != len(blobs):
            raise LayoutError(f"a slot needs {sorted(wanted)}, once each, not {sorted(found)}")
        copies: list[Copy] = []
        for name, blob in found.items():
            shard, nbytes = self._store.part(name)[1], self._store.object_nbytes(name)
            if blob.data.nbytes != nbytes or blob.more or blob.shard not in (None, shard):
                raise LayoutError(
                    f"part {name!r}: {blob.data.nbytes} bytes for units {blob.shard}, not {nbytes} "
                    f"for {shard}"
                )
            source = readable(blob.data)
            copies += [(slot, host) for host, slot in self._pairs(name, number, source)]
        return self._lane.run(copies)

    def _pairs(self, name: str, number: int, flat: torch.Tensor) -> list[Copy]:
        """Return pairs of (host bytes, slot bytes), shaped alike."""
        return [
            (flat[offset : offset + piece.numel()].view(piece.shape), piece)
            for offset, piece in self._store.pieces(name, number)
        ]

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _give(self, nbytes: int) -> None:
        self._left += nbytes


def readable(data: memoryview) -> torch.Tensor:
    """Return the flat bytes of `data` as a tensor without copying them; it must never be written.

    The memory may be mapped read-only: torch has no read-only tensors, and a write would kill the
    process. The tensor keeps `data` alive.
    """
    flat = memoryview(data).cast("B")
    if not flat.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if not flat.readonly:
        return torch.frombuffer(flat, dtype=torch.uint8)
    window = (ctypes.c_ubyte * flat.nbytes).from_address(address_of(flat))
    window.owner = flat  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)


def address_of(data: memoryview) -> int:
    """Return where the bytes of `data` begin in memory."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)
