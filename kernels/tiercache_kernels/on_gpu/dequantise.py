"""INT8 slots to floating point: gather, scaling and scatter in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_VALUES = 4096
"""That one program restores, 32 a thread."""

VECTOR_BYTES = 16
"""Of one store by one thread."""

WARPS = 4


@triton.jit
def dequantise_tiles(
    p_qdata,
    p_scale,
    p_source_slots,
    p_target,
    p_target_slots,
    qdata_layer,
    qdata_slot,
    scale_layer,
    scale_slot,
    target_layer,
    target_slot,
    count,
    heads: tl.constexpr,
    d_v: tl.constexpr,
    d_k: tl.constexpr,
    block_v: tl.constexpr,
    block_k: tl.constexpr,
    vector: tl.constexpr,
):
    """Restore `block_v` rows of all of d_k of one (layer, slot, head)."""
    blocks: tl.constexpr = (d_v + block_v - 1) // block_v
    whole: tl.constexpr = block_k == d_k and d_v % block_v == 0
    i_program = tl.program_id(0)
    i_block = i_program % blocks
    i_head = (i_program // blocks % heads).to(tl.int64)
    i_slot = i_program // (blocks * heads) % count
    i_layer = (i_program // (blocks * heads) // count).to(tl.int64)
    i_source = tl.load(p_source_slots + i_slot)
    i_target = tl.load(p_target_slots + i_slot)
    p_qdata += i_layer * qdata_layer + i_source * qdata_slot + i_head * (d_v * d_k)
    p_scale += i_layer * scale_layer + i_source * scale_slot + i_head * d_k
    p_target += i_layer * target_layer + i_target * target_slot + i_head * (d_v * d_k)

    o_v = i_block * block_v + tl.arange(0, block_v)
    o_k = tl.arange(0, block_k)
    o_tile = o_v[:, None] * d_k + o_k[None, :]
    m_tile = (o_v < d_v)[:, None] & (o_k < d_k)[None, :]
    # Otherwise the load of bytes, 16 a thread, would shape the tile, and the stores would be scattered.
    o_qdata = tl.max_contiguous(o_tile, [1, vector])
    b_scale = tl.load(p_scale + o_k, mask=o_k < d_k, other=0).to(tl.float32)
    if whole:
        b_q = tl.load(p_qdata + o_qdata)
    else:
        b_q = tl.load(p_qdata + o_qdata, mask=m_tile, other=0)
    b_x = (b_q.to(tl.float32) * b_scale[None, :]).to(p_target.dtype.element_ty)
    if whole:
        tl.store(p_target + o_tile, b_x)
    else:
        tl.store(p_target + o_tile, b_x, mask=m_tile)


def dequantise(
    qdata: Tensor, scale: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor
) -> None:
    """`tiercache_kernels.dequantise`."""
    layers, _, heads, d_v, d_k = target.shape
    count = len(source_slots)
    tiling = tile(heads, d_v, d_k, target.element_size())
    grid = (layers * count * heads * triton.cdiv(d_v, tiling["block_v"]),)
    if not grid[0]:
        return
    with torch.cuda.device_of(target):
        dequantise_tiles[grid](
            qdata,
            scale,
            source_slots.to(target.device, non_blocking=True),
            target,
            target_slots.to(target.device, non_blocking=True),
            qdata.stride(0),
            qdata.stride(1),
            scale.stride(0),
            scale.stride(1),
            target.stride(0),
            target.stride(1),
            count,
            **tiling,
        )


def tile(heads: int, d_v: int, d_k: int, itemsize: int) -> dict[str, int]:
    """Return how a launch is cut: the kernel's integers known when it is compiled, and its warps."""
    block_k = triton.next_power_of_2(d_k)
    return {
        "heads": heads,
        "d_v": d_v,
        "d_k": d_k,
        "block_v": min(max(1, PROGRAM_VALUES // block_k), triton.next_power_of_2(d_v)),
        "block_k": block_k,
        "vector": min(VECTOR_BYTES // itemsize, block_k),
        "num_warps": WARPS,
    }
