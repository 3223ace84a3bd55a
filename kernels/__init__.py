"""Triton kernels: one module per op, each holding its jit kernels and the launcher that takes the op's arguments."""
