"""Slots of recurrent state to INT8: gather, reduction, rounding and scatter in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercache_kernels.reference import SCALE_MIN

TILE_BYTES = 128
"""Of one row of d_k that a program reads: a full cache line."""

VECTOR_BYTES = 16
"""Of one load by one thread."""

WARP_VALUES = 2048
"""That a warp holds in registers at most, 64 a thread; a column's two divisions are shared among them."""


@triton.jit
def quotients(b_x, b_divisor, b_inverse):
    """Divide, correctly rounded, by divisors whose correctly rounded inverse is known.

    A division takes many instructions, this takes five. The first correction gives a quotient within one
    unit in the last place and the second the correctly rounded one (Markstein). Divisors of at least
    `scale_min` keep the remainders from underflow wherever the result is not rounded to zero anyway.
    """
    b_q = b_x * b_inverse
    b_q = tl.fma(tl.fma(-b_divisor, b_q, b_x), b_inverse, b_q)
    return tl.fma(tl.fma(-b_divisor, b_q, b_x), b_inverse, b_q)


@triton.jit
def scales(b_x, dtype: tl.constexpr, scale_min: tl.constexpr):
    """Return each column's scale, rounded to its dtype: zero when it is too small, NaN when broken."""
    # As integers magnitudes order like the floats, with infinity and then NaN on top.
    b_bits = tl.max(b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    b_steps = tl.full(b_bits.shape, 127.0, tl.float32)
    b_scale = quotients(b_bits.to(tl.float32, bitcast=True), b_steps, tl.div_rn(1.0, b_steps))
    b_scale = b_scale.to(dtype).to(tl.float32)
    b_scale = tl.where(b_scale < scale_min, 0.0, b_scale)
    return tl.where(b_bits >= 0x7F800000, float("nan"), b_scale)


@triton.jit
def steps(b_x, b_scale):
    """Return values by their column's scale, rounded half to even; zeros for a scale of zero or NaN."""
    m_usable = b_scale > 0
    b_x = tl.where(m_usable[None, :], b_x, 0.0)
    b_divisor = tl.where(m_usable, b_scale, 1.0)[None, :]
    b_inverse = tl.div_rn(1.0, b_divisor)
    b_q = quotients(b_x, b_divisor.broadcast_to(b_x.shape), b_inverse.broadcast_to(b_x.shape))
    # 1.5 * 2**23: adding it leaves the value, rounded half to even, in the low bits.
    return (b_q + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantise_tiles(
    p_source,
    p_source_slots,
    p_qdata,
    p_scale,
    p_target_slots,
    source_layer,
    source_slot,
    qdata_layer,
    qdata_slot,
    scale_layer,
    scale_slot,
    count,
    heads: tl.constexpr,
    d_v: tl.constexpr,
    d_k: tl.constexpr,
    block_v: tl.constexpr,
    block_k: tl.constexpr,
    vector: tl.constexpr,
    scale_min: tl.constexpr,
):
    """Quantise all of d_v and `block_k` of d_k of one (layer, slot, head), held in registers."""
    blocks: tl.constexpr = (d_k + block_k - 1) // block_k
    whole: tl.constexpr = block_v == d_v and d_k % block_k == 0
    i_program = tl.program_id(0)
    i_block = i_program % blocks
    i_head = (i_program // blocks % heads).to(tl.int64)
    i_slot = i_program // (blocks * heads) % count
    i_layer = (i_program // (blocks * heads) // count).to(tl.int64)
    i_source = tl.load(p_source_slots + i_slot)
    i_target = tl.load(p_target_slots + i_slot)
    p_source += i_layer * source_layer + i_source * source_slot + i_head * (d_v * d_k)
    p_qdata += i_layer * qdata_layer + i_target * qdata_slot + i_head * (d_v * d_k)
    p_scale += i_layer * scale_layer + i_target * scale_slot + i_head * d_k

    o_v = tl.arange(0, block_v)
    o_k = i_block * block_k + tl.arange(0, block_k)
    o_tile = o_v[:, None] * d_k + o_k[None, :]
    m_tile = (o_v < d_v)[:, None] & (o_k < d_k)[None, :]
    if whole:
        b_x = tl.load(p_source + o_tile).to(tl.float32)
    else:
        b_x = tl.load(p_source + o_tile, mask=m_tile, other=0).to(tl.float32)

    b_scale = scales(b_x, p_scale.dtype.element_ty, scale_min)
    b_q = steps(b_x, b_scale)
    tl.store(p_scale + o_k, b_scale.to(p_scale.dtype.element_ty), mask=o_k < d_k)
    # Otherwise the store of bytes, 16 a thread, would shape the tile, and the loads would be scattered.
    o_tile = tl.max_contiguous(o_tile, [1, vector])
    if whole:
        tl.store(p_qdata + o_tile, b_q)
    else:
        tl.store(p_qdata + o_tile, b_q, mask=m_tile)


def quantise(
    source: Tensor, source_slots: Tensor, qdata: Tensor, scale: Tensor, target_slots: Tensor
) -> None:
    """`tiercache_kernels.quantise`."""
    layers, _, heads, d_v, d_k = source.shape
    count = len(source_slots)
    tiling = tile(heads, d_v, d_k, source.element_size())
    grid = (layers * count * heads * triton.cdiv(d_k, tiling["block_k"]),)
    if not grid[0]:
        return
    with torch.cuda.device_of(source):
        quantise_tiles[grid](
            source,
            source_slots.to(source.device, non_blocking=True),
            qdata,
            scale,
            target_slots.to(source.device, non_blocking=True),
            source.stride(0),
            source.stride(1),
            qdata.stride(0),
            qdata.stride(1),
            scale.stride(0),
            scale.stride(1),
            count,
            scale_min=SCALE_MIN,
            **tiling,
        )


def tile(heads: int, d_v: int, d_k: int, itemsize: int) -> dict[str, int]:
    """Return how a launch is cut: the kernel's integers known when it is compiled, and its warps."""
    block_v = triton.next_power_of_2(d_v)
    block_k = min(TILE_BYTES // itemsize, triton.next_power_of_2(d_k))
    return {
        "heads": heads,
        "d_v": d_v,
        "d_k": d_k,
        "block_v": block_v,
        "block_k": block_k,
        "vector": min(VECTOR_BYTES // itemsize, block_k),
        "num_warps": min(max(4, block_v * block_k // WARP_VALUES), 16),
    }
