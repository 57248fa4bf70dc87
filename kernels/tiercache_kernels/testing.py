"""What a test of these ops needs: poisoned outputs, pools with gaps, and what counts as the same."""

import torch
from torch import Tensor

POISON_BYTE = 0x7F
"""In every byte: a large number of any integer type, NaN in bfloat16, 3e38 in float32."""

GAP = 16
"""Elements between two slots of a spaced pool; its layers lie further apart."""


def poisoned(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return a dense tensor of NaN, or of 0x7f in every byte where there is no NaN."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if dtype.is_floating_point:
        return tensor.fill_(torch.nan)
    tensor.view(torch.uint8).fill_(POISON_BYTE)
    return tensor


def spaced(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return a poisoned pool `[layers, slots, ...]` that is a view with gaps: slots first, then layers."""
    layers, slots, *rest = shape
    size = torch.Size(rest).numel() + GAP
    buffer = poisoned(slots * layers * size + GAP, dtype=dtype, device=device)
    inner = torch.empty(rest).stride()
    return buffer.as_strided(shape, (size, layers * size, *inner), GAP)


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors hold the same bits, but that any NaN is as good as any other."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.is_floating_point:
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
        both = left.isnan() & right.isnan()
        return bool(
            (both | (left.contiguous().view(words) == right.contiguous().view(words))).all()
        )
    return torch.equal(left, right)
