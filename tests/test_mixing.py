"""Anderson with the caller's own errors and proposals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from correctness import GRADIENT, after_solve, amplification, assert_close, rounding
from solutions import assert_same_solution

from deqfast import Anderson, DEQBlock, Implicit, LinearCell, MixedAnderson, Picard, Status, solve


class Map:
    """tanh(W z) + b of B samples of D numbers, each with its own W; the first is the steepest."""

    def __init__(self, batch=3, dim=12, device="cpu"):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(batch, dim, dim, dtype=torch.float64, generator=generator)
        rates = torch.tensor([1.5, 0.9, 0.2, 0.6, 0.3][:batch], dtype=torch.float64)
        weight = rates[:, None, None] * weight / torch.linalg.matrix_norm(weight, 2)[:, None, None]
        bias = torch.randn(batch, dim, dtype=torch.float64, generator=generator)
        self.weight, self.bias = weight.to(device), bias.to(device)
        self.start = torch.zeros_like(self.bias)

    def __call__(self, z, rows=slice(None)):
        rows = slice(None) if rows is None else rows
        return torch.tanh((self.weight[rows] @ z[..., None])[..., 0]) + self.bias[rows]


class Recorded:
    """A `mixing_fn` with 20 numbers of error a sample and a preconditioner, which keeps what it saw and returned."""

    def __init__(self, device, dim=12):
        generator = torch.Generator().manual_seed(1)
        self.metric = torch.randn(dim, 4, 5, dtype=torch.float64, generator=generator).to(device)
        self.preconditioner = torch.linspace(0.5, 1.0, dim, dtype=torch.float64, device=device)
        self.seen = self.error, self.z, self.proposal = [], [], []

    def __call__(self, z, fz, rows=None):
        error = torch.einsum("bd,dij->bij", fz - z, self.metric)
        proposal = z + self.preconditioner * (fz - z)
        for kept, rows in zip(self.seen, (error.flatten(1), z, proposal), strict=True):
            kept.append(rows.clone().cpu())
        return error, proposal


def pulay(errors, targets):
    """Next iterate of a sample by Pulay's equations, from rows (n, E) and (n, D), and the condition of the errors."""
    # In the plane sum c_i = 1, by orthogonal factors instead of normal equations.
    differences = (errors[1:] - errors[:-1]).T
    gamma = torch.linalg.lstsq(differences, errors[-1:].T, driver="gelsd").solution
    lengths = differences.norm(dim=0)
    values = torch.linalg.svdvals(differences / lengths)
    return targets[-1] - (targets[1:] - targets[:-1]).T @ gamma[:, 0], float(values[0] / values[-1])


@pytest.mark.parametrize(("relaxation", "history"), [(1.0, 2), (0.7, 5)])
def test_every_step_is_pulays(relaxation, history, kernel, device):
    f, mixing = Map(device=device), Recorded(device)
    solver = MixedAnderson(1e-3, 9, history_size=history, relaxation=relaxation, ridge=0.0, mixing_fn=mixing)
    ends = solve(f, f.start, solver, kernel).iterations.tolist()
    compared = frozen = 0
    for k in range(1, len(mixing.z) - 1):
        kept = slice(max(0, k - history), k + 1)
        for i in range(len(f.start)):
            found = mixing.z[k + 1][i]
            if k + 1 >= ends[i]:
                assert torch.equal(found, mixing.z[k][i])
                frozen += 1
                continue
            errors, z, proposal = (torch.stack([rows[i] for rows in kind[kept]]) for kind in mixing.seen)
            expected, condition = pulay(errors, z + relaxation * (proposal - z))
            # Normal equations square the condition number.
            bound = rounding(torch.float64, errors.numel()) * condition**2 * float(z.norm())
            assert (found - expected).norm() <= bound < 1e-6
            compared += 1
    assert compared >= 12 and frozen


@pytest.mark.parametrize("relaxation", [1.0, 0.5])
def test_with_the_residual_it_is_anderson(relaxation):
    f = Map()
    plain = solve(f, f.start, Anderson(1e-10, 60, relaxation=relaxation), "torch", trace=True)
    solver = MixedAnderson(1e-10, 60, relaxation=relaxation, mixing_fn=lambda z, fz: (fz - z, fz))
    mixed = solve(f, f.start, solver, trace=True)
    assert plain.converged.all() and mixed.converged.all()
    # The ridge bounds the condition number of the normal equations by 1e6; the first steps have few pairs.
    torch.testing.assert_close(mixed.trace[:6], plain.trace[:6], rtol=6 * 1e6 * rounding(torch.float64), atol=0.0)
    slope = 1 / (1 - 0.9)  # of the two contractions
    gap = (mixed.value - plain.value).norm(dim=1) / plain.value.norm(dim=1)
    assert (gap[1:] <= 2 * slope * 1e-10).all()


def test_samples_that_are_done_leave_the_batch():
    f = Map(batch=5)
    sizes = []

    def mixing(z, fz, rows=None):
        sizes.append((len(z), None if rows is None else len(rows)))
        metric = f.weight if rows is None else f.weight[rows]
        return ((fz - z)[:, None] @ (metric + torch.eye(12, dtype=torch.float64)))[:, 0], fz

    solver = MixedAnderson(1e-8, 60, mixing_fn=mixing)
    whole = solve(f, f.start, solver)
    assert sizes == [(5, None)] * len(sizes)
    sizes.clear()
    compact = solve(f, f.start, solver, drop_converged=True)
    assert_same_solution(compact, whole, but=("sample_evaluations",))
    assert sizes[0] == (5, None) and sizes[-1][0] == sizes[-1][1] < 5


