"""SubhomogeneousCell: one fixed point that plain iteration reaches at the documented rate, whatever the weights are."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from correctness import FINITE_DIFFERENCES, assert_close, rounding
from torch.func import functional_call

from deqfast import DEQBlock, Implicit, Neumann, Picard, SubhomogeneousCell

DEGREE, EPS = 0.9, rounding(torch.float64)
TIGHT = Picard(1e-13, 400)
every_kind = pytest.mark.parametrize("kernel_size", [None, 3], ids=["connected", "convolutional"])


def cell_of(kernel_size, weights="initial", dtype=torch.float64, degree=DEGREE):
    cell, top = SubhomogeneousCell(3, 5, kernel_size, degree, dtype=dtype), 0.1 * torch.finfo(dtype).max
    factor = {"zero": 0.0, "large": 1e3, "tiny": 1e-30}.get(weights, 1.0)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(10.0 ** torch.randint(-6, 7, parameter.shape) if weights == "any scale" else factor)
        if weights == "huge":  # products overflow, every second row is zero, and c is zero
            cell.A.copy_(top * cell.A.sign())[::2] = 0
            cell.injection.bias.fill_(-top)
    return cell


def inputs(kernel_size, batch=2, dtype=torch.float64):
    return 3 * torch.randn(batch, 3, *([4, 5] if kernel_size else []), dtype=dtype)


def distance(y, z):
    return float((y.log() - z.log()).abs().max())


def check_rate(cell, x, starts):
    """Check both documented bounds from each of the starts."""
    expected, most = cell.initial_state(x), math.log1p(math.exp(cell.shift))
    for _ in range(500):
        expected = cell(expected, x)
    for z in starts:
        for k in range(400):
            before, z = z, cell(z, x)
            assert distance(z, expected) <= cell.degree**k * most + EPS
            assert k == 0 or distance(cell(z, x), z) <= cell.degree * distance(z, before) + EPS


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("degree", [0.05, DEGREE])
@pytest.mark.parametrize("weights", ["initial", "zero", "tiny", "large", "huge", "any scale"])
def test_all_starts_lead_to_one_fixed_point_at_the_documented_rate(kernel_size, degree, weights):
    cell, x = cell_of(kernel_size, weights, degree=degree), inputs(kernel_size)
    zeros = cell.initial_state(x)
    check_rate(cell, x, [zeros, zeros - 1e300, *(scale * torch.randn_like(zeros) for scale in (1e-300, 1.0, 1e6))])


@every_kind
def test_weights_that_ascend_the_residual_keep_the_rate(kernel_size):
    cell, x, rates = cell_of(kernel_size), inputs(kernel_size), []
    optimizer = torch.optim.Adam(cell.parameters(), lr=0.1, maximize=True)
    for _ in range(150):
        z = [torch.ones_like(cell.initial_state(x))]
        for _ in range(6):
            z.append(cell(z[-1], x))
        early, late = ((z[k].log() - z[k - 1].log()).abs().max() for k in (2, 6))
        optimizer.zero_grad()
        (late / early).log().backward()
        optimizer.step()
        rates.append((late / early).item() ** 0.25)  # per evaluation
    assert rates[0] < 0.6 < 0.8 < max(rates) <= DEGREE
    with torch.no_grad():
        check_rate(cell, x, [torch.zeros_like(z[0]), 10 * torch.randn_like(z[0])])


def test_the_degree_is_reached():
    cell = SubhomogeneousCell(1, 1, degree=DEGREE, dtype=torch.float64)
    with torch.no_grad():
        cell.A.fill_((1 + DEGREE) ** 2)
        cell.injection.bias.fill_(-1e3)
    x, z = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 1 / (1 + DEGREE), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: cell(z, x), z)
    assert_close(cell(z, x), z, EPS)
    assert_close(jacobian, torch.full_like(jacobian, DEGREE), EPS)


@every_kind
@pytest.mark.parametrize("weights", ["initial", "large", "any scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solves_end_within_the_documented_evaluations(kernel_size, weights, dtype):
    cell, x = cell_of(kernel_size, weights, dtype), inputs(kernel_size, dtype=dtype)
    block = DEQBlock(cell, Picard(1e-3, 74), Implicit(Picard(1e-3, 400)))
    z, solution = block(x, return_solution=True)
    z.sum().backward()
    assert solution.converged.all() and block.backward_solution.converged.all()
    assert all(parameter.grad.isfinite().all() for parameter in cell.parameters())


@every_kind
@pytest.mark.parametrize("adjoint", [Implicit(TIGHT), Neumann(200)], ids=lambda adjoint: type(adjoint).__name__)
def test_gradients_against_finite_differences(kernel_size, adjoint):
    block = DEQBlock(SubhomogeneousCell(2, 2, kernel_size, dtype=torch.float64), TIGHT, adjoint)
    names, parameters = zip(*block.named_parameters(), strict=True)
    x = torch.randn(2, 2, *([2, 1] if kernel_size else []), dtype=torch.float64, requires_grad=True)

    def value(x, *parameters):
        return functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    assert len(parameters) == 3 and torch.autograd.gradcheck(value, (x, *parameters), **FINITE_DIFFERENCES)


@every_kind
def test_exports_compiled_cells_copies_and_empty_batches(kernel_size):
    block, x = DEQBlock(cell_of(kernel_size).float(), Picard(1e-4, 100)).eval(), inputs(kernel_size).float()
    z, close = block(x), rounding(torch.float32)
    assert_close(torch.export.export(block, (x,)).module()(x), z, close)
    assert_close(torch.compile(block.cell, fullgraph=True, backend="eager")(z, x), block.cell(z, x), close)
    assert_close(pickle.loads(pickle.dumps(block))(x), z, close)
    assert block(x[:0]).shape == z[:0].shape
    half = copy.deepcopy(block).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and half.isfinite().all()
