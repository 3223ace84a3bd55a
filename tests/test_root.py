"""deqfast.root: roots of g with gradients, whichever sign serves."""

from __future__ import annotations

import pytest
import torch

import deqfast
from deqfast.testing import GRADIENT, assert_close

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
    plain = deqfast.Picard(rtol=0, atol=1e-8, max_iter=200, relaxation=0.05)
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


@pytest.mark.parametrize(
    ("options", "said"),
    [({"sign": 2}, "sign must be 1, -1 or None, got 2"), ({"compile": True}, "root takes no 'compile'")],
)
def test_bad_arguments(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        deqfast.root(cubic, torch.zeros(1, 1), torch.ones(1, 1), **options)


@pytest.mark.parametrize("sign", [None, 1])
def test_a_value_of_another_shape_is_refused(sign):
    """A sum with z would broadcast it."""
    with pytest.raises(ValueError, match=r"f must return the shape of its argument, \(2, 3\), got \(2, 1\)"):
        deqfast.root(lambda z: z[:, :1], torch.ones(2, 3), sign=sign)
