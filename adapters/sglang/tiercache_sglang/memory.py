"""Views of the host memory that SGLang's pools lie in.

SGLang names a page by pointers. A pointer is only believed where it lies inside of a tensor of the pool
that named it: what comes out are slices of memory that is known to be there.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from tiercache.errors import LayoutError


class Regions:
    """The memory of one pool's CPU tensors, by address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found: dict[int, memoryview] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type != "cpu" or not storage.nbytes():
                continue
            if len(found.get(storage.data_ptr(), b"")) < storage.nbytes():
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                found[storage.data_ptr()] = flat.numpy().data
        self._starts = sorted(found)
        self._views = [found[start] for start in self._starts]

    def view(self, pointer: int, nbytes: int) -> memoryview:
        """Return the writable bytes at an address; LayoutError where the pool has none."""
        at = bisect_right(self._starts, pointer) - 1
        if at >= 0 and nbytes > 0:
            offset = pointer - self._starts[at]
            view = self._views[at][offset : offset + nbytes]
            if len(view) == nbytes:
                return view
        raise LayoutError(f"the pool has no {nbytes} bytes at {pointer:#x}")

    def pages(
        self, pointers: Sequence[int], sizes: Sequence[int], count: int
    ) -> list[tuple[memoryview, ...]]:
        """Return the pieces of each of `count` pages, which take equally many of the pointers."""
        if not count or len(pointers) % count or len(pointers) != len(sizes):
            raise LayoutError(f"{len(pointers)} pointers do not make {count} pages")
        each = len(pointers) // count
        views = [self.view(*place) for place in zip(pointers, sizes, strict=True)]
        return [tuple(views[at : at + each]) for at in range(0, len(views), each)]


def tensors_in(pool: object) -> list[torch.Tensor]:
    """Return all tensors that an object holds directly, or in a list or tuple."""
    values = vars(pool).values()
    direct = [value for value in values if isinstance(value, torch.Tensor)]
    listed = [value for value in values if isinstance(value, list | tuple)]
    return direct + [each for group in listed for each in group if isinstance(each, torch.Tensor)]
