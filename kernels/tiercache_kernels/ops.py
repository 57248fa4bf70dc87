"""The public ops: arguments are checked, then the fastest of the three forms is called.

CUDA tensors go to the Triton kernels, on the current stream. CPU tensors go to the loops that numba
compiles, where it is installed and the dtype is one of theirs. All else is the reference's.
"""

import torch
from torch import Tensor

from tiercache_kernels import checks, reference
from tiercache_kernels.on_cpu import ops as on_cpu
from tiercache_kernels.segments import Segments


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether the Triton kernels do this; else the CPU does, or the reference."""
    return tensor.device.type == "cuda"


def quantise(
    source: Tensor, source_slots: Tensor, qdata: Tensor, scale: Tensor, target_slots: Tensor
) -> None:
    """Write slots of recurrent state as INT8 with a scale per (layer, slot, head, d_k), found along d_v.

    `source` is `[layers, slots, heads, d_v, d_k]`, float32, bfloat16 or float16; `qdata` int8 of that shape
    with a number of slots of its own; `scale` `[layers, slots, heads, 1, d_k]`, float32 or bfloat16, and
    never float16. Slot i of `source_slots` goes to slot i of `target_slots`; other slots are not touched.
    The arithmetic, and what becomes of zeros, infinities and NaN, is that of `reference.quantise`: the same
    bits on every device.
    """
    checks.quantised(source, qdata, scale)
    checks.written(qdata, scale, leading=checks.LEADING_AXES)
    checks.slots(source, source_slots, qdata, target_slots)
    if runs_kernels(source):
        from tiercache_kernels.on_gpu.quantise import quantise as launch

        launch(source, source_slots, qdata, scale, target_slots)
    elif on_cpu.takes(source):
        on_cpu.quantise(source, source_slots, qdata, scale, target_slots)
    else:
        reference.quantise(source, source_slots, qdata, scale, target_slots)


def dequantise(
    qdata: Tensor, scale: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor
) -> None:
    """Write INT8 slots into slots of `target`: value times scale, rounded once to the target's dtype.

    Shapes and dtypes as for `quantise`. The target slots are the caller's own, taken for this: a
    checkpoint is restored once and then lives on at the target's precision. A magnitude that is within a
    hundredth of the dtype's largest may come back as infinity; a NaN scale makes its channel NaN.
    """
    checks.quantised(target, qdata, scale)
    checks.written(target, leading=checks.LEADING_AXES)
    checks.slots(qdata, source_slots, target, target_slots)
    if runs_kernels(target):
        from tiercache_kernels.on_gpu.dequantise import dequantise as launch

        launch(qdata, scale, source_slots, target, target_slots)
    elif on_cpu.takes(target):
        on_cpu.dequantise(qdata, scale, source_slots, target, target_slots)
    else:
        reference.dequantise(qdata, scale, source_slots, target, target_slots)


def copy_slots(source: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor) -> None:
    """Copy slots of any per-slot state, `[layers, slots, ...]`, between pools or within one.

    The dtypes are equal, or both floating point and then cast. No byte may be both read and written:
    within one pool, or in two views of one buffer.
    """
    checks.copied(source, target, leading=2)
    checks.written(target, leading=2)
    checks.slots(source, source_slots, target, target_slots)
    checks.apart((source, source_slots), (target, target_slots), leading=2)
    if runs_kernels(source):
        from tiercache_kernels.on_gpu import rows

        rows.copy_slots(source, source_slots, target, target_slots)
    else:
        reference.copy_slots(source, source_slots, target, target_slots)


def gather_pages(paged: Tensor, pages: Tensor, staging: Tensor) -> None:
    """Copy the listed pages, in that order, to the start of a contiguous buffer.

    `paged` is `[pages, ...]`, `staging` `[n, ...]` with n at least the length of the list. A page may be
    listed more than once. The dtypes are equal, or both floating point and then cast. What is written may
    not be among what is read.
    """
    checks.copied(paged, staging, leading=1)
    checks.written(staging, leading=1)
    checks.numbers(pages, paged, 0, "pages")
    checks.room(staging, pages)
    checks.apart((paged, pages), (staging, _first(pages)), leading=1)
    if runs_kernels(paged):
        from tiercache_kernels.on_gpu import rows

        rows.gather_pages(paged, pages, staging)
    else:
        reference.gather_pages(paged, pages, staging)


def scatter_pages(staging: Tensor, paged: Tensor, pages: Tensor) -> None:
    """Copy the start of `staging`, in order, to the listed pages: `gather_pages` undone."""
    checks.copied(paged, staging, leading=1)
    checks.written(paged, leading=1)
    checks.numbers(pages, paged, 0, "pages")
    checks.no_twice(pages, "pages")
    checks.room(staging, pages)
    checks.apart((staging, _first(pages)), (paged, pages), leading=1)
    if runs_kernels(paged):
        from tiercache_kernels.on_gpu import rows

        rows.scatter_pages(staging, paged, pages)
    else:
        reference.scatter_pages(staging, paged, pages)


def slice_heads(source: Tensor, start: int, stop: int, out: Tensor, axis: int = -3) -> None:
    """Copy heads `[start, stop)` to `out`, which has just those: what a rank of another TP size holds.

    `axis` counts from the end: -3 is `[..., heads, d_v, d_k]` and its scales, -2 `[..., tokens, heads, d]`.
    """
    checks.cut(source, start, stop, out, axis)
    _copy_range(source.narrow(axis, start, stop - start), out, axis)


def join_heads(piece: Tensor, start: int, stop: int, whole: Tensor, axis: int = -3) -> None:
    """Copy a piece to heads `[start, stop)` of `whole`: `slice_heads` undone."""
    checks.cut(whole, start, stop, piece, axis)
    _copy_range(piece, whole.narrow(axis, start, stop - start), axis)


def slice_conv(
    source: Tensor, segments: Segments, start_unit: int, stop_unit: int, units: int, out: Tensor
) -> None:
    """Copy the channels of units `[start_unit, stop_unit)` of `units`: each segment cut by itself.

    `out` has `segments.width(start_unit, stop_unit, units)` channels on the same axis. The groups of a
    segment that has fewer of them than there are units go to every unit that needs them.
    """
    checks.cut_conv(source, segments, segments.width(start_unit, stop_unit, units), out)
    for taken, place in reference.shares(source, segments, start_unit, stop_unit, units, out):
        _copy_range(taken, place, segments.axis)


def join_conv(
    piece: Tensor, segments: Segments, start_unit: int, stop_unit: int, units: int, whole: Tensor
) -> None:
    """Copy a rank's channels back into `whole`: `slice_conv` undone.

    A group that several ranks hold is written by each of them, with the same bytes.
    """
    checks.cut_conv(whole, segments, segments.width(start_unit, stop_unit, units), piece)
    for place, taken in reference.shares(whole, segments, start_unit, stop_unit, units, piece):
        _copy_range(taken, place, segments.axis)


def checksum(blocks: Tensor) -> Tensor:
    """Return a 64-bit sum of each block's bytes, int64 `[n]` for blocks `[n, ...]` of any dtype.

    `reference.checksum` defines it. The result is on the device of the blocks, and the same on each.
    """
    checks.blocks(blocks)
    if runs_kernels(blocks):
        from tiercache_kernels.on_gpu.checksum import checksum as launch

        return launch(blocks)
    if on_cpu.available() and blocks.device.type == "cpu":
        return on_cpu.checksum(blocks)
    return reference.checksum(blocks)


def _first(pages: Tensor) -> Tensor:
    """Return the numbers of the staging rows that belong to a list of pages."""
    return torch.arange(len(pages))


def _copy_range(source: Tensor, target: Tensor, axis: int) -> None:
    if runs_kernels(source):
        from tiercache_kernels.on_gpu import rows

        rows.copy_range(source, target, axis)
    else:
        target.copy_(source)
