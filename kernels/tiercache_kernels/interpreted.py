"""A pytest plugin: the Triton kernels run on CPU tensors, under Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest -p tiercache_kernels.interpreted tests/unit/test_kernels_*.py

The interpreter of Triton 3.7.1 differs from a device in three places, mended here: it truncates to bfloat16
where a device rounds to nearest even (and mistakes subnormals); it rounds twice in a fused multiply-add;
and a sum that is no number has other bits.
"""

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton import knobs
from triton.runtime import interpreter

from tiercache_kernels import ops

Array = NDArray[np.generic]
DEVICE_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_convert_float = interpreter._convert_float


def convert(values: Array, old: object, new: object, rounding: object) -> Array:
    """Convert between float32 and bfloat16 as a device does; other conversions stay as they were."""
    if {old, new} != {tl.float32, tl.bfloat16}:
        return np.asarray(_convert_float(values, old, new, rounding))
    if new == tl.bfloat16:
        found = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).bfloat16()
        return np.asarray(found.view(torch.uint16).numpy())
    bits = torch.from_numpy(np.ascontiguousarray(values).view(np.uint16)).view(torch.bfloat16)
    return np.asarray(bits.float().numpy().view(np.uint32))


def fused(
    self: interpreter.InterpreterBuilder,
    x: interpreter.TensorHandle,
    y: interpreter.TensorHandle,
    z: interpreter.TensorHandle,
) -> interpreter.TensorHandle:
    """Multiply and add in extended precision, where the product of two float32 is exact."""
    exact = x.data.astype(np.longdouble) * y.data.astype(np.longdouble) + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def added(
    self: interpreter.InterpreterBuilder, x: interpreter.TensorHandle, y: interpreter.TensorHandle
) -> interpreter.TensorHandle:
    """Add; where the sum of two float32 is NaN, it is the one NaN that a device makes."""
    total = self.binary_op(x, y, np.add)
    if total.dtype.scalar == tl.float32:
        total.data = np.where(np.isnan(total.data), DEVICE_NAN, total.data)
    return total


if not knobs.runtime.interpret:
    raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
np.seterr(all="ignore")  # A device does not warn.
interpreter._convert_float = convert
interpreter.InterpreterBuilder.create_fma = fused
interpreter.InterpreterBuilder.create_fadd = added
ops.runs_kernels = lambda tensor: True
