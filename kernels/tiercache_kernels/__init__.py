"""Moving and compressing model state on a device: every op in plain PyTorch, in Triton, and for the CPU.

A leaf: it needs PyTorch, and Triton or numba when their forms are used, and knows nothing of the rest of
tiercache. It belongs in an engine's process or in a worker of its own, never in the node: the node loads
no PyTorch, and nothing there may keep a core busy for this long.
"""

from tiercache_kernels.on_cpu.ops import prepare as prepare_cpu
from tiercache_kernels.ops import (
    checksum,
    copy_slots,
    dequantise,
    gather_pages,
    join_conv,
    join_heads,
    quantise,
    scatter_pages,
    slice_conv,
    slice_heads,
)
from tiercache_kernels.segments import Segment, Segments

__all__ = [
    "Segment",
    "Segments",
    "checksum",
    "copy_slots",
    "dequantise",
    "gather_pages",
    "join_conv",
    "join_heads",
    "prepare_cpu",
    "quantise",
    "scatter_pages",
    "slice_conv",
    "slice_heads",
]
