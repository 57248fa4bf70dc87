"""KV pages of an engine as the blocks of a part, and back.

An engine keeps each tensor of its KV as `[pages, tokens of a page, *shape]`; a stored block is its tensors
one after the other, each `[tokens, *shape]`. Whole blocks are gathered on the device into one
matrix `[blocks, bytes of a block]`, which goes to the host in one copy; the other way round likewise. A
block is one page or several, in order.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

import tiercache_kernels as kernels
from tiercache.device.stacks import as_bytes, local_shape, torch_dtype
from tiercache.errors import LayoutError
from tiercache.state import Part, Shard


class PagedBlocks:
    """The pages that hold a part, as this rank has it, on one device.

    `tensors`: by name in the layout. Raises LayoutError when one is missing or has another shape than
    the layout says, or a block is no whole number of pages.
    """

    def __init__(self, part: Part, shard: Shard, tensors: Mapping[str, torch.Tensor]) -> None:
        self.part = part
        self.shard = shard
        self.nbytes = part.nbytes(part.block_tokens, shard)
        if part.is_snapshot or tensors.keys() != {tensor.name for tensor in part.tensors}:
            raise LayoutError(f"part {part.name!r} is not kept in pages of {sorted(tensors)}")
        self._tensors: list[tuple[torch.Tensor, int]] = []
        offset = 0
        for described in part.tensors:
            tensor = tensors[described.name]
            expected = (*tensor.shape[:2], *local_shape(part, described, shard))
            if tensor.dtype != torch_dtype(described.dtype) or tensor.shape != expected:
                raise LayoutError(
                    f"{described.name!r} is {tensor.dtype} {tuple(tensor.shape)} in pages"
                )
            if offset % tensor.itemsize or self.nbytes % tensor.itemsize:
                raise LayoutError(f"{described.name!r} does not lie at whole items in a block")
            self._tensors.append((tensor, offset))
            offset += prod(expected[2:]) * tensor.itemsize * part.block_tokens
        pages = {tensor.shape[:2] for tensor, _ in self._tensors}
        if len(pages) != 1:
            raise LayoutError(f"part {part.name!r}: tensors have different pages: {sorted(pages)}")
        self.page_tokens = int(next(iter(pages))[1])
        if part.block_tokens % self.page_tokens:
            raise LayoutError(
                f"blocks of {part.block_tokens} tokens are no whole pages of {self.page_tokens}"
            )
        self.device = self._tensors[0][0].device

    @property
    def pages_per_block(self) -> int:
        """Pages of one block."""
        return self.part.block_tokens // self.page_tokens

    def gather(self, pages: Sequence[int]) -> torch.Tensor:
        """Return the bytes of the blocks that `pages` hold, in order: uint8 `[blocks, nbytes]`."""
        blocks = torch.empty(
            (self._count(pages), self.nbytes), dtype=torch.uint8, device=self.device
        )
        for index, numbers in enumerate(self._columns(pages)):
            for tensor, offset in self._tensors:
                kernels.gather_pages(tensor, numbers, self._pages_in(blocks, tensor, offset, index))
        return blocks

    def scatter(self, blocks: torch.Tensor, pages: Sequence[int]) -> None:
        """Write blocks, as `gather` returns them, into the pages."""
        if blocks.shape != (self._count(pages), self.nbytes) or blocks.dtype != torch.uint8:
            raise LayoutError(
                f"blocks are {tuple(blocks.shape)}, not {self._count(pages)} x {self.nbytes}"
            )
        for index, numbers in enumerate(self._columns(pages)):
            for tensor, offset in self._tensors:
                kernels.scatter_pages(
                    self._pages_in(blocks, tensor, offset, index), tensor, numbers
                )

    def head(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        """Return the bytes of the first `tokens` tokens of one block, which is partial: flat uint8."""
        if not 0 < tokens <= self.part.block_tokens or self._count(pages) != 1:
            raise LayoutError(f"no {tokens} tokens of {self._count(pages)} blocks")
        used = self._used(pages, tokens)
        taken = [torch.cat([tensor[page] for page in used])[:tokens] for tensor, _ in self._tensors]
        return torch.cat([as_bytes(tensor).reshape(-1) for tensor in taken])

    def put_head(self, data: torch.Tensor, pages: Sequence[int], tokens: int) -> None:
        """Write the bytes of a partial block; what lies behind its tokens in the pages stays."""
        if self._count(pages) != 1 or data.numel() != self.part.nbytes(tokens, self.shard):
            raise LayoutError(f"{data.numel()} bytes are not {tokens} tokens of {self.part.name!r}")
        if data.dtype != torch.uint8:
            raise LayoutError(f"the bytes of a block are not {data.dtype}")
        used = self._used(pages, tokens)
        offset = 0
        for tensor, _ in self._tensors:
            row = prod(tensor.shape[2:]) * tensor.itemsize
            for token in range(tokens):
                page, inside = divmod(token, self.page_tokens)
                target = as_bytes(tensor[used[page], inside])
                target.copy_(data[offset : offset + row].view(target.shape))
                offset += row

    def _count(self, pages: Sequence[int]) -> int:
        blocks, rest = divmod(len(pages), self.pages_per_block)
        if rest:
            raise LayoutError(f"{len(pages)} pages are no whole blocks of {self.pages_per_block}")
        return blocks

    def _used(self, pages: Sequence[int], tokens: int) -> Sequence[int]:
        """Return the pages that the first tokens of a block are in; others may be no pages at all."""
        used = pages[: -(-tokens // self.page_tokens)]
        count = len(self._tensors[0][0])
        # A negative number would be a page counted from the end: somebody else's.
        if not all(0 <= page < count for page in used):
            raise IndexError(f"pages {list(used)}, of {count}")
        return used

    def _columns(self, pages: Sequence[int]) -> list[torch.Tensor]:
        """Return the first page of every block, the second of every block, and so on."""
        step = self.pages_per_block
        return [torch.tensor(pages[index::step], dtype=torch.int64) for index in range(step)]

    def _pages_in(
        self, blocks: torch.Tensor, tensor: torch.Tensor, offset: int, index: int
    ) -> torch.Tensor:
        """Return page `index` of every block in the matrix, live, shaped as `tensor`'s pages."""
        size = tensor[0].numel()
        typed = blocks.view(-1).view(tensor.dtype)
        start = offset // tensor.itemsize + index * size
        strides = (
            self.nbytes // tensor.itemsize,
            *torch.empty(tensor.shape[1:], device="meta").stride(),
        )
        return typed.as_strided((len(blocks), *tensor.shape[1:]), strides, start)
