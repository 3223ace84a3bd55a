"""Which tensors of x have rows of samples: what takes the place of a broken sample, and what compaction cuts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deqfast import Broyden, DEQBlock, Implicit, Picard, Status
from deqfast.state.rows import mark_samples
from deqfast.testing import GRADIENT, after_solve, assert_close, rounding

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


@pytest.mark.parametrize("batch", [B, B + 1])
def test_a_broken_sample_of_a_square_batch_leaves_no_trace(batch):
    """Features of shape (B, B) next to another tensor differ from a weight by the row that is not finite."""
    features, weight = torch.randn(batch, B), nn.Parameter(0.2 * torch.randn(B, B))
    features[2] = torch.nan
    x = {"features": features, "scale": torch.ones(batch, 1)}
    block = DEQBlock(lambda z, x: torch.tanh(z @ weight + x["features"] * x["scale"]), warn=False)
    block(x, z0=torch.zeros(batch, B)).nan_to_num().sum().backward()
    assert torch.isfinite(weight.grad).all() and weight.grad.any()


@pytest.mark.parametrize("per_sample", [None, SHARED])
def test_drop_converged_cuts_no_weight(per_sample):
    x, z0 = inputs(), torch.zeros(B, B, dtype=torch.float64)
    x["features"][0] *= 10
    solver = Picard(1e-6, 60)
    whole = DEQBlock(cell, solver)(x, z0)
    cut, solution = DEQBlock(cell, solver, drop_converged=True, per_sample=per_sample)(x, z0, return_solution=True)
    assert solution.sample_evaluations < B * solution.evaluations
    assert_close(cut, whole, after_solve(rounding(torch.float64)))


def test_the_rule():
    square, parameter = torch.zeros(B, B), nn.Parameter(torch.zeros(B, 2))
    x = [square, torch.zeros(B), torch.zeros(3, B), torch.tensor(1.0), parameter, torch.eye(B).to_sparse(), "a"]
    assert mark_samples(x, B) == [None, True, False, False, False, False, False]
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
