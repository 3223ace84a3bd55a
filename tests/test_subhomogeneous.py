"""SubhomogeneousCell: one fixed point that plain iteration reaches at the documented rate, whatever the weights are."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from deqfast import Anderson, Broyden, DEQBlock, Implicit, Neumann, Picard, SubhomogeneousCell
from deqfast.testing import FINITE_DIFFERENCES, after_solve, amplification, assert_close, rounding

DEGREE, EPS = 0.9, rounding(torch.float64)
TIGHT = Picard(1e-13, 400)
every_kind = pytest.mark.parametrize("kernel_size", [None, 3], ids=["connected", "convolutional"])


def cell_of(kernel_size, weights="initial", dtype=torch.float64, degree=DEGREE):
    cell = SubhomogeneousCell(3, 5, kernel_size, degree, dtype=dtype)
    top = 0.1 * torch.finfo(dtype).max
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_({"zero": 0.0, "large": 1e3, "tiny": 1e-30}.get(weights, 1.0))
            if weights == "any scale":
                parameter.mul_(10.0 ** torch.randint(-6, 7, parameter.shape))
        if weights == "huge":  # products overflow
            cell.A.copy_(top * cell.A.sign())
        if weights == "sparse":
            cell.A[::2] = 0
            cell.injection.bias.fill_(-top)
    return cell


def inputs(kernel_size, batch=2, dtype=torch.float64):
    return 3 * torch.randn(batch, 3, *([4, 5] if kernel_size else []), dtype=dtype)


def distance(y, z):
    return float((y.log() - z.log()).abs().max())


def most(cell):
    """Largest distance of two values of the cell."""
    return math.log1p(math.exp(cell.shift))


def check_rate(cell, x, starts):
    """Check both documented bounds from each of the starts."""
    expected = cell.initial_state(x)
    for _ in range(500):
        expected = cell(expected, x)
    assert distance(cell(expected, x), expected) <= EPS
    for z in starts:
        for k in range(1, 60):
            before, z = z, cell(z, x)
            assert distance(z, expected) <= cell.degree ** (k - 1) * most(cell) + EPS
            if k > 1:
                assert distance(cell(z, x), z) <= cell.degree * distance(z, before) + EPS


@torch.no_grad()
@every_kind
@pytest.mark.parametrize("degree", [0.05, DEGREE])
@pytest.mark.parametrize("weights", ["initial", "zero", "tiny", "large", "huge", "any scale", "sparse"])
def test_all_starts_lead_to_one_fixed_point_at_the_documented_rate(kernel_size, degree, weights):
    cell, x = cell_of(kernel_size, weights, degree=degree), inputs(kernel_size)
    start = cell.initial_state(x)
    scales = (1e-300, 1e-3, 1.0, 1e6)
    check_rate(cell, x, [start, start - 1e300, *(scale * torch.randn_like(start) for scale in scales)])


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
    z = torch.full((1, 1), 1 / (1 + DEGREE), dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda z: cell(z, torch.zeros_like(z)), z)
    assert_close(cell(z, torch.zeros_like(z)), z, EPS)
    assert_close(jacobian.flatten(), torch.full((1,), DEGREE, dtype=torch.float64), EPS)


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
@pytest.mark.parametrize("solver", [Picard(1e-12, 400), Anderson(1e-12, 100), Broyden(1e-12, 100)], ids=str)
def test_all_solvers_find_the_fixed_point(kernel_size, solver):
    cell, x = cell_of(kernel_size), inputs(kernel_size)
    expected = DEQBlock(cell, TIGHT)(x)
    condition = amplification(lambda z: cell(z, x), expected)
    assert_close(DEQBlock(cell, solver)(x), expected, after_solve(1e-12, condition))


@every_kind
@pytest.mark.parametrize("adjoint", [Implicit(TIGHT), Neumann(200)], ids=lambda adjoint: type(adjoint).__name__)
def test_gradients_against_finite_differences(kernel_size, adjoint):
    block = DEQBlock(SubhomogeneousCell(2, 2, kernel_size, dtype=torch.float64), TIGHT, adjoint)
    names, parameters = zip(*block.named_parameters(), strict=True)
    x = torch.randn(2, 2, *([2, 1] if kernel_size else []), dtype=torch.float64, requires_grad=True)

    def value(x, *parameters):
        return functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    assert len(parameters) == 3
    assert torch.autograd.gradcheck(value, (x, *parameters), **FINITE_DIFFERENCES)


@pytest.mark.parametrize("size", [(1, 1), (3, 4), (5, 2)])
def test_a_convolution_is_the_connected_cell_of_its_matrix(size):
    cell, x = SubhomogeneousCell(3, 2, 3, dtype=torch.float64), torch.randn(4, 3, *size, dtype=torch.float64)
    n = math.prod(size)
    matrices = [
        F.conv2d(torch.eye(c * n, dtype=torch.float64).view(-1, c, *size), weight, padding=1).flatten(1).T
        for c, weight in ((2, cell.A), (3, cell.injection.weight))
    ]
    other = SubhomogeneousCell(3 * n, 2 * n, dtype=torch.float64)
    bias = cell.injection.bias.repeat_interleave(n)
    other.load_state_dict({"A": matrices[0], "injection.weight": matrices[1], "injection.bias": bias})
    assert_close(DEQBlock(cell, TIGHT)(x).flatten(1), DEQBlock(other, TIGHT)(x.flatten(1)), EPS)


@every_kind
def test_exports_compiled_cells_copies_and_empty_batches(kernel_size):
    block, x = (
        DEQBlock(cell_of(kernel_size, dtype=torch.float32), Picard(1e-4, 100)).eval(),
        inputs(kernel_size).float(),
    )
    z, close = block(x), rounding(torch.float32)
    assert_close(torch.export.export(block, (x,)).module()(x), z, close)
    compiled = torch.compile(block.cell, fullgraph=True, backend="eager")
    assert_close(compiled(z, x), block.cell(z, x), close)
    for duplicate in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(duplicate(x), z)
    assert block(x[:0]).shape == z[:0].shape
    half = copy.deepcopy(block).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16 and half.isfinite().all()
