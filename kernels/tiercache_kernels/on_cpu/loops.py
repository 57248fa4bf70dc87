"""The loops themselves, over flat numpy arrays. Imported by the first call: numba takes a while to load.

A tile is the `[d_v, d_k]` of one (layer, slot, head). It fits the second-level cache, and is read twice.
Where tiles begin comes as offsets into the flat arrays, `[tiles, 2]`: of source and of target. Scales come
as float32 `[tiles, d_k]`, however they are stored. bfloat16 comes as its bits in uint16: the upper half of
a float32.

numba keeps the compiled code beside this file, or in the user's cache folder where this one cannot be
written; where neither can, every process compiles again. It looks at this file alone to see whether the
code is still right, so constants of the specification are repeated here and compared by a test.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")
Floats = NDArray[np.float32]
Steps = NDArray[np.int8]
Bits = NDArray[np.uint16]
Magnitudes = NDArray[np.int32]
Offsets = NDArray[np.int64]
Words = NDArray[np.uint64]

STEPS = np.float32(127)
SCALE_MIN = np.float32(2.0**-100)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
NAN_BITS = np.uint16(0x7FC0)
ROUNDER = np.float32(1.5 * 2**23)
"""Adding it leaves a value, rounded half to even, in the low bits."""


def compiled(loop: Callable[P, R]) -> Callable[P, R]:
    """Compile at the first call. Division by zero is IEEE's; arithmetic is neither reordered nor fused."""
    try:
        return njit(cache=True, nogil=True, error_model="numpy", fastmath=False)(loop)
    except RuntimeError:  # No folder to keep the code in.
        return njit(nogil=True, error_model="numpy", fastmath=False)(loop)


@compiled
def bfloat_bits(value: np.float32) -> np.uint16:
    """Return the upper half of a number, rounded to nearest, ties to even; not for NaN."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@compiled
def find_scales(tile: Floats, largest: Magnitudes, scales: Floats, scale_bits: int) -> None:
    """Find the largest magnitude of each column, as its bits, and the scale before what is broken."""
    d_k = largest.size
    largest[:] = 0
    for row in range(tile.size // d_k):
        values = tile[row * d_k : (row + 1) * d_k]
        for k in range(d_k):
            # As integers magnitudes order like the floats, with infinity and then NaN on top.
            largest[k] = max(largest[k], np.float32(values[k]).view(np.int32) & MAGNITUDE)
    for k in range(d_k):
        scale = np.int32(largest[k]).view(np.float32) / STEPS
        if scale_bits == 16:
            scale = np.uint32(bfloat_bits(scale) << 16).view(np.float32)
        scales[k] = scale if scale >= SCALE_MIN else np.float32(0)


@compiled
def quantise_tile(tile: Floats, qdata: Steps, scales: Floats, scale_bits: int) -> None:
    """Write the tile's values and its scales, those rounded to bfloat16 when `scale_bits` is 16."""
    d_k = scales.size
    rows = tile.size // d_k
    largest = np.empty(d_k, np.int32)
    find_scales(tile, largest, scales, scale_bits)
    divisors = np.empty(d_k, np.float32)
    for k in range(d_k):
        divisors[k] = scales[k] if scales[k] > 0 else np.float32(np.inf)
    for row in range(rows):
        values = tile[row * d_k : (row + 1) * d_k]
        steps = qdata[row * d_k : (row + 1) * d_k]
        for k in range(d_k):
            steps[k] = np.int8(np.float32(values[k] / divisors[k] + ROUNDER).view(np.int32))
    for k in range(d_k):
        if largest[k] >= INFINITY:
            scales[k] = np.float32(np.nan)
            for row in range(rows):
                qdata[row * d_k + k] = 0


@compiled
def quantise_floats(
    source: Floats, qdata: Steps, offsets: Offsets, scales: Floats, d_v: int, scale_bits: int
) -> None:
    """Quantise float32 tiles."""
    size = d_v * scales.shape[1]
    for tile in range(len(offsets)):
        old, new = offsets[tile]
        quantise_tile(source[old : old + size], qdata[new : new + size], scales[tile], scale_bits)


@compiled
def quantise_bfloats(
    source: Bits, qdata: Steps, offsets: Offsets, scales: Floats, d_v: int, scale_bits: int
) -> None:
    """Quantise bfloat16 tiles, each widened first."""
    size = d_v * scales.shape[1]
    widened = np.empty(size, np.float32)
    for tile in range(len(offsets)):
        old, new = offsets[tile]
        bits = source[old : old + size]
        for at in range(size):
            widened[at] = np.uint32(bits[at] << 16).view(np.float32)
        quantise_tile(widened, qdata[new : new + size], scales[tile], scale_bits)


@compiled
def dequantise_floats(
    qdata: Steps, scales: Floats, target: Floats, offsets: Offsets, d_v: int
) -> None:
    """Restore float32 tiles."""
    d_k = scales.shape[1]
    for tile in range(len(offsets)):
        old, new = offsets[tile]
        for row in range(d_v):
            steps = qdata[old + row * d_k : old + (row + 1) * d_k]
            values = target[new + row * d_k : new + (row + 1) * d_k]
            for k in range(d_k):
                values[k] = np.float32(steps[k]) * scales[tile, k]


@compiled
def dequantise_bfloats(
    qdata: Steps, scales: Floats, target: Bits, offsets: Offsets, d_v: int
) -> None:
    """Restore bfloat16 tiles, rounded to nearest, ties to even."""
    d_k = scales.shape[1]
    for tile in range(len(offsets)):
        old, new = offsets[tile]
        for row in range(d_v):
            steps = qdata[old + row * d_k : old + (row + 1) * d_k]
            values = target[new + row * d_k : new + (row + 1) * d_k]
            for k in range(d_k):
                value = np.float32(steps[k]) * scales[tile, k]
                values[k] = NAN_BITS if np.isnan(value) else bfloat_bits(value)


@compiled
def sum_words(words: Words, offsets: Offsets, count: int, sums: Words) -> None:
    """Add the mixed words of blocks of `count` words to `sums`, a block beginning at each offset."""
    for block in range(offsets.size):
        first = offsets[block]
        place = GOLDEN
        total = sums[block]
        for at in range(count):
            word = words[first + at] + place
            place += GOLDEN
            word = (word ^ (word >> np.uint64(30))) * FIRST_FACTOR
            word = (word ^ (word >> np.uint64(27))) * SECOND_FACTOR
            total += word ^ (word >> np.uint64(31))
        sums[block] = total
