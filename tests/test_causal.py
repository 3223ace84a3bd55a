"""Causal solves: no position of a sequence depends on a later one, and each sequence is solved as well as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from correctness import assert_close
from solutions import SOLVERS, Recorder
from torch import Tensor, nn
from torch.nn.functional import softplus

from deqfast import Anderson, Broyden, DEQBlock, Picard, Status, solve
from deqfast.solution import Solution

B, T, D = 4, 24, 32
MASK = nn.Transformer.generate_square_subsequent_mask(T)


class Block(nn.TransformerEncoderLayer):
    """A pre-norm block with causal attention."""

    def __init__(self) -> None:
        super().__init__(D, 2, 2 * D, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, z: Tensor) -> Tensor:  # type: ignore[override]  # the mask is its own
        return super().forward(z, MASK[: z.shape[1], : z.shape[1]], is_causal=True)


class Parcae(nn.Module):
    """A looped block with the structure of Parcae: a state that decays, and an injection of x.

    Source: github.com/sandyresearch/parcae, parcae_lm/modules/injection.py, read in November 2026.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block, self.rate, self.bias = Block(), nn.Parameter(torch.zeros(D)), nn.Parameter(torch.full((D,), 0.6))
        self.into = nn.Parameter(torch.eye(D))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        step = softplus(self.bias)
        return self.block(z * torch.exp(-step * self.rate.exp()) + step * (x @ self.into.T))


def parcae() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return Parcae(), torch.randn(B, T, D)


BUILT = pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)


