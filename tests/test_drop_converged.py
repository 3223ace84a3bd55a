"""Samples that are done leave f's batch."""

from __future__ import annotations

import pytest
import torch
from solutions import SOLVERS, assert_same_solution
from torch import nn

import deqfast
from deqfast import solve

RATES = [0.1, 0.2, 0.3, 0.5, 0.7, 0.9]
some_solvers = pytest.mark.parametrize("name", ["picard", "anderson", "broyden"])


class Spread:
    """f(z) = rate z + c sample by sample, elementwise: the samples need very different numbers of iterations."""

    def __init__(self, device="cpu", dim=16):
        self.rate = torch.tensor(RATES, device=device)[:, None]
        self.wave = torch.linspace(0.5, 1, dim, device=device)
        self.sizes = []

    def __call__(self, z, rows=None):
        self.sizes.append(len(z))
        rate = self.rate if rows is None else self.rate[rows]
        assert len(rate) == len(z)
        return rate * self.wave * torch.cos(z) + 1


def start(device="cpu"):
    return torch.zeros(len(RATES), 16, device=device)


@pytest.mark.covering(0)
@some_solvers
@pytest.mark.parametrize("stops", [False, True])
def test_the_answer_is_the_same_with_less_work(stops, name, kernel, device):
    """To a rule those that the batch has left stand there with their iterate."""
    found, fs, last = {}, {}, {}

    def rule(z, value, k):
        last[drops] = z.clone(), value.clone()
        return torch.tensor([k >= 2, k >= 3, *[False] * 4], device=device)

    for drops in (False, True):
        options = {"drop_converged": drops, "stop_fn": rule if stops else None}
        fs[drops] = Spread(device)
        found[drops] = solve(fs[drops], start(device), SOLVERS[name](rtol=1e-5), kernel, **options)
    whole, compact = fs[False].sizes, fs[True].sizes
    assert_same_solution(found[True], found[False], but=("sample_evaluations",))
    assert found[False].sample_evaluations == sum(whole) == found[False].evaluations * len(RATES)
    assert found[True].sample_evaluations == sum(compact) < 0.9 * sum(whole)
    assert compact == sorted(compact, reverse=True) and len(set(compact)) > 1
    if stops:
        assert found[True].status[1] == deqfast.Status.STOPPED
        (z, expected), (_, value) = last.values()
        assert torch.equal(value[1], z[1]) and torch.equal(value[-1], expected[-1])


def test_an_order_of_memory_and_a_structure(kernel, device):
    """f gets the rows as it gets the batch: shape, dtype, memory order, structure."""
    seen = []

    def f(z, rows):
        seen.append((z["a"].is_contiguous(memory_format=torch.channels_last), z["b"].dtype, len(z["a"])))
        rate = torch.tensor(RATES, device=device) if rows is None else torch.tensor(RATES, device=device)[rows]
        return {"a": rate[:, None, None, None] * torch.cos(z["a"]), "b": 0.1 * rate[:, None].double() * z["b"] + 1}

    z0 = {
        "a": torch.zeros(6, 4, 3, 2, device=device).contiguous(memory_format=torch.channels_last),
        "b": torch.zeros(6, 2, dtype=torch.float64, device=device),
    }
    compact = solve(f, z0, deqfast.Picard(rtol=1e-6, max_iter=60), kernel, drop_converged=True)
    assert all(order and dtype == torch.float64 for order, dtype, _ in seen)
    assert seen[-1][2] < 6
    whole = solve(lambda z: f(z, None), z0, deqfast.Picard(rtol=1e-6, max_iter=60), kernel)
    assert torch.equal(compact.value["a"], whole.value["a"]) and torch.equal(compact.value["b"], whole.value["b"])


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.sizes = []

    def forward(self, z, x):
        self.sizes.append(len(z))
        return self.scale * x["rate"] * torch.cos(z) + x["shift"]


@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "phantom"])
def test_in_a_block_x_is_taken_row_by_row(adjoint):
    x = {"rate": torch.tensor(RATES)[:, None], "shift": torch.ones(1), "note": "kept"}
    rows, results = {"rate": True, "shift": False, "note": False}, []
    for compact in (False, True):
        block = deqfast.DEQBlock(Cell(), deqfast.Anderson(rtol=1e-5), adjoint, drop_converged=compact, per_sample=rows)
        z, solution = block(x, torch.zeros(6, 16), return_solution=True)
        z.square().sum().backward()
        results.append((z, block.cell.scale.grad, solution, block.cell.sizes))
    (z, grad, whole, _), (compact_z, compact_grad, solution, sizes) = results
    assert torch.equal(z, compact_z) and torch.equal(grad, compact_grad)
    assert solution.sample_evaluations < whole.sample_evaluations
    assert sizes[-1] == 6  # the gradient's evaluation holds all samples


def test_residuals_are_traced():
    f = Spread()
    solution = solve(f, start(), deqfast.Anderson(rtol=1e-5), trace=True)
    assert solution.trace.shape == (solution.evaluations, len(RATES))
    assert torch.equal(solution.trace[-1], solution.residual)
    assert bool((solution.trace.diff(dim=0) <= 0).all())
    z = start()
    first = f(z)
    torch.testing.assert_close(solution.trace[0], (first - z).norm(dim=1) / first.norm(dim=1))
    absolute = solve(f, start(), deqfast.Anderson(rtol=0, atol=1e-5), trace=True)
    assert torch.equal(absolute.trace[-1], absolute.residual_abs)
    assert solve(f, start(), deqfast.Anderson(rtol=1e-5)).trace is None
