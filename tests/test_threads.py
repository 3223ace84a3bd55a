"""The CPU kernels of the solvers give the same bits however threads share the samples."""

from __future__ import annotations

import functools

import pytest
import torch

import deqfast

pytestmark = pytest.mark.skipif(not deqfast.backends()["cpp"], reason="the CPU kernels were not built")

RULE = {"rtol": 1e-4, "max_iter": 12}
SOLVERS = {
    "picard": deqfast.Picard(**RULE),
    "damped picard": deqfast.Picard(relaxation=0.7, **RULE),
    "anderson II": deqfast.Anderson(**RULE),
    "anderson I, bf16 history": deqfast.Anderson(kind="I", history_dtype=torch.bfloat16, **RULE),
    "broyden, steps only": deqfast.Broyden(**RULE),
    "broyden, pairs": deqfast.Broyden(history_size=4, **RULE),
    "bad broyden": deqfast.Broyden(kind="bad", **RULE),
}
# Long enough (csrc/cpu/grain.h) that threads share even a single sample; not whole vectors.
SIZE = 33 * 4096 + 777
every_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


@functools.cache
def samples():
    """Slope, shift and start of six samples, in float64."""
    generator = torch.Generator().manual_seed(3)
    slope, shift, start = (torch.randn(6, SIZE, generator=generator, dtype=torch.float64) for _ in range(3))
    slope[2], shift[2], start[2] = 0.0, 1.0, 1.0
    return slope, shift, start


def solve(solver, rows, dtype):
    """Solve for the samples `rows`: 1 becomes NaN at the fourth call, 2 converges at once, the others do not."""
    slope, shift, start = (tensor[rows].to(dtype) for tensor in samples())
    calls = 0

    def f(z):
        nonlocal calls
        calls += 1
        value = torch.tanh(0.9 * slope * z) + shift
        value[[row == 1 and calls == 4 for row in rows], -1] = torch.nan
        return value

    return deqfast.solve(f, start, solver=solver, kernel="cpp")


def same(a, b, row_a, row_b):
    names = ("value", "status", "iterations", "residual_rel", "residual_abs")
    return all(torch.equal(getattr(a, name)[row_a], getattr(b, name)[row_b]) for name in names)


@every_dtype
@every_solver
def test_neither_the_threads_nor_the_other_samples_change_the_bits(solver, dtype, set_threads):
    if dtype == torch.float64 and getattr(solver, "history_dtype", None):
        pytest.skip("a bfloat16 history goes with a float32 state")
    alone = []
    for row in range(6):
        set_threads(1)
        alone.append(solve(solver, [row], dtype))
        if row < 3:  # one of each kind
            set_threads(2)
            assert same(solve(solver, [row], dtype), alone[row], 0, 0)
    assert [deqfast.Status(int(solution.status)).name for solution in alone[1:3]] == ["NONFINITE", "CONVERGED"]
    assert int(alone[0].iterations) > 4
    for threads in (2, 3):
        for batch in (3, 6):
            set_threads(threads)
            together = solve(solver, list(range(batch)), dtype)
            assert all(same(together, alone[row], row, 0) for row in range(batch)), (threads, batch)
