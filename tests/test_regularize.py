"""Jacobian penalty and spectral radius against dense Jacobians."""

import math

import pytest
import torch
from correctness import GRADIENT, assert_close, rounding

from deqfast import DEQBlock, FCCell
from deqfast.regularize import internalisation, jacobian_penalty, spectral_radius


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    cell, x = FCCell(3, 6, dtype=dtype), torch.randn(4, 3, dtype=dtype)
    return cell, DEQBlock(cell)(x).detach(), x


def test_the_penalty_is_the_mean_square_of_the_jacobian_without_bias():
    cell, z, x = problem()
    jacobians = torch.vmap(torch.func.jacrev(lambda z, x: cell(z[None], x[None])[0]))(z, x)
    expected = jacobians.square().sum((1, 2)).mean() / 6
    drawn = torch.stack([jacobian_penalty(cell, z, x) for _ in range(2000)])
    assert (drawn.mean() - expected).abs() < 5 * drawn.std() / 2000**0.5
    assert (jacobian_penalty(cell, z, x, probes=4000) - expected).abs() < 5 * drawn.std() / 4000**0.5
    assert drawn.std() > 0.01 * expected


def test_the_gradient_of_the_penalty():
    cell, z, x = problem()

    def penalty(x, weight):
        torch.manual_seed(1)
        return jacobian_penalty(lambda z, x: torch.tanh(z @ weight.T + x @ cell.injection.weight.T), z, x)

    assert torch.autograd.gradcheck(penalty, (x.requires_grad_(), cell.weight), nondet_tol=GRADIENT)
    assert torch.autograd.grad(jacobian_penalty(cell, z, x), cell.weight)[0].any()


@pytest.mark.parametrize("where", ["x", "z", "the cell"])
@pytest.mark.parametrize("row", [0, 2])
def test_a_sample_that_is_not_finite_leaves_the_penalty_of_the_others(where, row):
    cell, z, x = problem()
    (z if where == "z" else x)[row] = -9.0 if where == "the cell" else torch.nan

    def f(z, x):
        return cell(z, x) * (x.sum(1, keepdim=True) + 20).sqrt()  # of -27 + 20 there is none

    others = [i for i in range(4) if i != row]
    x.requires_grad_()
    penalties = []
    for rows in (range(4), others):
        probe = torch.randn(4, 6, dtype=x.dtype, generator=torch.Generator().manual_seed(1))[list(rows)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda like, probe=probe: probe)
            penalty = jacobian_penalty(f, z[list(rows)], x[list(rows)])
        penalties.append((penalty.detach(), *torch.autograd.grad(penalty, [cell.weight, x])))
    assert_close(penalties[0], penalties[1], GRADIENT)
    assert penalties[0][1].any() and not penalties[0][2][row].any()


def test_samples_that_are_not_finite():
    cell, z, x = problem()
    penalty = jacobian_penalty(cell, z, torch.full_like(x, torch.nan))
    assert penalty == 0 and not torch.autograd.grad(penalty, cell.weight)[0].any()
    torch.manual_seed(1)
    expected = spectral_radius(cell, z, x)
    x[2] = torch.nan
    torch.manual_seed(1)
    radius = spectral_radius(cell, z, x)
    assert radius.isnan().tolist() == [False, False, True, False]
    assert_close(radius[[0, 1, 3]], expected[[0, 1, 3]], GRADIENT)


def test_internalisation_draws_the_start_and_leaves_the_answer():
    z0 = {"a": torch.tensor([[3.0], [1.0], [5.0]], requires_grad=True), "b": torch.tensor([[0j], [2j], [0j]])}
    z = {"a": torch.tensor([[1.0], [1.0], [0.0]], requires_grad=True), "b": torch.tensor([[1j], [1j], [0j]])}
    loss = internalisation(z0, z)  # (4 + 1) / 2 and 1 / 2; the third answer is zero
    loss.backward()
    assert loss == 1.5 and z["a"].grad is None
    assert z0["a"].grad.tolist() == [[1.0], [0.0], [0.0]]
    with pytest.raises(ValueError, match=r"z0 must have the structure and shapes of z, .*\(3, 1\).*, got .*\(1, 1\)"):
        internalisation(z0["a"][:1], z["a"])


