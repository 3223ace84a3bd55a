"""deqfast.root: roots of g with gradients, whichever sign serves."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from correctness import GRADIENT, assert_close

import deqfast

EXACT = deqfast.Implicit(deqfast.Broyden(rtol=1e-12, max_iter=50))  # the default solves to 1e-6


def cubic(z, a):
    return z**3 + z - a


def given(requires_grad=True):
    a = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64, requires_grad=requires_grad)
    return a, torch.zeros(3, 1, dtype=torch.float64)


@pytest.mark.parametrize("sign", [None, 1, -1])
@pytest.mark.parametrize("direction", [1, -1])
def test_roots_and_their_slopes(sign, direction):
    a, z0 = given()
    options = {"adjoint": EXACT, "sign": sign, "return_solution": True}
    z, solution = deqfast.root(lambda z, a: direction * cubic(z, a), z0, a, **options)
    assert solution.converged.all() and (cubic(z, a).abs() <= 1e-6).all()
    (slope,) = torch.autograd.grad(z.sum(), a)
    assert_close(slope, 1 / (3 * z.detach() ** 2 + 1), GRADIENT)


def test_the_sign_is_each_rows_own():
    a, z0 = given(requires_grad=False)
    turn = torch.tensor([[1.0], [-1.0], [1.0]], dtype=torch.float64)
    plain = deqfast.Picard(rtol=0, atol=1e-8, max_iter=200, relaxation=0.2)
    z, solution = deqfast.root(lambda z, a, turn: turn * cubic(z, a), z0, a, turn, solver=plain, return_solution=True)
    assert solution.converged.all() and (cubic(z, a).abs() <= 1e-7).all()


def test_trees_transforms_and_second_derivatives():
    x, y = deqfast.root(lambda z: (z[0] ** 2 + z[1] - 3, 2 * z[1] - z[0]), (torch.ones(2, 2), torch.ones(2, 2)))
    assert_close(x, torch.full((2, 2), 1.5), 1e-5)
    assert_close(y, torch.full((2, 2), 0.75), 1e-5)

    def find(a):
        return deqfast.root(cubic, torch.zeros(1, 1, dtype=torch.float64), a[None, None], adjoint=EXACT).sum()

    a = given(requires_grad=False)[0].flatten()
    z = torch.vmap(find)(a)
    assert_close(torch.vmap(torch.func.grad(find))(a), 1 / (3 * z**2 + 1), GRADIENT)
    b = a.clone().requires_grad_()
    (slope,) = torch.autograd.grad(
        deqfast.root(cubic, torch.zeros(3, 1, dtype=torch.float64), b[:, None], adjoint=EXACT).sum(),
        b,
        create_graph=True,
    )
    (second,) = torch.autograd.grad(slope.sum(), b)
    assert_close(second, -6 * z / (3 * z**2 + 1) ** 3, GRADIENT)


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("width", [1, 3])
def test_the_value_is_matched_by_its_keys(kind, width):
    """Also when z = g(z) has a solution that g(z) = 0 has not."""
    a = torch.full((2, 1), 1.0, dtype=torch.float64, requires_grad=True)
    z0 = {"a": torch.zeros(2, width, dtype=torch.float64), "b": torch.zeros(2, 1, dtype=torch.float64)}
    options = {"adjoint": EXACT, "return_solution": True}
    z, solution = deqfast.root(lambda z, a: kind(b=0.5 * z["b"] + a, a=0.5 * z["a"] + 3 * a), z0, a, **options)
    assert solution.converged.all() and z["b"].shape == (2, 1)
    assert_close(z["b"], torch.full((2, 1), -2.0, dtype=torch.float64), 1e-6)
    assert_close(z["a"], torch.full((2, width), -6.0, dtype=torch.float64), 1e-6)
    assert_close(torch.autograd.grad(z["b"].sum(), a)[0], torch.full_like(a, -2.0), GRADIENT)


def dominant(z, c, p):
    """Diagonally dominant, with slopes of 8 to 12, times c."""
    neighbours = torch.nn.functional.pad(z[:, 1:], (0, 1)) + torch.nn.functional.pad(z[:, :-1], (1, 0))
    return c * (10 * z - neighbours + 0.1 * z**2 - p)


@pytest.mark.parametrize("unknowns", [1000, 3000])
def test_a_factor_of_g_changes_no_evaluation(unknowns):
    p = torch.randn(1, unknowns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"return_solution": True, "kernel": "torch"}
    evaluations = []
    for c in (1e-3, 0.03, 1.0, 30.0, 1e3):
        z, solution = deqfast.root(lambda z, c=c: dominant(z, c, p), torch.zeros_like(p), **options)
        assert solution.converged.all() and dominant(z, c, p).norm() <= 1e-6
        assert_close(solution.residual_abs, dominant(z, c, p).norm(dim=1), 0.01)
        solver = deqfast.Auto(rtol=0, atol=1e-6 * c)
        z, solution = deqfast.root(lambda z, c=c: dominant(z, c, p), torch.zeros_like(p), solver=solver, **options)
        evaluations.append(solution.evaluations)
    assert max(evaluations) <= 1.25 * min(evaluations), evaluations


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_each_row_has_a_step_of_its_own_size(turn, scale):
    a, z0 = given(requires_grad=False)
    factors = torch.tensor([[1.0], [turn * scale], [1.0]], dtype=torch.float64)
    solver = deqfast.Picard(rtol=0, atol=1e-6, max_iter=200, relaxation=0.2)  # with one size for all it diverges
    z = deqfast.root(lambda z, a, b: b * cubic(z, a), z0, a, factors, solver=solver)
    assert (factors * cubic(z, a)).abs().max() <= 1e-6
