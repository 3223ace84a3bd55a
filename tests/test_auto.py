"""Auto: its first stage is Broyden, later stages solve the rest, and no sample depends on the others."""

from __future__ import annotations

import pytest
import torch
from correctness import GRADIENT, assert_close
from solutions import assert_same_solution

import deqfast
from deqfast import Auto, Broyden, DEQBlock, Implicit, Status

FIELDS = ("value", "status", "iterations", "residual_rel", "residual_abs")


def cubic(z, rows=None):
    """A map with one fixed point, which is not finite far from it: Broyden's method leaves many starts unsolved."""
    return torch.where(z.abs() > 3, torch.nan, -2 * z**3 + z - 1)


def starts(samples=9):
    return torch.linspace(-2.5, 2.5, samples, dtype=torch.float64)[:, None].repeat(1, 3)


@pytest.mark.parametrize("wave", [torch.tanh, torch.sin, torch.cos])
def test_what_broyden_solves_is_the_same(wave):
    slopes = torch.linspace(-2.0, 0.9, 9)

    def f(z):
        return slopes * wave(z) + 1

    expected = deqfast.solve(f, torch.zeros(7, 9), Broyden(rtol=1e-5, max_iter=60))
    assert bool(expected.converged.all())
    assert_same_solution(deqfast.solve(f, torch.zeros(7, 9), Auto(rtol=1e-5, max_iter=60)), expected)


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "torch"),
        ({}, "cpp"),
        ({"drop_converged": True}, "cpp"),
        ({"trace": True}, "cpp"),
    ],
    indirect=["kernel"],
    ids=str,
)
def test_what_broyden_leaves_is_solved_sample_by_sample(options, kernel):
    z0, solver = starts(), Auto(rtol=1e-8, max_iter=400)
    left = ~deqfast.solve(cubic, z0, Broyden(rtol=1e-8, max_iter=400), kernel).converged
    found = deqfast.solve(cubic, z0, solver, kernel, **options)
    assert left.sum() > 3 and bool(found.converged.all())
    assert_close(cubic(found.value), found.value, 2e-8)
    assert (found.iterations <= found.evaluations).all() and found.evaluations <= 400
    for i in range(0, len(z0), 4):
        single = deqfast.solve(cubic, z0[i : i + 1], solver, kernel, **options)
        assert all(torch.equal(getattr(single, name)[0], getattr(found, name)[i]) for name in FIELDS)
        assert single.iterations <= single.evaluations
    if found.trace is not None:
        assert found.trace.shape == (found.evaluations, len(z0)) and torch.equal(found.trace[-1], found.residual)


def test_a_sample_whose_start_is_broken_is_not_tried_again():
    z0 = torch.tensor([[5.0], [0.5]], dtype=torch.float64)
    found = deqfast.solve(cubic, z0, Auto(rtol=1e-8, max_iter=400))
    assert found.status.tolist() == [Status.NONFINITE, Status.CONVERGED] and found.evaluations < 60


@pytest.mark.parametrize("kernel", ["cpp", "torch"], indirect=True)
def test_a_stage_does_not_take_its_own_start_for_that_of_the_solve(kernel):
    """Far away, where no iterate gains any more, residuals are small only compared with |z|."""
    solution = deqfast.solve(lambda z: z + 1 + 1e-3 * z.abs(), torch.zeros(1, 2), Auto(max_iter=80, rtol=2e-3), kernel)
    assert not bool(solution.converged.any())


def test_a_rule_of_the_callers_ends_samples_in_any_stage():
    found = deqfast.solve(cubic, starts(), Auto(rtol=1e-8, max_iter=400), stop_fn=lambda z, fz, k: z[:, 0] * 0 + k > 34)
    late = found.status == Status.STOPPED
    assert late.any() and (late | found.converged).all()
    unended = deqfast.solve(cubic, starts(), Auto(rtol=1e-8, max_iter=35))
    assert torch.equal(found.iterations[late], unended.iterations[late])


def test_a_block_with_groups_and_gradients():
    a = torch.tensor([[0.6], [0.9], [1.1]], dtype=torch.float64, requires_grad=True)
    adjoint = Implicit(Broyden(rtol=1e-12, max_iter=50))
    block = DEQBlock(lambda z, a: cubic(z) + a, Auto(rtol=1e-12, max_iter=600), adjoint)
    z, solution = block(a, starts(3)[:, :1].contiguous(), return_solution=True, groups="batch")
    assert solution.converged.all()
    (slope,) = torch.autograd.grad(z.sum(), a)
    assert_close(slope, 1 / (6 * z.detach() ** 2), GRADIENT)
