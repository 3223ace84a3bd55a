"""Recurrent networks by prefix scans: evaluations, exact gradients, and what happens where they are chaotic."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from correctness import assert_close
from models import rnn

from deqfast import Picard, Status, fixed_point

LONG = pytest.mark.tier("full")


def solved(step, x):
    start = x.new_zeros(*x.shape[:2], step.size)
    return fixed_point(
        partial(rnn.newton, step), start, x, solver=Picard(1e-6, 40), adjoint="jfb", warn=False, return_solution=True
    )


@pytest.mark.parametrize(
    ("kind", "gain", "length", "most"),
    [
        ("gru", 1.0, 256, 5),
        ("lstm", 1.0, 64, 4),
        ("diagonal", 4.0, 64, 6),
        pytest.param("gru", 1.0, 2048, 5, marks=LONG),
        pytest.param("gru", 4.0, 2048, 8, marks=LONG),
        pytest.param("lstm", 4.0, 256, 7, marks=LONG),
    ],
)
def test_few_evaluations_and_the_exact_gradient(kind, gain, length, most):
    torch.manual_seed(0)
    step = rnn.Step(kind, 4, gain)
    torch.manual_seed(1)
    x = torch.randn(2, length, 4, requires_grad=True)
    h, solution = solved(step, x)
    assert solution.converged.all() and solution.evaluations <= most
    expected = rnn.loop(step, x)
    wanted = [x, *step.cell.parameters()]
    found, exact = (torch.autograd.grad(z.square().sum(), wanted, retain_graph=True) for z in (h, expected))
    for a, b in zip((h, *found), (expected, *exact), strict=True):
        assert (a - b).norm() <= 2e-6 * b.norm()  # the tolerance, and the sensitivity to earlier states


def test_a_chaotic_network_does_not_converge():
    for seed in range(3):
        torch.manual_seed(seed)
        step, x = rnn.Step("gru", 4, 12.0), torch.randn(4, 256, 4)
        _, solution = solved(step, x)
        assert not solution.converged.any()
        assert {*solution.status.tolist()} <= {Status.NONFINITE, Status.MAX_ITER, Status.ESCAPED}


@pytest.mark.parametrize("dense", [True, False])
def test_scan(dense):
    torch.manual_seed(0)
    b = torch.randn(2, 13, 3, dtype=torch.float64)
    a = torch.randn(2, 13, 3, 3, dtype=torch.float64) if dense else torch.randn(2, 13, 3, dtype=torch.float64)
    h, states = torch.zeros(2, 3, dtype=torch.float64), []
    for t in range(13):
        h = rnn.times(a[:, t], h) + b[:, t]
        states.append(h)
    assert_close(rnn.scan(a, b), torch.stack(states, dim=1), 1e-10)