def test_gradients_do_not_depend_on_it():
    cell, x = LinearCell(6).double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    mixed = MixedAnderson(1e-10, 60, mixing_fn=lambda z, fz: ((fz - z) * torch.arange(1.0, 7.0), fz))
    gradients = []
    for solver in (Anderson(1e-10, 60), mixed):
        block = DEQBlock(cell, solver, Implicit(Anderson(1e-10, 100)))
        gradients.append(torch.autograd.grad(block(x).square().sum(), x)[0])
        compiled = torch.compile(block, backend="eager", fullgraph=True)
        assert_close(compiled(x), block(x), GRADIENT)
    condition = amplification(lambda z: cell(z, x), torch.zeros(4, 6, dtype=torch.float64))
    assert_close(*gradients, after_solve(1e-10, condition, derivatives=1))


def test_a_proposal_that_is_not_finite_ends_its_sample():
    f = Map()

    def mixing(z, fz):
        spoiled = torch.where(torch.arange(3)[:, None] == 1, torch.nan, fz)
        return fz - z, spoiled if (fz - z)[1].norm() < 0.1 else fz

    solver = MixedAnderson(1e-6, 60, mixing_fn=mixing)
    found, plain = solve(f, f.start, solver), solve(f, f.start, replace(solver, mixing_fn=lambda z, fz: (fz - z, fz)))
    assert found.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED] and plain.converged.all()
    assert torch.equal(found.value[::2], plain.value[::2]) and found.value.isfinite().all()


WRONG = [
    (lambda z, fz: fz - z, TypeError, r"must return a tuple \(error, proposal\), got Tensor"),
    (
        lambda z, fz: (None, fz),
        ValueError,
        "error must be a floating-point or complex tensor with numbers in each of its 3 rows, on cpu, got NoneType",
    ),
    (lambda z, fz: ((fz - z).sum(0), fz), ValueError, r"its 3 rows, on cpu, got torch.float64 \(12,\) on cpu"),
    (lambda z, fz: ((fz - z)[:, :0], fz), ValueError, r"got torch.float64 \(3, 0\) on cpu"),
    (lambda z, fz: ((fz - z).to("meta"), fz), ValueError, r"got torch.float64 \(3, 12\) on meta"),
    (lambda z, fz: ((fz - z).to_sparse(), fz), TypeError, "mixing_fn's error must be dense"),
    (
        lambda z, fz: (fz[:, : 3 if z.any() else 2], fz),
        ValueError,
        "must keep its 2 numbers per sample, got 3 at call 2",
    ),
    (lambda z, fz: (fz - z, fz[:, :3]), ValueError, r"mixing_fn's proposal .* whose place it takes: .* got \(3, 3\)"),
    (lambda z, fz: (fz.sub_(z), z), ValueError, "must not modify its arguments"),
]


@pytest.mark.parametrize(("mixing_fn", "kind", "said"), WRONG)
def test_a_wrong_function_is_told(mixing_fn, kind, said):
    f = Map()
    with pytest.raises(kind, match=said):
        solve(f, f.start, MixedAnderson(mixing_fn=mixing_fn))


def test_wrong_settings_are_told():
    with pytest.raises(TypeError, match="mixing_fn must be callable, got 3"):
        MixedAnderson(mixing_fn=3)
    with pytest.raises(ValueError, match="history_size must be at least 1, got 0"):
        MixedAnderson(history_size=0, mixing_fn=lambda z, fz: (fz - z, fz))
    for name in ("relaxation", "ridge"):
        with pytest.raises(ValueError, match=f"{name} must be finite .*, got -1"):
            MixedAnderson(**{name: -1}, mixing_fn=lambda z, fz: (fz - z, fz))
    with pytest.raises(ValueError, match="must not be MixedAnderson"):
        Implicit(MixedAnderson(mixing_fn=lambda z, fz: (fz - z, fz)))


@pytest.mark.parametrize("mixes", [False, True], ids=["Picard", "MixedAnderson"])
def test_positions_as_samples_keep_a_causal_cell_causal(mixes, kernel, device):
    """Earlier positions are independent of later tokens, to the bit if the kernel keeps samples apart to the bit."""
    batch, length, width = 2, 6, 3
    x = torch.randn(batch, length, width, dtype=torch.float64, device=device)
    later = torch.cat([x[:, :3], torch.full_like(x[:, 3:], 1.5)], dim=1)
    up_to = torch.ones(length, length, dtype=x.dtype, device=device).tril()[None, :, :, None]

    def solved(tokens, flat):
        def f(z):
            z = z.view(batch, length, width)
            past = torch.stack([z[:, : t + 1].sum(1) / (t + 1) for t in range(length)], dim=1)
            return torch.sin(0.4 * z + 0.4 * past.flip(-1) + tokens).view(flat)

        def errors(z, fz):
            return (up_to * (fz - z).view(batch, 1, length, width)).reshape(batch * length, -1), fz

        solver = Anderson(1e-2, 30) if mixes else Picard(1e-2, 30)
        if mixes and len(flat) == 2:
            solver = MixedAnderson(1e-2, 30, mixing_fn=errors)
        solution = solve(f, torch.zeros(flat, dtype=x.dtype, device=device), solver, kernel)
        assert (solution.status == Status.CONVERGED).all()
        return solution.value.view(x.shape)[:, :3]

    rows, sequences = (batch * length, width), tuple(x.shape)
    gap = (solved(x, rows) - solved(later, rows)).abs().max()
    assert gap <= (0 if kernel != "torch" else rounding(x.dtype) * length)
    assert (solved(x, sequences) - solved(later, sequences)).abs().max() > 1e-4
