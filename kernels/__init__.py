"""Triton kernels: one module per op, each holding its jit kernels and the launcher that takes the op's arguments.

``common`` and ``window`` hold what the solver steps share, ``config`` the launch configurations of all.
"""
