"""Every op in plain PyTorch: the specification of the kernels, on any device.

Written to be read, not to be fast. A kernel is right when it leaves the same bits in its outputs as the
function of the same name here, whatever was in them before. The arguments are checked by the public
ops; nothing is checked here.

Slots are numbers in int64 tensors of one axis; entry i of the one list belongs to entry i of the other.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tiercache_kernels.segments import Segments

STEPS = 127
"""The largest quantised value. -128 is never written, so the range is symmetric."""

SCALE_MIN = 2.0**-100
"""Scales below are zero: their channels hold nothing above 1e-28, and exact division ends near there."""


def quantise(
    source: Tensor, source_slots: Tensor, qdata: Tensor, scale: Tensor, target_slots: Tensor
) -> None:
    """Write slots of recurrent state as INT8, one scale per (layer, head, d_k), found along d_v.

    A scale is the largest magnitude over 127, rounded to its storage dtype before anything is divided by
    it; one under SCALE_MIN becomes zero. A value is x / scale, correctly rounded, then rounded half to
    even: always in [-127, 127]. Where the scale is zero so are the values. A channel with an infinity or a
    NaN gets a NaN scale and zeros: it comes back as NaN, never as a plausible number.
    """
    for old, new in pairs(source_slots, target_slots):
        values = source[:, old].float()
        largest = values.abs().amax(dim=-2, keepdim=True)
        # By a tensor: CUDA divides by a Python number through its reciprocal, which rounds differently.
        rounded = (largest / torch.full_like(largest, STEPS)).to(scale.dtype)
        rounded = rounded.masked_fill(rounded < SCALE_MIN, 0.0)
        broken = ~largest.isfinite()
        scale[:, new] = rounded.masked_fill(broken, torch.nan)
        divisor = rounded.float()
        steps = (values / divisor).masked_fill(broken | (divisor == 0), 0.0)
        qdata[:, new] = steps.round().to(torch.int8)


def dequantise(
    qdata: Tensor, scale: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor
) -> None:
    """Write INT8 slots as floating point: value times scale in float32, rounded to the target's dtype."""
    for old, new in pairs(source_slots, target_slots):
        target[:, new] = (qdata[:, old].float() * scale[:, old].float()).to(target.dtype)


def copy_slots(source: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor) -> None:
    """Copy slots of any state; between floating dtypes values are rounded to nearest, ties to even."""
    for old, new in pairs(source_slots, target_slots):
        target[:, new] = source[:, old]


def gather_pages(paged: Tensor, pages: Tensor, staging: Tensor) -> None:
    """Copy the listed pages, in that order, to the start of `staging`."""
    for place, page in enumerate(pages.tolist()):
        staging[place] = paged[page]


def scatter_pages(staging: Tensor, paged: Tensor, pages: Tensor) -> None:
    """Copy the start of `staging`, in order, to the listed pages."""
    for place, page in enumerate(pages.tolist()):
        paged[page] = staging[place]


def slice_heads(source: Tensor, start: int, stop: int, out: Tensor, axis: int = -3) -> None:
    """Copy heads `[start, stop)` of an axis."""
    out.copy_(source.narrow(axis, start, stop - start))


def join_heads(piece: Tensor, start: int, stop: int, whole: Tensor, axis: int = -3) -> None:
    """Copy a piece to heads `[start, stop)` of an axis."""
    whole.narrow(axis, start, stop - start).copy_(piece)


def slice_conv(
    source: Tensor, segments: Segments, start_unit: int, stop_unit: int, units: int, out: Tensor
) -> None:
    """Copy a rank's channels of a convolution state, each segment cut by itself."""
    for taken, place in shares(source, segments, start_unit, stop_unit, units, out):
        place.copy_(taken)


def join_conv(
    piece: Tensor, segments: Segments, start_unit: int, stop_unit: int, units: int, whole: Tensor
) -> None:
    """Copy a rank's channels back into the whole."""
    for place, taken in shares(whole, segments, start_unit, stop_unit, units, piece):
        place.copy_(taken)


def shares(
    whole: Tensor, segments: Segments, start_unit: int, stop_unit: int, units: int, piece: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each segment, a rank's channels where they lie in the whole and in the rank's piece."""
    at = 0
    for first, count in segments.ranges(start_unit, stop_unit, units):
        yield whole.narrow(segments.axis, first, count), piece.narrow(segments.axis, at, count)
        at += count


GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
WORD_BYTES = 8


def checksum(blocks: Tensor) -> Tensor:
    """Return a 64-bit sum of each block's bytes, as int64: `[n]` for blocks `[n, ...]`.

    A block is cut into little-endian 64-bit words, w[0] first, the last one padded with zero bytes. All
    arithmetic is modulo 2**64. With mix(x) the finaliser of SplitMix64,

        sum = mix(bytes) + mix(w[0] + 1 * GOLDEN) + mix(w[1] + 2 * GOLDEN) + ...

    mix is a bijection, so a change within one word is always seen; words that swap places, zeroed
    ranges and other lengths are seen but for one chance in 2**64. The order of the sum does not matter,
    so every device gets the same number. It is no defence against forgery.
    """
    count = len(blocks)
    data = blocks.flatten(1).contiguous().view(torch.uint8)
    nbytes = data.shape[1]
    data = torch.nn.functional.pad(data, (0, -nbytes % WORD_BYTES))
    words = data.view(torch.int64)
    places = torch.arange(1, words.shape[1] + 1, dtype=torch.int64, device=blocks.device)
    length = torch.full((count,), nbytes, dtype=torch.int64, device=blocks.device)
    return mix(length) + mix(words + places * signed(GOLDEN)).sum(dim=1)


def mix(words: Tensor) -> Tensor:
    """Return the finaliser of SplitMix64 of each int64 word."""
    words = (words ^ shifted(words, 30)) * signed(FIRST_FACTOR)
    words = (words ^ shifted(words, 27)) * signed(SECOND_FACTOR)
    return words ^ shifted(words, 31)


def shifted(words: Tensor, bits: int) -> Tensor:
    """Return int64 words shifted right, zeros coming in; `>>` would repeat the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def signed(word: int) -> int:
    """Return an unsigned 64-bit number as the int64 of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def pairs(source_slots: Tensor, target_slots: Tensor) -> Iterator[tuple[int, int]]:
    """Yield each source slot with the target slot it belongs to."""
    yield from zip(source_slots.tolist(), target_slots.tolist(), strict=True)
