"""The ops as Triton kernels, for CUDA tensors; on CPU tensors under Triton's interpreter, for tests.

One kernel a file, with what launches it. Names inside a kernel: `b_` a block of values, `p_` pointers, `o_`
offsets, `m_` a mask, `i_` an index. Offsets that a slot or a page goes into are 64-bit: a pool has more
than 2**31 elements. Launches go to the current stream and wait for nothing.
"""
