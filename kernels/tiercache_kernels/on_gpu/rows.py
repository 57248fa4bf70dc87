"""Copy rows between strided places, picked by index on either side: slots, pages, ranges.

A row is what is contiguous on both sides. Rows of one dtype move as bytes; floats of two dtypes are cast.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_BYTES = 16384
"""What one program moves: 128 bytes a thread, eight loads of 16 in flight."""

WARPS = 4


@triton.jit
def copy_rows(
    p_source,
    p_target,
    p_source_index,
    p_target_index,
    source_outer,
    source_inner,
    target_outer,
    target_inner,
    count,
    width,
    has_source_index: tl.constexpr,
    has_target_index: tl.constexpr,
    block: tl.constexpr,
):
    """Copy one block of row (outer, i): i is looked up on a side that has an index."""
    i_program = tl.program_id(0)
    blocks = tl.cdiv(width, block)
    i_row = i_program // blocks
    i_block = i_program % blocks
    i_outer = (i_row // count).to(tl.int64)
    i_source = (i_row % count).to(tl.int64)
    i_target = i_source
    if has_source_index:
        i_source = tl.load(p_source_index + i_source)
    if has_target_index:
        i_target = tl.load(p_target_index + i_target)
    p_source += i_outer * source_outer + i_source * source_inner
    p_target += i_outer * target_outer + i_target * target_inner
    o_block = i_block.to(tl.int64) * block + tl.arange(0, block)
    m_block = o_block < width
    b_row = tl.load(p_source + o_block, mask=m_block, other=0)
    tl.store(p_target + o_block, b_row.to(p_target.dtype.element_ty), mask=m_block)


def copy_slots(source: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor) -> None:
    """`tiercache_kernels.copy_slots`."""
    move(rows(source, 2), source_slots, rows(target, 2), target_slots, len(source_slots))


def gather_pages(paged: Tensor, pages: Tensor, staging: Tensor) -> None:
    """`tiercache_kernels.gather_pages`."""
    move(rows(paged, 1), pages, rows(staging, 1), None, len(pages))


def scatter_pages(staging: Tensor, paged: Tensor, pages: Tensor) -> None:
    """`tiercache_kernels.scatter_pages`."""
    move(rows(staging, 1), None, rows(paged, 1), pages, len(pages))


def copy_range(source: Tensor, target: Tensor, axis: int) -> None:
    """Copy between two equal shapes, each a cut of `axis` of a dense tensor."""
    leading = source.ndim + axis
    if leading > 2:
        for each in range(len(source)):
            copy_range(source[each], target[each], axis)
        return
    source, target = rows(source, leading), rows(target, leading)
    move(source, None, target, None, source.shape[1])


def rows(tensor: Tensor, leading: int) -> Tensor:
    """Return a view `[outer, inner, row]` of a tensor with at most two axes before the row's."""
    row = tensor[..., None].flatten(leading)
    return row[(None,) * (2 - leading)]


def move(
    source: Tensor,
    source_index: Tensor | None,
    target: Tensor,
    target_index: Tensor | None,
    count: int,
) -> None:
    """Launch `copy_rows` over `[outer, rows, elements]`; without an index the first `count` rows."""
    if source.dtype == target.dtype:
        source, target = source.view(torch.uint8), target.view(torch.uint8)
    outer, _, width = source.shape
    block = PROGRAM_BYTES // max(source.element_size(), target.element_size())
    block = min(block, triton.next_power_of_2(width))
    grid = (outer * count * triton.cdiv(width, block),)
    if not grid[0]:
        return
    with torch.cuda.device_of(source):
        copy_rows[grid](
            source,
            target,
            None if source_index is None else source_index.to(source.device, non_blocking=True),
            None if target_index is None else target_index.to(source.device, non_blocking=True),
            source.stride(0),
            source.stride(1),
            target.stride(0),
            target.stride(1),
            count,
            width,
            has_source_index=source_index is not None,
            has_target_index=target_index is not None,
            block=block,
            num_warps=WARPS,
        )
