"""Which tensors of x have rows of samples: what takes the place of a broken sample, and what compaction cuts."""

from __future__ import annotations

import pytest
import torch
from correctness import GRADIENT, after_solve, assert_close, rounding
from own_sums import product
from torch import nn

from deqfast import (
    JFB,
    SHINE,
    Broyden,
    DEQBlock,
    Implicit,
    Neumann,
    Phantom,
    Picard,
    Reversible,
    Status,
    Unrolled,
    diagnose,
)
from deqfast.state.rows import mark_samples

B = 5


def inputs() -> dict[str, torch.Tensor]:
    """A batch of five features whose weight and adjacency happen to have five rows as well."""
    torch.manual_seed(0)
    return {
        "features": torch.randn(B, B - 1, dtype=torch.float64),
        "weight": 0.2 * torch.randn(B, B, dtype=torch.float64),
        "adjacency": (0.2 * torch.rand(B, B, dtype=torch.float64)).to_sparse(),
    }


def cell(z, x):
    padded = nn.functional.pad(x["features"], (0, 1))
    return torch.tanh(z @ x["weight"] + padded + z @ x["adjacency"].to_dense())


SHARED = {"features": True, "weight": False, "adjacency": False}


@pytest.mark.parametrize("per_sample", [None, SHARED])
@pytest.mark.parametrize("adjoint", ["jfb", Implicit(Broyden(1e-12, 60))])
def test_a_broken_sample_replaces_no_row_of_a_weight(per_sample, adjoint):
    x = inputs()
    x["features"][2] = torch.nan
    x["weight"].requires_grad_()
    block = DEQBlock(cell, Broyden(1e-12, 60), adjoint, per_sample=per_sample, warn=False)
    z, solution = block(x, z0=torch.zeros(B, B, dtype=torch.float64), return_solution=True)
    assert (solution.status == Status.NONFINITE).tolist() == [False, False, True, False, False]
    (found,) = torch.autograd.grad(z[[0, 1, 3, 4]].sum(), x["weight"])
    healthy = {**x, "features": x["features"][[0, 1, 3, 4]]}
    z = DEQBlock(cell, Broyden(1e-12, 60), adjoint)(healthy, z0=torch.zeros(4, B, dtype=torch.float64))
    assert_close(found, torch.autograd.grad(z.sum(), x["weight"])[0], GRADIENT)


D = 6
EVERY = [JFB(), Implicit(Broyden(1e-13, 60)), Neumann(3), Phantom(3), Reversible(25), SHINE(), Unrolled(60)]


def gradients(batch, adjoint, transform=False):
    """Gradients in what all samples share, of a loss of samples 0, 2, 3 and 4 of `batch`; sample 1 breaks down."""
    torch.manual_seed(0)
    tensors = [torch.randn(D, D), torch.randn(D), torch.randn(D, 2), torch.rand(D + 1, D), torch.rand(D + 1, D)]
    weight, bias, memory, gate, argument = (0.3 * tensor.double() for tensor in tensors)
    argument[1] = -1.0

    def cell(z, x):
        read = product(torch.softmax(product(z, x["memory"].T), dim=1), x["memory"])
        inner = product(z, x["weight"].T) * x["gate"] + read + x["bias"]
        return 0.5 * torch.tanh(inner) + 0.1 * x["bias"] * x["argument"].log()

    block = DEQBlock(cell, Broyden(1e-13, 60), adjoint, warn=False, init=lambda x: torch.zeros_like(x["gate"]))

    def loss(*shared):
        x = dict(zip(("weight", "bias", "memory"), shared, strict=True))
        z = block({**x, "gate": gate[:batch], "argument": argument[:batch]})
        return z[[0, 2, 3, 4]].square().sum()

    if transform:
        return torch.func.grad(loss, (0, 1, 2))(weight, bias, memory)
    shared = [tensor.requires_grad_() for tensor in (weight, bias, memory)]
    return torch.autograd.grad(loss(*shared), shared)


@pytest.mark.parametrize("transform", [False, True], ids=["autograd", "torch.func"])
@pytest.mark.parametrize("adjoint", EVERY, ids=str)
def test_a_batch_as_large_as_the_width_has_the_gradients_of_others(adjoint, transform):
    """Each tensor of x then has a row per sample by its shape: those of samples, and those that all samples share."""
    if transform and isinstance(adjoint, (Reversible, SHINE)):
        pytest.skip("has no derivative in torch.func")
    found = gradients(D, adjoint, transform)
    assert all(grad.isfinite().all() and grad.any() for grad in found)
    for batch in (D - 1, D + 1):
        assert_close(found, gradients(batch, adjoint, transform), GRADIENT)


def test_one_sample_of_a_diagnosis_is_taken_from_the_tensors_of_samples():
    x = {"weight": 0.1 * torch.randn(B, B), "shift": torch.randn(B, B)}
    found = diagnose(DEQBlock(lambda z, x: torch.tanh(z @ x["weight"] + x["shift"])), x, torch.zeros(B, B))
    assert found.alone is not None and found.alone < 1e-5


def test_drop_converged_asks_which_tensors_have_rows_of_samples():
    """At every batch size, not only when another tensor happens to have as many rows."""
    for batch in (B, B + 1):
        x = {"features": torch.randn(batch, B - 1, dtype=torch.float64), "weight": inputs()["weight"], "name": "a"}
        block = DEQBlock(lambda z, x: z, drop_converged=True)
        with pytest.raises(ValueError, match=f"per_sample=.'features': True, 'weight': {batch == B}, 'name': False"):
            block(x, torch.zeros(batch, B, dtype=torch.float64))


def test_drop_converged_cuts_no_weight():
    x, z0 = inputs(), torch.zeros(B, B, dtype=torch.float64)
    x["features"][0] *= 10
    solver = Picard(1e-6, 60)
    whole = DEQBlock(cell, solver)(x, z0)
    cut, solution = DEQBlock(cell, solver, drop_converged=True, per_sample=SHARED)(x, z0, return_solution=True)
    assert solution.sample_evaluations < B * solution.evaluations
    assert_close(cut, whole, after_solve(rounding(torch.float64)))


def test_the_rule():
    square, parameter = torch.zeros(B, B), nn.Parameter(torch.zeros(B, 2))
    x = [square, torch.zeros(B), torch.zeros(3, B), torch.tensor(1.0), parameter, torch.eye(B).to_sparse(), "a"]
    assert mark_samples(x, B) == [None, None, False, False, False, False, False]
    assert mark_samples(square, B) == [True]  # by itself it is the batch
    assert mark_samples([square, torch.zeros(3)], B, [True, False]) == [True, False]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ([True], "per_sample must hold True or False in the structure of x"),
        ([True, 1], "per_sample must hold True or False"),
        ([True, True], r"must have 5 rows, as z0 has, got \(3,\)"),
    ],
)
def test_wrong_declarations(declared, message):
    with pytest.raises(ValueError, match=message):
        mark_samples([torch.zeros(B, B), torch.zeros(3)], B, declared)
