"""Between the blocks of a worker's tensors and the flat bytes of objects. Needs torch, no vLLM.

Everything is moved as bytes, so that a dtype never matters but for its size. An object holds the tensors
of its part one after the other, each in canonical order: tokens first, then heads.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from tiercache.errors import LayoutError
from tiercache.state.layout import DTYPE_BYTES
from tiercache_vllm.geometry import Geometry, Pages, Place, Substate

STAGED_BYTES = 64 << 20
"""Bytes of objects that are moved between the device and one staging buffer at a time."""


class PartBlocks:
    """The blocks of one part, in all of its groups and layers."""

    def __init__(
        self, geometry: Geometry, part: int, tensors: Mapping[str, torch.Tensor], blocks: int
    ) -> None:
        form = geometry.layout.parts[part]
        shard = form.shards(geometry.ranks)[0]
        self.groups = geometry.groups(part)
        self.tokens = form.block_tokens
        self.nbytes = form.nbytes(form.block_tokens, shard)
        self._views = [
            (self.groups.index(place.group), _view(place, tensors[place.what.layer], blocks))
            for place in geometry.places[part]
        ]
        self.device = self._views[0][1].device
        held = sum(view[0].numel() for _, view in self._views)
        if held != self.nbytes:
            raise LayoutError(f"part {form.name!r}: a block holds {held} bytes, not {self.nbytes}")

    def gather(self, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return `[objects, nbytes]` uint8 on the device: the objects whose blocks are given, each as one
        block per group. Enqueued on the current stream; private memory."""
        out = torch.empty((len(blocks), self.nbytes), dtype=torch.uint8, device=self.device)
        for group, view, target in self._targets(out):
            if self.device.type == "cpu":
                # One copy each; an index would make two of it, but fewer launches on a device.
                for row, chosen in enumerate(blocks):
                    target[row].copy_(view[chosen[group]])
            else:
                target.copy_(view[self._index(blocks, group)])
        return out

    def scatter(self, blocks: Sequence[Sequence[int]], objects: torch.Tensor) -> None:
        """Write objects, `[objects, nbytes]` uint8 on the device, into their blocks, on the current
        stream."""
        for group, view, source in self._targets(objects):
            if self.device.type == "cpu":
                for row, chosen in enumerate(blocks):
                    view[chosen[group]].copy_(source[row])
            else:
                view[self._index(blocks, group)] = source

    def _targets(self, objects: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield for each tensor the group whose block table leads to it, its blocks, and its bytes in
        the objects, shaped like them."""
        at = 0
        for group, view in self._views:
            size = view[0].numel()
            yield group, view, objects[:, at : at + size].view(len(objects), *view.shape[1:])
            at += size

    def _index(self, blocks: Sequence[Sequence[int]], group: int) -> torch.Tensor:
        numbers = [chosen[group] for chosen in blocks]
        return torch.tensor(numbers, dtype=torch.long).to(self.device)


def _view(place: Place, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the tensor as bytes, `[blocks, ...]` with the rest of a block in canonical order."""
    match place.what:
        case Pages():
            return _pages_view(place.what, tensor, blocks)
        case Substate():
            return _state_view(place.what, tensor, blocks)


def _pages_view(pages: Pages, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    if tensor.ndim != 4 or tensor.shape[0] % blocks or tensor.stride(-1) != 1:
        raise LayoutError(f"{pages.layer}: pages {tuple(tensor.shape)} are not understood")
    # A block of the pool may be several of the kernel's; each of them holds heads, then tokens.
    split = (blocks, tensor.shape[0] // blocks)
    grouped = tensor.view(*split, *tensor.shape[1:])
    if (tensor.shape[1], tensor.shape[3]) != (pages.heads, pages.width):
        raise LayoutError(f"{pages.layer}: pages {tuple(tensor.shape)} are not {pages}")
    return grouped.view(torch.uint8).permute(0, 1, 3, 2, 4)


def _state_view(state: Substate, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    size = DTYPE_BYTES[state.dtype]
    elements = 1
    for length in state.shape:
        elements *= length
    page = tensor.view(torch.uint8).flatten(1) if tensor.ndim > 1 else tensor
    end = state.offset + elements * size
    if page.ndim != 2 or page.shape[0] != blocks or page.shape[1] < end or page.stride(1) != 1:
        raise LayoutError(f"{state.layer}: state {tuple(tensor.shape)} is not understood")
    values = torch.unflatten(page[:, state.offset : end], 1, (*state.shape, size))
    return values.permute(0, *(axis + 1 for axis in state.order), len(state.shape) + 1)
