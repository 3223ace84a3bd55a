"""MonotoneCell: its only fixed point, found by both splittings and all solvers, and its gradients."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from correctness import FINITE_DIFFERENCES, GRADIENT, after_solve, amplification, assert_close, rounding
from torch.func import functional_call

from deqfast import Anderson, Broyden, DEQBlock, Implicit, MonotoneCell, Picard, Unrolled
from deqfast.cells.monotone import SPLITTINGS, norm_bound

EYE = torch.eye(12, dtype=torch.float64)
SOLVERS = [Picard(1e-12, 4000), Anderson(1e-12, 400), Broyden(1e-12, 400)]
TIGHT = SOLVERS[2]
every_splitting = pytest.mark.parametrize("splitting", SPLITTINGS)
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)


def cell_of(splitting="peaceman-rachford", scale=1.0, **options):
    """Cell in float64 whose A and B are `scale` times those that a cell begins with."""
    cell = MonotoneCell(3, 12, splitting, dtype=torch.float64, **options)
    with torch.no_grad():
        cell.A.mul_(scale)
        cell.B.mul_(scale)
    return cell


def inputs(batch=5):
    return torch.randn(batch, 3, dtype=torch.float64)


@every_splitting
@every_solver
def test_all_find_the_one_fixed_point_from_anywhere(splitting, solver):
    cell, x = cell_of(splitting, scale=2.0), inputs()
    other = MonotoneCell(3, 12, next(s for s in SPLITTINGS if s != splitting), dtype=torch.float64)
    other.load_state_dict(cell.state_dict())
    expected = DEQBlock(other, TIGHT)(x)
    assert expected.any()
    condition = max(amplification(lambda z, f=f: f(z, x), expected) for f in (cell, other))
    for z0 in (None, *(10 * torch.randn(3, 5, 12, dtype=torch.float64))):
        z = DEQBlock(cell, solver)(x, z0)
        assert_close(z, expected, after_solve(1e-12, condition))
        once = torch.relu(z @ cell.weight.T + cell.injection(x))
        steepest = float(torch.linalg.matrix_norm(cell.weight.detach(), 2))
        assert_close(once, z, after_solve(1e-12, condition) * (1 + steepest))


def test_the_weight_is_that_of_the_paper():
    cell = cell_of(margin=0.3)
    assert_close(cell.weight, 0.7 * EYE - cell.A.T @ cell.A + cell.B - cell.B.T, rounding(torch.float64))


@every_splitting
def test_alpha_is_the_step(splitting):
    """From zeros it gives relu(alpha c), or V (2 relu(alpha c))."""
    cell, x = cell_of(splitting, alpha=0.1), inputs()
    value = cell(torch.zeros(5, 12, dtype=torch.float64), x)
    if splitting == "peaceman-rachford":
        value = value @ (EYE + 0.1 * (EYE - cell.weight)).T / 2
    assert_close(value, torch.relu(0.1 * cell.injection(x)), rounding(torch.float64))


@every_splitting
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_contracts_at_the_documented_rate(splitting, scale):
    cell, margin = cell_of(splitting, scale, margin=0.5), 0.5
    operator = (EYE - cell.weight).detach()
    bound, x = norm_bound(operator).item(), inputs(1).expand(200, 3)
    a, b = torch.randn(2, 200, 12, dtype=torch.float64)
    before, after = a - b, cell(a, x) - cell(b, x)
    rate = (1 - (margin / bound) ** 2) ** 0.5
    if splitting == "peaceman-rachford":  # in the norm of V^-1 z
        before, after = (d @ (EYE + operator / bound).T for d in (before, after))
        rate = ((bound - margin) / (bound + margin)) ** 0.5
    assert (after.norm(dim=1) <= (rate + 1e-9) * before.norm(dim=1)).all()


@pytest.mark.parametrize("features", [1, 2, 64])
@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
def test_norm_bound(features, factor):
    matrix, room = factor * torch.randn(features, features), 1 + rounding(torch.float32)
    ratio = float(norm_bound(matrix) / torch.linalg.matrix_norm(matrix, 2))
    assert 1 / room <= ratio <= features ** (1 / 64) * room


@every_splitting
@pytest.mark.parametrize("alpha", [None, 0.1])
@pytest.mark.parametrize("adjoint", [Implicit(TIGHT), Unrolled(60)], ids=str)
def test_gradients_against_finite_differences(splitting, alpha, adjoint):
    """In x, A, B, U and b; the default alpha moves with A and B."""
    block = DEQBlock(MonotoneCell(2, 3, splitting, alpha=alpha, dtype=torch.float64), TIGHT, adjoint, warn=False)
    names, parameters = zip(*block.named_parameters(), strict=True)
    x = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)

    def value(x, *parameters):
        return functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    assert len(parameters) == 4 and value(x, *parameters).any()
    assert torch.autograd.gradcheck(value, (x, *parameters), **FINITE_DIFFERENCES)


@every_splitting
def test_matrices_are_computed_once_per_call(splitting, monkeypatch):
    block, calls = DEQBlock(cell_of(splitting), TIGHT, "implicit", warn=False), []
    compute = block.cell.matrices.compute
    monkeypatch.setattr(block.cell.matrices, "compute", lambda: calls.append(1) or compute())
    block(inputs()).sum().backward()
    assert len(calls) == 1


def test_matrices_are_computed_once_per_exported_solve():
    block, x = DEQBlock(cell_of(), Picard(1e-6, 20), warn=False).eval(), inputs()
    program = torch.export.export(block, (x,))
    assert sum(node.target is torch.ops.aten.linalg_inv_ex.default for node in program.graph.nodes) == 1
    assert_close(program.module()(x), block(x), rounding(torch.float64))


def test_identity_against_the_direct_solution():
    x = inputs()
    for splitting, solver in (("peaceman-rachford", TIGHT), ("forward-backward", SOLVERS[0])):  # and in one launch
        cell = cell_of(splitting, activation="identity", bias=False)
        expected = torch.linalg.solve(EYE - cell.weight, cell.injection(x).T).T
        assert_close(DEQBlock(cell, solver)(x), expected, GRADIENT)


@every_splitting
def test_half_precision_and_copies(splitting):
    cell = MonotoneCell(3, 8, splitting, dtype=torch.bfloat16)
    x = torch.randn(4, 3, dtype=torch.bfloat16)
    z = DEQBlock(cell, Picard(1e-2, 200))(x)
    assert z.dtype == torch.bfloat16 and torch.isfinite(z).all()
    for duplicate in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert torch.equal(DEQBlock(duplicate, Picard(1e-2, 200))(x), z)
