"""The states of an engine, where the engine keeps them: read and written in place, never copied over.

Engines have pools of their own. What they have in common is that each tensor of a state is indexed by a
slot number (a block id, a pool index), so that a view `[slots, *shape]` per tensor of the layout says it
all, however far slots lie apart. Views are made once; a slot is named at each call.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

import torch

from tiercache.device.pools import Seat
from tiercache.device.stacks import local_shape, torch_dtype
from tiercache.errors import LayoutError
from tiercache.state import Part, Shard, Tensor


class EngineStates:
    """Every tensor of the snapshot parts of `seat`, by its name in the layout, as `[slots, *shape]`.

    Shapes are this rank's, axes in the layout's order (a transposed view will do), dtypes the layout's.
    Raises LayoutError when one is missing, is one too many, or is another's.
    """

    def __init__(self, seat: Seat, views: Mapping[str, torch.Tensor]) -> None:
        wanted = {tensor.name: (part, tensor, shard) for part, tensor, shard in _tensors(seat)}
        if views.keys() != wanted.keys():
            raise LayoutError(f"states are {sorted(wanted)}, not {sorted(views)}")
        for name, view in views.items():
            part, tensor, shard = wanted[name]
            shape, dtype = local_shape(part, tensor, shard), torch_dtype(tensor.dtype)
            if view.dtype != dtype or view.shape[1:] != shape:
                found = f"{view.dtype} {list(view.shape[1:])}"
                raise LayoutError(f"{name!r} is {found} in a slot, not {dtype} {list(shape)}")
        counts = {len(view) for view in views.values()}
        if len(counts) != 1:
            raise LayoutError(f"states have different numbers of slots: {sorted(counts)}")
        self.seat = seat
        self.slots = counts.pop()
        self._views = {name: view.unsqueeze(0) for name, view in views.items()}
        self._dense = {name: _is_dense(view) for name, view in views.items()}

    @classmethod
    def packed(
        cls,
        seat: Seat,
        blocks: Sequence[tuple[torch.Tensor, Sequence[str]]],
        *,
        reversed_axes: Collection[str] = (),
    ) -> "EngineStates":
        """Return the states that lie packed in blocks of bytes, as vLLM registers them: for each layer one
        int8 (or uint8) tensor `[blocks, 1, 1, C]`, its pages padded to any size, and in a page the named
        tensors one right after the other, `C` bytes in all.

        `reversed_axes`: names of those whose axes lie in the other order, `[columns, channels]` say.
        Raises LayoutError for other blocks, or tensors that do not begin at whole items.
        """
        known = {tensor.name: (part, tensor, shard) for part, tensor, shard in _tensors(seat)}
        views: dict[str, torch.Tensor] = {}
        for block, names in blocks:
            rows, start = _rows(block), 0
            for name in names:
                if name not in known:
                    raise LayoutError(f"no state {name!r} is in a slot; there are {sorted(known)}")
                part, tensor, shard = known[name]
                shape, dtype = local_shape(part, tensor, shard), torch_dtype(tensor.dtype)
                nbytes = prod(shape) * dtype.itemsize
                flat = rows[:, start : start + nbytes]
                if flat.shape[1] != nbytes:
                    raise LayoutError(f"{name!r} ends beyond the {rows.shape[1]} bytes of a block")
                if any(n % dtype.itemsize for n in (flat.data_ptr(), rows.stride(0))):
                    raise LayoutError(f"{name!r} does not lie at whole items in a block")
                typed = flat.view(dtype)
                if name in reversed_axes:
                    typed = typed.view(len(rows), *shape[::-1])
                    views[name] = typed.permute(0, *range(typed.ndim - 1, 0, -1))
                else:
                    views[name] = typed.view(len(rows), *shape)
                start += nbytes
            if start != rows.shape[1]:
                raise LayoutError(f"a block has {rows.shape[1]} bytes, its states {start}")
        return cls(seat, views)

    def layer(self, name: str) -> torch.Tensor:
        """Return one tensor as `[1, slots, *shape]`, live."""
        return self._views[name]

    def dense(self, name: str) -> bool:
        """Whether nothing lies between the elements of a slot, as kernels need it."""
        return self._dense[name]

    def check(self, slot: int) -> None:
        """Raise IndexError when there is no such slot."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot}, of {self.slots}")


def _tensors(seat: Seat) -> Iterator[tuple[Part, Tensor, Shard]]:
    for part, shard in zip(seat.parts, seat.shards, strict=True):
        for tensor in part.tensors:
            yield part, tensor, shard


def _rows(block: torch.Tensor) -> torch.Tensor:
    """Return the bytes of blocks as `[blocks, C]`, live."""
    rows = block
    while rows.ndim > 2 and rows.shape[1] == 1:
        rows = rows.select(1, 0)
    if rows.ndim != 2 or rows.dtype not in (torch.int8, torch.uint8) or rows.stride(1) != 1:
        raise LayoutError(
            f"blocks are {block.dtype} {list(block.shape)} strided {block.stride()}, not bytes of one axis"
        )
    return rows


def _is_dense(view: torch.Tensor) -> bool:
    expected = torch.empty(view.shape[1:], device="meta").stride()
    pairs = zip(view.shape[1:], view.stride()[1:], expected, strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in pairs)