@BUILT
@pytest.mark.parametrize("solver", SOLVERS)
def test_nothing_leaks(solver, kernel):
    """Not a bit, also at a large tolerance, at which positions end at different times."""
    cell, x = parcae()
    for tol in (1e-2, 1e-4):
        block = DEQBlock(cell, SOLVERS[solver](tol, 30), causal=True, kernel=kernel, warn=False)
        with torch.no_grad():
            z, solution = block(x, return_solution=True)
            assert solution.position_iterations.shape == (B, T)
            for first in (T - 1, T // 2, 1):
                other = x.clone()
                other[:, first:] = 3 * torch.randn(B, T - first, D)
                later, changed = block(other, return_solution=True)
                assert torch.equal(later[:, :first], z[:, :first])
                assert torch.equal(changed.position_iterations[:, :first], solution.position_iterations[:, :first])
                assert not torch.equal(later[:, first:], z[:, first:])


@pytest.mark.parametrize("norm", ["euclidean", "max"])
@pytest.mark.parametrize("solver", SOLVERS)
@BUILT
def test_a_converged_sequence_meets_the_tolerance_at_its_value(solver, norm, kernel):
    cell, x = parcae()
    order = 2 if norm == "euclidean" else torch.inf
    for tol in (1e-2, 1e-3):
        options = {"adjoint": "implicit", "causal": True, "kernel": kernel}
        z, solution = DEQBlock(cell, SOLVERS[solver](tol, 40, norm=norm), **options)(x, return_solution=True)
        with torch.no_grad():
            value = cell(z, x)
            gap, size = (torch.linalg.vector_norm(v.flatten(1), order, dim=1) for v in (value - z, value))
        assert bool(solution.converged.all() and (gap / size <= tol * (1 + 1e-4)).all())
        assert_close(solution.residual, gap / size, 1e-4)
        ends = solution.position_iterations
        assert torch.equal(solution.iterations, ends[:, -1]) and bool((ends.diff(dim=1) >= 0).all())


@pytest.mark.parametrize("solver", [Anderson, Broyden])
def test_order_costs_at_most_two_evaluations(solver):
    cell, x = parcae()
    for tol in (1e-2, 1e-3, 1e-4):
        ordered, free = (
            DEQBlock(cell, solver(tol, 60), causal=causal)(x, return_solution=True)[1] for causal in (True, False)
        )
        assert bool(ordered.converged.all()) and ordered.evaluations <= free.evaluations + 2


@pytest.mark.parametrize(
    "solver", [Picard(1e-6, 60, relaxation=0.9), Anderson(1e-6, 60), Broyden(1e-6, 60, history_size=9)]
)
@BUILT
def test_sequences_of_one_position_are_samples(solver, kernel):
    torch.manual_seed(0)
    weight, x = 0.9 * torch.linalg.qr(torch.randn(D, D))[0], torch.randn(B, D) * torch.logspace(-25, 3, B)[:, None]
    x[2], start = 0, torch.zeros(B, D)  # a sample that is at its fixed point
    expected = solve(lambda z: torch.tanh(z @ weight) + x, start, solver, kernel, trace=True)
    solution = solve(
        lambda z: torch.tanh(z @ weight) + x[:, None], start[:, None], solver, kernel, causal=True, trace=True
    )
    assert torch.equal(solution.value[:, 0], expected.value)
    assert torch.equal(solution.status, expected.status) and torch.equal(solution.iterations, expected.iterations)
    for name in ("residual", "residual_abs", "trace", "trace_abs"):  # norms as roots of a kernel's sums of D squares
        rounding = 0 if kernel == "torch" else D * torch.finfo(x.dtype).eps
        assert_close(getattr(solution, name), getattr(expected, name), rounding)


def test_unfinished_positions_have_the_best_iterate_of_their_prefix():
    """Later positions run away; the residual of their prefix first falls, because earlier positions converge."""
    slope, x = torch.linspace(0.1, 1.3, 8)[:, None], torch.ones(2, 8, 4)
    f = Recorder(lambda z: slope * z + x)
    solution = solve(f, torch.zeros(2, 8, 4), Picard(1e-3, 20), causal=True)
    ended = solution.position_iterations[0] < 20
    assert solution.status.tolist() == [Status.MAX_ITER] * 2 and 0 < int(ended.sum()) < 8
    lengths = torch.stack(
        [(v - z).square().sum(2).cumsum(1).sqrt() for z, v in zip(f.arguments, f.values, strict=True)]
    )
    best = lengths.argmin(dim=0)
    assert 0 < int(best[0, -1]) < 19
    expected = torch.stack(f.arguments).gather(0, best[None, :, :, None].expand(1, 2, 8, 4))[0]
    assert torch.equal(solution.value[:, ~ended], expected[:, ~ended])
    assert torch.equal(solution.value[:, ended], f.arguments[-1][:, ended])


@BUILT
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_position_that_breaks_down_ends_the_later_ones_only(solver, kernel):
    torch.manual_seed(0)
    x = torch.randn(3, 8, 4, dtype=torch.float64)

    def solved(x: Tensor) -> Solution:
        start, chosen = torch.zeros_like(x), SOLVERS[solver](1e-6, 60)
        return solve(lambda z: 0.9 * (z.cumsum(1) / 8).cos() + x, start, chosen, kernel, causal=True)

    expected = solved(x)
    x[1, 5] = torch.nan
    solution = solved(x)
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
    assert torch.equal(solution.value[:, :5], expected.value[:, :5]) and bool(solution.value.isfinite().all())
    assert solution.position_iterations[1, 5:].tolist() == [1, 1, 1]


def test_trees_keep_their_memory_order_and_scale():
    """A state of several tensors, one of which is stored features first, and another complex."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 5).transpose(2, 3), torch.randn(2, 6, dtype=torch.complex64)
    start = tuple(map(torch.zeros_like, x))

    def f(z: Any) -> Any:
        mean = z[0].mean(dim=(2, 3)).cumsum(1) / 6
        return 0.4 * z[0].tanh() + 0.1 * z[1].abs()[:, :, None, None] + x[0], 0.5 * z[1] + mean + x[1]

    solution = solve(f, start, Anderson(1e-6, 60), scale=(1.0, 2.0), causal=True)
    expected = solve(f, start, Anderson(1e-6, 60), scale=(1.0, 2.0))
    for a, b in zip(solution.value, expected.value, strict=True):
        assert_close(
            torch.view_as_real(a) if a.is_complex() else a, torch.view_as_real(b) if b.is_complex() else b, 1e-5
        )
        assert a.stride() == b.stride()


def test_a_cell_whose_front_leaves_the_batch():
    """The method of a cell, whose sequences have fronts of their own; it gets the values before."""
    slope = torch.linspace(0.1, 0.9, T)[:, None]

    class Cell:
        seen: list[int] = []

        def __call__(self, z: Tensor, x: Tensor) -> Tensor:
            return slope * (z.cumsum(1) / T).cos() + 0.1 * z + x

        def from_position(self, z: Tensor, x: Tensor, first: int, value: Tensor) -> Tensor:
            self.seen.append(first)
            whole = self(z, x)
            assert torch.equal(value, whole[:, :first])
            return whole[:, first:]

    x = torch.randn(B, T, D) * torch.linspace(0.1, 3, B)[:, None, None]
    cell, block = Cell(), DEQBlock(Cell(), Anderson(1e-4, 40), "implicit", causal=True)
    z, solution = block(x.requires_grad_(), return_solution=True)
    z.sum().backward()
    assert cell.seen and cell.seen == sorted(cell.seen)
    del Cell.from_position
    expected, whole = block(x, return_solution=True)
    assert torch.equal(z, expected) and torch.equal(solution.position_iterations, whole.position_iterations)
    assert solution.sample_evaluations == whole.sample_evaluations - B * sum(cell.seen)


def test_a_function_whose_front_leaves_the_batch():
    slope = torch.linspace(0.1, 0.9, T)[:, None]

    def f(z: Tensor, first: int = 0, value: Tensor | None = None) -> Tensor:
        calls.append(T - first)
        return (slope * (z.cumsum(1) / T).cos() + 0.1 * z)[:, first:]

    solutions = []
    for calls in ([], []):
        solutions.append(solve(f, torch.zeros(1, T, D), Anderson(1e-4, 40), causal=True))
        assert solutions[-1].sample_evaluations == sum(calls)
        f.from_position = f
    assert torch.equal(solutions[0].value, solutions[1].value) and sum(calls) < T * solutions[0].evaluations


@pytest.mark.parametrize("adjoint", ["jfb", "implicit", "neumann", "phantom"])
def test_gradients_are_those_of_whole_samples(adjoint):
    cell, x = parcae()
    both = []
    for causal in (True, False):
        x = x.detach().clone().requires_grad_()
        block = DEQBlock(cell, Anderson(1e-6, 60), adjoint, causal=causal)
        block(x).square().sum().backward()
        both.append(x.grad)
        assert adjoint != "implicit" or block.backward_solution.converged.all()
    assert_close(*both, 1e-2 if adjoint == "implicit" else 1e-4)


@pytest.mark.parametrize("kernel", ["triton"], indirect=True)
@pytest.mark.parametrize("solver", ["picard", pytest.param("anderson", marks=pytest.mark.tier("full"))])
def test_nothing_leaks_on_triton(solver, kernel, device):
    """A short solve, since it is interpreted without a GPU."""
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    changed = x.index_fill(1, torch.tensor([2, 3]), 2.0)

    def solved(x: Tensor, kernel: str, device: str) -> tuple[Tensor, Tensor]:
        x = x.to(device)
        chosen = SOLVERS[solver](1e-4, 12)
        solution = solve(lambda z: 0.8 * (z.cumsum(1) / 4).cos() + x, torch.zeros_like(x), chosen, kernel, causal=True)
        return solution.value.cpu(), solution.position_iterations.cpu()

    value, iterations = solved(x, kernel, device)
    expected, expected_iterations = solved(x, "torch", "cpu")
    assert torch.equal(iterations, expected_iterations)
    assert_close(value, expected, 1e-10)
    assert torch.equal(solved(changed, kernel, device)[0][:, :2], value[:, :2])


@pytest.mark.parametrize("kernel", ["torch", "cpp"])
def test_stalled_positions_keep_the_iterate_that_later_ones_are_judged_with(kernel):
    """Products in bfloat16 stall early positions; others then converge to the value that is returned."""
    torch.manual_seed(89)
    length, batch, size, tol = 16, 4, 8, 1e-3
    scale = torch.logspace(-2, 2, length)[torch.randperm(length)]
    past, weight = torch.randn(length, length).tril() / length**0.5, torch.linalg.qr(torch.randn(size, size))[0] * 0.9
    x, weight = (torch.randn(batch, length, size) * scale[:, None]).bfloat16(), weight.bfloat16().float()

    def f(z: Tensor) -> Tensor:  # its products in float32, which all processors round alike up to the last bits
        return (past @ z).bfloat16().tanh() * 0.3 + (z.bfloat16().float() @ weight).bfloat16() * 0.6 + x

    solution = solve(f, torch.zeros(batch, length, size), Picard(tol, 60), kernel, causal=True)
    value = f(solution.value).float()
    residual = (value - solution.value).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)
    assert bool((residual[solution.converged] <= tol * 1.001).all())  # sums of 128 numbers in float32


@pytest.mark.parametrize("solver", [Anderson(1e-3, 20), Broyden(1e-3, 20)], ids=str)
def test_autocast_of_the_caller_is_not_that_of_the_steps(solver):
    weight, x = torch.linalg.qr(torch.randn(8, 8))[0] * 0.9, torch.randn(3, 6, 8)

    def f(z: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return z @ weight + 0.02 * z.cumsum(dim=1) + x

    def solved(autocast: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return solve(f, torch.zeros(3, 6, 8), solver, "torch", causal=True).value

    assert torch.equal(solved(True), solved(False))


def test_norms_of_finite_positions_are_finite():
    solution = solve(lambda z: torch.full_like(z, 3e38), torch.zeros(1, 64, 4), Picard(1e-3, 10), "torch", causal=True)
    assert solution.converged.all()
