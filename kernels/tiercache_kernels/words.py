"""Blocks of bytes as 64-bit words, for the checksums."""

import torch
from torch import Tensor

from tiercache_kernels.reference import WORD_BYTES


def words_of(blocks: Tensor) -> tuple[Tensor, int]:
    """Return the blocks as int64 `[n, words]`, and the bytes of one block.

    A view where each block is whole words at an aligned place; else a copy, padded with zeros.
    """
    data = blocks.flatten(1).view(torch.uint8)
    nbytes = data.shape[1]
    whole = nbytes % WORD_BYTES == 0 and data.data_ptr() % WORD_BYTES == 0
    if not whole or data.stride(0) % WORD_BYTES:
        data = torch.nn.functional.pad(data, (0, -nbytes % WORD_BYTES)).contiguous()
    return data.view(torch.int64), nbytes
