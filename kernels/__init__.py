"""Triton kernels: one module per op, each holding its jit kernels and a raw launcher with the signature of the op."""
