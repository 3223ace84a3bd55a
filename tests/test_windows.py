"""The default window of Broyden: it holds every pair, and so loses no problem that torchdeq's default solves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from deqfast import Broyden, solve
from deqfast.testing import rounding

get_solver = pytest.importorskip("torchdeq.solver").get_solver


def hard_problems(dim: int = 64) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Maps that need more pairs than 20: no contraction, far from normal, with many solutions' worth of curvature."""
    generator = torch.Generator().manual_seed(0)
    angles = math.pi * torch.rand(dim // 2, generator=generator)
    rotation = torch.block_diag(*(1.1 * torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in angles))
    # With couplings of 1 the fixed point is 1e19 long, and no residual in float32 tells it from another.
    jordan = 0.5 * torch.eye(dim) + torch.diag(0.5 * torch.ones(dim - 1), 1)
    weight = torch.randn(dim, dim, generator=generator)
    weight *= 3 / torch.linalg.eigvals(weight).abs().max()
    bias = torch.randn(4, dim, generator=generator)
    return {
        "jordan 0.5": lambda z: z @ jordan.T + bias,
        "rotation 1.1": lambda z: z @ rotation.T + bias,
        "tanh 3W": lambda z: torch.tanh(z @ weight.T + bias),
    }


@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
@pytest.mark.parametrize("problem", hard_problems())
def test_the_default_window_solves_what_torchdeqs_does(problem, kernel):
    f = hard_problems()[problem]
    solution = solve(f, torch.zeros(4, 64), Broyden(rtol=1e-3, max_iter=150), kernel)
    assert solution.converged.all() and solution.evaluations < 130
    theirs, _, _ = get_solver("broyden")(f, torch.zeros(4, 64), tol=1e-3, max_iter=150, stop_mode="rel")
    assert ((f(theirs) - theirs).norm(dim=1) <= (1e-3 + rounding(torch.float32)) * f(theirs).norm(dim=1)).all()
