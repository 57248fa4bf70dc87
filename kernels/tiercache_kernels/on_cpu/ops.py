"""From tensors to flat arrays and offsets, and to the loops."""

from functools import cache
from importlib.util import find_spec
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiercache_kernels import reference
from tiercache_kernels.words import words_of

Scalar = TypeVar("Scalar", bound=np.generic)

COMPILED = (torch.float32, torch.bfloat16)
"""float16 state is left to the reference: no engine keeps its recurrent state so."""


@cache
def available() -> bool:
    """Return whether numba is installed."""
    return find_spec("numba") is not None


def prepare() -> None:
    """Compile all loops now, or load what an earlier process compiled; nothing without numba."""
    if not available():
        return
    first = torch.zeros(1, dtype=torch.int64)
    qdata, scale = torch.zeros(1, 1, 1, 1, 1, dtype=torch.int8), torch.zeros(1, 1, 1, 1, 1)
    for dtype in COMPILED:
        state = torch.zeros(1, 1, 1, 1, 1, dtype=dtype)
        quantise(state, first, qdata, scale, first)
        dequantise(qdata, scale, first, state, first)
    checksum(first[None])


def takes(tensor: Tensor) -> bool:
    """Return whether the loops take a tensor of this dtype, on this device."""
    return tensor.device.type == "cpu" and tensor.dtype in COMPILED and available()


def quantise(
    source: Tensor, source_slots: Tensor, qdata: Tensor, scale: Tensor, target_slots: Tensor
) -> None:
    """`tiercache_kernels.quantise`, for the dtypes in COMPILED."""
    from tiercache_kernels.on_cpu import loops

    offsets = np.stack((tiles(source, source_slots), tiles(qdata, target_slots)), axis=-1)
    layers, _, heads, d_v, d_k = source.shape
    scales = torch.empty(layers, len(source_slots), heads, 1, d_k)
    rows = array(scales.view(-1, d_k), np.float32)
    steps = flat(qdata, np.int8)
    bits = scale.element_size() * 8
    if source.dtype == torch.bfloat16:
        loops.quantise_bfloats(flat(source, np.uint16), steps, offsets, rows, d_v, bits)
    else:
        loops.quantise_floats(flat(source, np.float32), steps, offsets, rows, d_v, bits)
    scale[:, target_slots] = scales.to(scale.dtype)


def dequantise(
    qdata: Tensor, scale: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor
) -> None:
    """`tiercache_kernels.dequantise`, for the dtypes in COMPILED."""
    from tiercache_kernels.on_cpu import loops

    offsets = np.stack((tiles(qdata, source_slots), tiles(target, target_slots)), axis=-1)
    d_v, d_k = target.shape[3:]
    rows = array(scale[:, source_slots].float().view(-1, d_k), np.float32)
    steps = flat(qdata, np.int8)
    if target.dtype == torch.bfloat16:
        loops.dequantise_bfloats(steps, rows, flat(target, np.uint16), offsets, d_v)
    else:
        loops.dequantise_floats(steps, rows, flat(target, np.float32), offsets, d_v)


def checksum(blocks: Tensor) -> Tensor:
    """`tiercache_kernels.checksum`."""
    from tiercache_kernels.on_cpu import loops

    words, nbytes = words_of(blocks)
    sums = reference.mix(torch.full((len(blocks),), nbytes, dtype=torch.int64))
    offsets = np.arange(len(words), dtype=np.int64) * words.stride(0)
    loops.sum_words(flat(words, np.uint64), offsets, words.shape[1], array(sums, np.uint64))
    return sums


def tiles(pool: Tensor, slots: Tensor) -> NDArray[np.int64]:
    """Return where the tile of each (layer, slot, head) begins, in elements from the pool's start."""
    layers = torch.arange(pool.shape[0]) * pool.stride(0)
    heads = torch.arange(pool.shape[2]) * pool.shape[3] * pool.shape[4]
    starts = layers[:, None, None] + (slots * pool.stride(1))[:, None] + heads
    return array(starts.flatten(), np.int64)


def flat(tensor: Tensor, of: type[Scalar]) -> NDArray[Scalar]:
    """Return all that a tensor spans as an array of one axis, gaps included, elements taken for `of`."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in spans) if tensor.numel() else 0
    return array(tensor.as_strided((length,), (1,)), of)


def array(tensor: Tensor, of: type[Scalar]) -> NDArray[Scalar]:
    """Return a tensor as an array over the same memory, elements taken for `of` of the same size."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    found: NDArray[Scalar] = tensor.detach().numpy().view(of)
    return found
