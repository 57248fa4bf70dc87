"""Ops compiled for the CPU by numba: one thread a call, the interpreter released while it works.

For float32 and bfloat16 state, and checksums of anything. What moves bytes only is left to PyTorch, which
does that at memory speed. numba is loaded by the first call.
"""