def radius_of(matrix, rows=4, **settings):
    """Spectral radius of z -> z M at several rows of the dtype of M."""
    z = torch.zeros(rows, len(matrix), dtype=matrix.dtype)
    return spectral_radius(lambda z, x: z @ matrix + x, z, z, **settings)


def turned(modulus, angle, ratio):
    """Rotation by the angle, times the modulus, in a basis whose axes have this ratio."""
    a, b = modulus * math.cos(angle), modulus * math.sin(angle)
    return torch.tensor([[a, -b * ratio], [b / ratio, a]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("iterations", [2, 19, 49, 50, 54, 100])
@pytest.mark.parametrize(
    "matrix",
    [
        turned(1.1, math.pi / 2, 200),
        turned(1.1, math.pi / 2, 10),
        turned(1.03, 0.7, 20),
        turned(0.97, 3.1, 20),
        torch.diag(torch.tensor([0.9, -0.9, 0.3], dtype=torch.float64)),
        torch.tensor([[0.9, 1.0], [0.0, 0.9]], dtype=torch.float64),
        torch.zeros(3, 3, dtype=torch.float64),
    ],
    ids=["200:1", "10:1", "20:1", "half a turn", "both signs", "defective", "zero"],
)
def test_the_radius_of_pairs_of_any_phase(matrix, iterations, dtype):
    """The products span the whole space, so only the rounding of M counts.

    It moves a double eigenvalue by its root, and a pair by its product with the length of M.
    """
    exact = torch.linalg.eigvals(matrix).abs().max()
    moved = rounding(dtype) * max(1.0, float(torch.linalg.matrix_norm(matrix, 2)) ** 2)
    radius = radius_of(matrix.to(dtype), iterations=max(iterations, len(matrix)))
    assert ((radius - exact).abs() <= max(moved, 2 * rounding(dtype) ** 0.5 * float(exact))).all(), radius
    assert matrix.any() or not radius.any()


KINDS = {
    "dense": lambda m: m,
    "in a basis of 100:1": lambda m: torch.logspace(0, 2, 50, dtype=m.dtype)[:, None] * m / torch.logspace(0, 2, 50),
    "symmetric": lambda m: m + m.T,
    "orthogonal": lambda m: torch.linalg.qr(m).Q,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_radius_of_random_matrices(kind, seed):
    """An accepted value errs by at most a tenth times the condition of the eigenvalue.

    The growth of 25 products errs by the 25th root of a factor of a few.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = kind(torch.randn(50, 50, dtype=torch.float64, generator=generator) / 50**0.5)
    exact = torch.linalg.eigvals(matrix).abs().max()
    assert ((radius_of(matrix) / exact - 1).abs() < 0.1).all()
    assert ((radius_of(matrix, iterations=200) / exact - 1).abs() < 0.02).all()


def test_samples_groups_tuples_and_complex_states_each_have_their_radius():
    scale, z = torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64)[:, None], torch.zeros(4, 2, dtype=torch.float64)
    matrix, turn = turned(1.1, math.pi / 2, 200), torch.polar(scale, torch.full_like(scale, 2.0))

    def on_tuple(z, x):
        both = scale * (torch.cat([z["a"], z["b"]], dim=1) @ matrix)
        return {"b": both[:, 1:], "a": both[:, :1]}

    def on_groups(z, x):
        pairs = torch.stack([z[:2, 0], z[2:, 0]], dim=1) @ matrix * scale[1::2]
        return torch.cat([pairs[:, 0], pairs[:, 1]])[:, None]

    groups = torch.tensor([0, 1, 0, 1])
    for radius, expected in (
        (spectral_radius(lambda z, x: scale * (z @ matrix), z, None), 1.1 * scale[:, 0]),
        (spectral_radius(on_tuple, {"a": z[:, :1], "b": z[:, 1:]}, None), 1.1 * scale[:, 0]),
        (spectral_radius(on_groups, z[:, :1], None, groups=groups), 1.1 * scale[1::2, 0]),
        (spectral_radius(lambda z, x: turn * z, z.to(torch.complex128), None), scale[:, 0]),
    ):
        assert_close(radius, expected, 1e-6)
