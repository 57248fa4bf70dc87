"""Recurrent states in fewer bytes, with the numerics of SGLang's own INT8 checkpoints.

SGLang's `Int8CheckpointStore` quantises `[head, value, key]` symmetrically per (head, key) with the largest
absolute value over `value`, computes in float32 and keeps the scale in the state's own dtype. The same is
done here, so that quality is that of `--enable-int8-mamba-checkpoint`, which SGLang refuses together with
HiCache. The bytes are the codes of all layers, then the scales of all layers.
"""

from typing import Final

import torch

from tiercache.errors import LayoutError

CODEC: Final = "sglang_int8"
QMAX: Final = 127.0
SMALLEST: Final = 1e-8


class Int8States:
    """Encodes states of one shape `[layer, head, value, key]` and dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if len(shape) != 4 or dtype not in {torch.float32, torch.bfloat16, torch.float16}:
            raise LayoutError(f"states {shape} of {dtype} cannot be kept as INT8")
        self._shape = shape
        self._dtype = dtype
        layers, heads, value, key = shape
        self._codes = layers * heads * value * key
        self.nbytes = self._codes + layers * heads * key * dtype.itemsize

    def encode(self, state: memoryview) -> memoryview:
        """Return the bytes that stand for a state's; they are new."""
        exact = torch.frombuffer(state, dtype=self._dtype).view(self._shape)
        wide = exact.to(torch.float32)
        largest = wide.abs().amax(dim=2, keepdim=True).clamp_(min=SMALLEST)
        scales = (largest / QMAX).to(self._dtype)
        codes = (wide / scales.to(torch.float32)).round_().clamp_(-QMAX, QMAX).to(torch.int8)
        encoded = torch.empty(self.nbytes, dtype=torch.uint8)
        encoded[: self._codes] = codes.view(torch.uint8).flatten()
        encoded[self._codes :] = scales.contiguous().view(torch.uint8).flatten()
        return encoded.numpy().data

    def decode(self, encoded: memoryview, state: memoryview) -> None:
        """Write the state that `encoded` stands for. LayoutError when it has another size."""
        target = torch.frombuffer(state, dtype=self._dtype).view(self._shape)
        if encoded.nbytes != self.nbytes:
            raise LayoutError(f"an INT8 state has {self.nbytes} bytes, not {encoded.nbytes}")
        # A copy: the scales may begin at an odd address, and the arena is read-only.
        own = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        layers, heads, _, key = self._shape
        codes = own[: self._codes].view(torch.int8).view(self._shape)
        scales = own[self._codes :].clone().view(self._dtype).view(layers, heads, 1, key)
        target.copy_((codes.to(torch.float32) * scales.to(torch.float32)).to(self._dtype))
