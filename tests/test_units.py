"""States in other units: tensors of different size with `scale`, and complex ones, are the plain solve in disguise."""

from __future__ import annotations

import pytest
import torch
from correctness import FINITE_DIFFERENCES, GRADIENT
from own_sums import product

import deqfast
from deqfast import (
    JFB,
    SHINE,
    Anderson,
    Broyden,
    DEQBlock,
    Implicit,
    Neumann,
    Phantom,
    Picard,
    Reversible,
    Status,
    Unrolled,
    fixed_point,
)

SOLVERS = [Picard(1e-5, 60), Anderson(1e-5, 40), Broyden(1e-5, 40)]
MIX = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))[0]
LARGE = 2.0**13  # the power of two next to 1e4
SCALE = {"large": 1e4, "small": 1.0}


def plain(z, x):
    """A contraction of rows of eight numbers."""
    return torch.tanh(product(0.8 * z, MIX.T) + x)


def parted(z, x):
    """The same map of a state whose first five numbers are `LARGE` times as large."""
    value = plain(torch.cat([z["large"] / LARGE, z["small"]], dim=1), x)
    return {"large": LARGE * value[:, :5], "small": value[:, 5:]}


def start(x):
    return {"large": torch.zeros_like(x[:, :5]), "small": torch.zeros_like(x[:, 5:])}


def joined(z):
    return torch.cat([z["large"] / LARGE, z["small"]], dim=1)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize(
    "options", [{}, {"groups": "batch"}, {"stop_fn": lambda z, value, k: torch.full((4,), k >= 7)}]
)
def test_scaled_solves_are_those_of_a_state_of_one_size(solver, options):
    x = torch.randn(4, 8)
    expected = deqfast.solve(lambda z: plain(z, x), torch.zeros(4, 8), solver, **options)
    found = deqfast.solve(lambda z: parted(z, x), start(x), solver, scale=SCALE, **options)
    assert torch.equal(joined(found.value), expected.value) and torch.equal(found.status, expected.status)
    assert torch.equal(found.residual, expected.residual) and found.evaluations == expected.evaluations


ADJOINTS = [JFB(), Implicit(), Neumann(5), Phantom(4, 0.5), SHINE(), Unrolled(9), Reversible(9)]


@pytest.mark.parametrize("func", [False, True])
@pytest.mark.parametrize("adjoint", ADJOINTS, ids=lambda adjoint: type(adjoint).__name__)
def test_scaled_gradients_are_those_of_a_state_of_one_size(adjoint, func):
    if func and isinstance(adjoint, (SHINE, Neumann, Reversible)):
        return  # which have no derivative there
    x = torch.randn(4, 8, requires_grad=True)
    block = DEQBlock(plain, SOLVERS[1], adjoint, init=torch.zeros_like, warn=False)
    scaled = DEQBlock(parted, SOLVERS[1], adjoint, init=start, scale=SCALE, warn=False)
    weights = torch.randn(4, 8)

    def gradient(f):
        if func:
            return torch.func.grad(lambda x: (weights * torch.func.vmap(f)(x[:, None]).squeeze(1)).sum())(x)
        return torch.autograd.grad((weights * f(x)).sum(), x)[0]

    assert torch.equal(gradient(lambda x: joined(scaled(x))), gradient(block))
    if isinstance(adjoint, Implicit):
        found, expected = scaled.backward_solution, block.backward_solution
        assert torch.equal(found.status, expected.status) and found.evaluations == expected.evaluations


@pytest.mark.parametrize("keys", [("large", "small"), ("small", "large")])
def test_the_order_of_keys_does_not_count(keys):
    """The gradient's evaluation moves the small tensor by half of its size: that is no longer the same map."""

    def cell(z, x):
        moved = 0.5 if torch.is_grad_enabled() else 0.0
        return {"large": 0.5 * z["large"] + 5e3, "small": 0.5 * z["small"] + 0.5 + moved + 0 * x}

    block = DEQBlock(cell, scale={key: SCALE[key] for key in keys}, warn=False)
    x = torch.ones(2, 8, requires_grad=True)
    block.init = lambda x: {"large": torch.zeros(2, 8), "small": torch.zeros(2, 8)}
    assert (block(x, return_solution=True)[1].status == Status.INCONSISTENT).all()


@pytest.mark.parametrize(
    ("scale", "error", "text"),
    [
        ({"large": 1.0}, ValueError, "scale must hold a number for every tensor of z0"),
        ([1.0, 1.0], ValueError, "scale must hold a number for every tensor of z0"),
        ({"large": 1.0, "small": 0}, ValueError, "scale must be finite and at least 8.67362e-19 .*, got 0"),
        ({"large": 1.0, "small": torch.ones(())}, TypeError, "scale must be a number, got tensor"),
    ],
)
def test_a_wrong_scale_is_refused(scale, error, text):
    with pytest.raises(error, match=text):
        deqfast.solve(lambda z: z, start(torch.ones(2, 8)), scale=scale)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("order", ["rows", "channels_last"])
def test_complex_solves_are_those_of_their_parts(solver, order):
    x = torch.randn(4, 2, 2, 2, dtype=torch.complex64)
    x = x.contiguous(memory_format=torch.channels_last) if order == "channels_last" else x
    parts = torch.view_as_real(x)
    expected = deqfast.solve(lambda z: torch.cos(z) + 0.3 * parts, torch.zeros_like(parts), solver)

    def f(z):
        return torch.view_as_complex(torch.cos(torch.view_as_real(z))) + 0.3 * x

    found = deqfast.solve(f, torch.zeros_like(x), solver)
    assert found.value.dtype == torch.complex64 and found.value.stride() == x.stride()
    assert torch.equal(torch.view_as_real(found.value), expected.value)
    assert torch.equal(found.residual, expected.residual)


@pytest.mark.parametrize(
    "adjoint",
    [Implicit(Anderson(1e-13, 60)), Neumann(60), Phantom(60), Unrolled(60), Reversible(12)],
    ids=lambda adjoint: type(adjoint).__name__,
)
def test_complex_gradients(adjoint):
    """Those of torch's convention: conjugates in the products, for maps that are not holomorphic too."""
    x = torch.randn(2, 2, dtype=torch.complex128, requires_grad=True)
    mix = (0.2 * torch.randn(2, 2, dtype=torch.complex128)).requires_grad_()

    def solved(x, mix):
        def f(z, x, mix):
            return torch.tanh(z @ mix) + 0.1 * z.conj() + 0.3j * x

        return fixed_point(f, torch.zeros_like(x), x, mix, solver=Picard(1e-13, 200), adjoint=adjoint, warn=False)

    assert torch.autograd.gradcheck(solved, (x, mix), **FINITE_DIFFERENCES)
    if isinstance(adjoint, (Implicit, Unrolled)):
        assert torch.autograd.gradgradcheck(solved, (x, mix), eps=1e-5, atol=1e-5, nondet_tol=GRADIENT)


def test_real_and_complex_tensors_are_not_mixed_up():
    with pytest.raises(
        TypeError, match=r"f must return floating-point tensors for torch.float32 ones, got torch.complex64"
    ):
        deqfast.solve(lambda z: z * 1j, torch.ones(2, 3))
    with pytest.raises(TypeError, match=r"f must return complex tensors for torch.complex64 ones, got torch.float32"):
        deqfast.solve(lambda z: z.real, torch.ones(2, 3, dtype=torch.complex64))
