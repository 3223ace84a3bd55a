"""Triton kernels: one module per op, with its jit kernels and the launcher that takes the op's arguments.

The solver steps share ``common`` and ``window``. ``config`` has the launch configurations of all kernels.
"""
