"""The 64-bit sum of each block of bytes, on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiercache_kernels.reference import FIRST_FACTOR, GOLDEN, SECOND_FACTOR
from tiercache_kernels.words import words_of

PROGRAM_WORDS = 2048
"""What one program sums: eight loads of 16 bytes a thread."""

WARPS = 4


@triton.jit
def mix(b_word, first: tl.constexpr, second: tl.constexpr):
    """The finaliser of SplitMix64."""
    b_word = (b_word ^ (b_word >> 30)) * first
    b_word = (b_word ^ (b_word >> 27)) * second
    return b_word ^ (b_word >> 31)


@triton.jit(do_not_specialize=["nbytes"])
def sum_words(
    p_words,
    p_sums,
    stride,
    words,
    nbytes,
    golden: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    block: tl.constexpr,
):
    """Add one part of one block to the block's sum; the first part adds the length too."""
    i_program = tl.program_id(0)
    parts = tl.cdiv(words, block)
    i_block = (i_program // parts).to(tl.int64)
    i_part = i_program % parts
    o_word = i_part.to(tl.int64) * block + tl.arange(0, block)
    m_word = o_word < words
    b_word = tl.load(p_words + i_block * stride + o_word, mask=m_word, other=0)
    b_word = b_word.to(tl.uint64, bitcast=True) + (o_word + 1).to(tl.uint64) * golden
    b_sum = tl.sum(tl.where(m_word, mix(b_word, first, second), 0))
    b_length = mix(nbytes.to(tl.uint64), first, second)
    b_sum += tl.where(i_part == 0, b_length, 0)
    tl.atomic_add(p_sums + i_block, b_sum.to(tl.int64, bitcast=True), sem="relaxed")


def checksum(blocks: Tensor) -> Tensor:
    """`tiercache_kernels.checksum`; blocks that are no whole, aligned words are copied first."""
    words, nbytes = words_of(blocks)
    sums = torch.zeros(len(blocks), dtype=torch.int64, device=blocks.device)
    block = min(PROGRAM_WORDS, triton.next_power_of_2(words.shape[1]))
    grid = (len(blocks) * triton.cdiv(words.shape[1], block),)
    if not grid[0]:
        return sums
    with torch.cuda.device_of(blocks):
        sum_words[grid](
            words,
            sums,
            words.stride(0),
            words.shape[1],
            nbytes,
            golden=GOLDEN,
            first=FIRST_FACTOR,
            second=SECOND_FACTOR,
            block=block,
            num_warps=WARPS,
        )
    return sums
