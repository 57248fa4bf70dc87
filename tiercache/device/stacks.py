"""Per-slot state as tensors: the tensors of a part that agree in shape lie in one stack.

A stack is one tensor `[layers, slots, *shape]`: what kernels index by slot number. Where each of its
layers lies in the bytes of an object follows from the part, so that bytes and slots convert by plain
copies, whatever the codec: an encoded part is a part like any other (see `codecs`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from tiercache.errors import LayoutError
from tiercache.state import Layout, Part, Shard, Tensor

STACK_ALIGN: Final = 16
"""Where a stack may start inside a slot that lies in shared memory: enough for vector loads."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name; LayoutError when torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LayoutError(f"torch has no dtype {name!r}")
    return found


def local_shape(part: Part, tensor: Tensor, shard: Shard) -> tuple[int, ...]:
    """Return the shape of the piece of `tensor` that `shard` holds."""
    if tensor.shard_axis is None:
        return tensor.shape
    axis, width = tensor.shard_axis, shard.stop - shard.start
    size = tensor.shape[axis] // part.units * width
    return (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors of one part that agree in all but their names.

    `shape`, `axes`: of one layer, as this rank holds it. `offsets`: where each layer's bytes begin in
    an object of the part, in layer order.
    """

    part: str
    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    offsets: tuple[int, ...]

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer in one slot."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one slot."""
        return self.layer_nbytes * len(self.names)

    @property
    def consecutive(self) -> bool:
        """Whether the layers lie one right after the other in an object."""
        first, size = self.offsets[0], self.layer_nbytes
        return self.offsets == tuple(range(first, first + self.nbytes, size))


def stacks_of(part: Part, shard: Shard) -> tuple[Stack, ...]:
    """Return the stacks of a snapshot part as `shard` holds it, by first tensor."""
    groups: dict[tuple[str, tuple[int, ...], tuple[str, ...]], list[tuple[str, int]]] = {}
    offset = 0
    for tensor in part.tensors:
        shape = local_shape(part, tensor, shard)
        what = (tensor.dtype, shape, tensor.axes)
        groups.setdefault(what, []).append((tensor.name, offset))
        offset += prod(shape) * torch_dtype(tensor.dtype).itemsize
    return tuple(
        Stack(
            part=part.name,
            names=tuple(name for name, _ in found),
            dtype=torch_dtype(dtype),
            shape=shape,
            axes=axes,
            offsets=tuple(offset for _, offset in found),
        )
        for (dtype, shape, axes), found in groups.items()
    )


class Store:
    """The tensors of one pool: `tensors[i]` is `[layers, slots, *stacks[i].shape]`.

    `parts` and `shards` are what one slot holds. With `memory` (flat uint8) the tensors are views of
    it, slot `n` in its bytes `[n * stride, n * stride + nbytes)`; otherwise each is made, zeroed.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        shards: Sequence[Shard],
        slots: int,
        *,
        device: torch.device | str = "cpu",
        memory: tuple[torch.Tensor, int] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.shards = tuple(shards)
        self.stacks: tuple[Stack, ...] = tuple(
            stack
            for part, shard in zip(parts, shards, strict=True)
            for stack in stacks_of(part, shard)
        )
        self.slots = slots
        if memory is None:
            self.tensors = tuple(
                torch.zeros((len(s.names), slots, *s.shape), dtype=s.dtype, device=device)
                for s in self.stacks
            )
        else:
            self.tensors = _views(self.stacks, slots, *memory)
        self.device = self.tensors[0].device
        self._index = {part.name: at for at, part in enumerate(self.parts)}

    @property
    def slot_nbytes(self) -> int:
        """Bytes of state in one slot, without padding."""
        return sum(stack.nbytes for stack in self.stacks)

    def part(self, name: str) -> tuple[Part, Shard]:
        """Return a part of the slots with the shard that is held; LayoutError when there is none."""
        at = self._index.get(name)
        if at is None:
            raise LayoutError(f"slots hold {sorted(self._index)}, not {name!r}")
        return self.parts[at], self.shards[at]

    def object_nbytes(self, name: str) -> int:
        """Return the bytes of one object of that part."""
        part, shard = self.part(name)
        return part.nbytes(0, shard)

    def pieces(self, name: str, number: int) -> list[tuple[int, torch.Tensor]]:
        """Return slot `number` of that part as (offset in an object, live byte view) pairs."""
        found = []
        for stack, tensor in zip(self.stacks, self.tensors, strict=True):
            if stack.part != name:
                continue
            content = as_bytes(tensor[:, number])
            if stack.consecutive:
                found.append((stack.offsets[0], content))
            else:
                found += list(zip(stack.offsets, content, strict=True))
        return found

    @staticmethod
    def index(number: int) -> torch.Tensor:
        """Return a slot number as kernels take it; on the CPU, where they check it."""
        return torch.tensor([number], dtype=torch.int64)

    def fill(self, number: int, byte: int) -> None:
        """Set every byte of slot `number`."""
        for tensor in self.tensors:
            as_bytes(tensor[:, number]).fill_(byte)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a live view of `tensor` as bytes, with one axis more."""
    return tensor.unsqueeze(-1).view(torch.uint8)


def snapshot_parts(layout: Layout) -> tuple[Part, ...]:
    """Return the parts that a slot holds; LayoutError when there are none."""
    found = tuple(part for part in layout.parts if part.is_snapshot)
    if not found:
        raise LayoutError("the layout has no snapshot parts: nothing would be in a slot")
    return found


def aligned_nbytes(parts: Sequence[Part], shards: Sequence[Shard]) -> int:
    """Return the bytes of one slot when each of its stacks starts at a multiple of `STACK_ALIGN`."""
    found = [s for part, shard in zip(parts, shards, strict=True) for s in stacks_of(part, shard)]
    return _starts(found)[-1]


def _views(
    stacks: Sequence[Stack], slots: int, memory: torch.Tensor, stride: int
) -> tuple[torch.Tensor, ...]:
    """Return each stack as a view of flat `memory` in which slots are `stride` bytes apart."""
    starts = _starts(stacks)
    if starts[-1] > stride or stride * slots > memory.numel():
        raise LayoutError(
            f"{slots} slots of {starts[-1]} bytes, {stride} apart, do not fit into "
            f"{memory.numel()} bytes"
        )
    if stride % STACK_ALIGN or memory.storage_offset() % STACK_ALIGN:
        raise LayoutError(f"slots {stride} bytes apart do not start at multiples of {STACK_ALIGN}")
    views = []
    for stack, start in zip(stacks, starts, strict=False):
        item = stack.dtype.itemsize
        inner = torch.empty(stack.shape, device="meta").stride()
        typed = memory[start : start + (memory.numel() - start) // item * item].view(stack.dtype)
        size = (len(stack.names), slots, *stack.shape)
        strides = (stack.layer_nbytes // item, stride // item, *inner)
        views.append(typed.as_strided(size, strides, typed.storage_offset()))
    return tuple(views)


def _starts(stacks: Sequence[Stack]) -> list[int]:
    """Return where each stack starts in a slot, and last, where the slot ends."""
    starts, offset = [], 0
    for stack in stacks:
        offset = -(-offset // STACK_ALIGN) * STACK_ALIGN
        starts.append(offset)
        offset += stack.nbytes
    return [*starts, offset]
