"""Blocks in models: parametrized weights, activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from deqfast import Anderson, Broyden, DEQBlock, Implicit, Status
from deqfast.testing import GRADIENT, assert_close

TIGHT = Broyden(tol=1e-12, max_iter=60)


class Cell(nn.Module):
    """z = tanh(0.5 W z + x), W parametrized."""

    def __init__(self, parametrization):
        super().__init__()
        torch.manual_seed(0)
        self.linear = parametrization(nn.Linear(4, 4, bias=False, dtype=torch.float64))

    def forward(self, z, x):
        return torch.tanh(0.5 * self.linear(z) + x)


class Counted(nn.Module):
    """Halves a weight, and counts how often."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight / 2


class TestParametrizations:
    @pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
    @pytest.mark.parametrize("cached", [False, True])
    @pytest.mark.parametrize("adjoint", ["jfb", Implicit(TIGHT)], ids=["jfb", "implicit"])
    def test_the_gradient_is_kept(self, name, cached, adjoint):
        """Also inside of ``parametrize.cached()``, where the solve would leave a weight without a gradient behind."""
        x = torch.randn(3, 4, dtype=torch.float64)
        gradients = []
        for inside in (cached, False):
            block = DEQBlock(Cell(getattr(parametrizations, name)), TIGHT, adjoint).eval()
            if inside:
                with parametrize.cached():
                    block(x).square().sum().backward()
            else:
                block(x).square().sum().backward()
            gradients.append([p.grad for p in block.parameters()])
        assert all(g is not None and g.any() for g in gradients[0])
        assert_close(gradients[0], gradients[1], GRADIENT)

    def test_a_weight_is_computed_once_in_a_solve(self):
        counted = Counted()

        def parametrized(linear):
            parametrize.register_parametrization(linear, "weight", counted)
            return linear

        block = DEQBlock(Cell(parametrized), Broyden(tol=1e-6), "implicit")
        counted.calls = 0
        block(torch.randn(3, 4, dtype=torch.float64)).sum().backward()
        assert counted.calls == 1

    def test_spectral_norm_in_training_stands_still_during_a_solve(self, recwarn):
        block = DEQBlock(Cell(parametrizations.spectral_norm), Broyden(tol=1e-10, max_iter=60))
        for _ in range(3):
            _, solution = block(torch.randn(3, 4, dtype=torch.float64), return_solution=True)
            assert solution.status.tolist() == [Status.CONVERGED] * 3
        assert not recwarn.list


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "phantom", "shine", "unrolled"])
def test_checkpointing_changes_no_gradient_and_solves_at_most_once_more(adjoint, use_reentrant):
    calls = 0

    def count(module, arguments):
        nonlocal calls
        calls += 1

    block = DEQBlock(Cell(nn.Identity()), Anderson(tol=1e-5), adjoint)
    block.cell.register_forward_pre_hook(count)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradients, counts = [], []
    for call in (block, lambda x: checkpoint(block, x, use_reentrant=use_reentrant)):
        calls = 0
        call(x).square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in block.parameters())])
        counts.append(calls)
        x.grad = None
        block.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert counts[1] <= 2 * counts[0]
