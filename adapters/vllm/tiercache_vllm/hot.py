"""Checkpoints of recurrent states on the device, in INT8: hot ones are restored without leaving it.

The node always has the native bytes too, and decides what a hit is; this only saves the way. What comes
back is quantised: an engine that has such a pool accepts that. How often bytes were derived from quantised
ones is counted and saved with them, and beyond a limit a state is not quantised again.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiercache.device import REQUANTISED_MAX
from tiercache.device.codecs import codec_named
from tiercache.errors import LayoutError
from tiercache.state import Part, Shard
from tiercache.state.layout import DTYPE_BYTES

CODEC = "int8"


@dataclass(frozen=True, slots=True)
class _Slot:
    """A checkpoint's place, and how often its bytes were derived from quantised ones."""

    number: int
    requantised: int


class HotStates:
    """The states of one part of one rank, by the digest of their boundary. Thread-safe.

    `nbytes_max` bounds the pool. A pool without room for one state holds nothing.
    """

    def __init__(self, part: Part, shard: Shard, nbytes_max: int, device: torch.device) -> None:
        first = part.tensors[0]
        forms = {(tensor.dtype, tensor.shape, tensor.axes) for tensor in part.tensors}
        if len(forms) != 1 or first.axes != ("head", "value", "key"):
            raise LayoutError(f"part {part.name!r} has no states that all are (head, value, key)")
        heads = first.shape[0] // part.units * (shard.stop - shard.start)
        self._shape = (len(part.tensors), heads, *first.shape[1:])
        self._dtype = getattr(torch, first.dtype)
        self._codec = codec_named(CODEC)
        layers = self._shape[0]
        tensors = self._codec.forms(first)
        per_slot = 0
        shapes = []
        for tensor in tensors:
            shape = (heads, *tensor.shape[1:])
            size = DTYPE_BYTES[tensor.dtype]
            for length in shape:
                size *= length
            per_slot += layers * size
            shapes.append((shape, getattr(torch, tensor.dtype)))
        self.slots = nbytes_max // per_slot
        self._held = [
            torch.zeros((layers, self.slots, *shape), dtype=dtype, device=device)
            for shape, dtype in shapes
        ]
        self._device = device
        self._free = list(range(self.slots))
        self._known: OrderedDict[bytes, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def keep(self, keys: Sequence[bytes], objects: torch.Tensor, requantised: int) -> None:
        """Keep states, given as `[objects, nbytes]` native bytes on the device, on the current stream."""
        if requantised >= REQUANTISED_MAX or not self.slots:
            return
        with self._lock:
            for row, key in enumerate(keys):
                if key in self._known:
                    self._known.move_to_end(key)
                    continue
                if not self._free:
                    self._free.append(self._known.popitem(last=False)[1].number)
                slot = _Slot(self._free.pop(), requantised + 1)
                native = objects[row].clone().view(self._dtype).view(self._shape).unsqueeze(1)
                self._codec.encode(native, self._at(0), self._held, self._at(slot.number))
                self._known[key] = slot
            self._settle()

    def restore(self, key: bytes) -> tuple[torch.Tensor, int] | None:
        """Return a state as native bytes, `[nbytes]` on the device, and how often it was derived from
        quantised bytes; None when it is not here."""
        with self._lock:
            slot = self._known.get(key)
            if slot is None:
                return None
            self._known.move_to_end(key)
            layers, *shape = self._shape
            native = torch.empty((layers, 1, *shape), dtype=self._dtype, device=self._device)
            self._codec.decode(self._held, self._at(slot.number), native, self._at(0))
            self._settle()
            return native.view(-1).view(torch.uint8), slot.requantised

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._free += [slot.number for slot in self._known.values()]
            self._known.clear()

    def _at(self, slot: int) -> torch.Tensor:
        return torch.tensor([slot], dtype=torch.int64, device=self._device)

    def _settle(self) -> None:
        # Slots are used on more than one stream, and reused: what was begun here is over when the lock is.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
