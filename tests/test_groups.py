"""Samples of several rows: coupled rows are judged, accelerated and frozen together, in the solve and its gradient."""

from __future__ import annotations

import pytest
import torch
from correctness import FINITE_DIFFERENCES, after_solve, assert_close, bounds, lost
from harness.counters import count
from own_sums import product
from solutions import SOLVERS

from deqfast import JFB, SHINE, Anderson, Broyden, DEQBlock, Groups, Implicit, Status, Unrolled, solve

GROUPS = torch.tensor([2, 0, 0, 1, 2, 2, 0])  # neither in order nor equally long
TIGHT = Broyden(rtol=1e-13, max_iter=60)


def graph(groups: torch.Tensor, dtype: torch.dtype = torch.float64):
    """Mixing matrix (N, N) of norm below 1 within the samples, and injection (N, 3)."""
    generator = torch.Generator().manual_seed(0)
    n = len(groups)
    mixing = torch.rand(n, n, generator=generator, dtype=torch.float64) * (groups[:, None] == groups)
    mixing *= 0.8 / torch.linalg.matrix_norm(mixing, 2)
    return mixing.to(dtype), torch.randn(n, 3, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_sample_of_several_rows_is_solved_as_by_itself(name, kernel, device):
    mixing, x = (t.to(device) for t in graph(GROUPS))
    solver = SOLVERS[name](rtol=1e-4, max_iter=30)
    groups = GROUPS.to(device)
    together = solve(lambda z: torch.tanh(mixing @ z + x), torch.zeros_like(x), solver, kernel, groups=groups)
    assert together.status.tolist() == [Status.CONVERGED] * 3 and together.residual.shape == (3,)
    for number in range(3):
        rows = groups == number
        part, injection = mixing[rows][:, rows], x[rows]
        alone = solve(
            lambda z, part=part, injection=injection: torch.tanh(part @ z + injection),
            torch.zeros_like(injection),
            solver,
            kernel,
            groups="batch",
        )
        assert alone.iterations.tolist() == [together.iterations[number]]
        allowed = after_solve(lost(torch.float64, solver.tol), 1 / (1 - 0.8))
        assert_close(together.value[rows], alone.value, allowed)


def test_a_sample_without_rows_and_a_batch_without_samples():
    solution = solve(torch.cos, torch.zeros(3, 2), groups=torch.tensor([0, 2, 2]))
    assert solution.status.tolist() == [Status.CONVERGED] * 3 and solution.iterations.tolist()[1] == 1
    for groups in ("batch", torch.zeros(0, dtype=torch.int64)):
        several = solve(lambda z: z, (torch.zeros(0, 2), torch.zeros(0, 3)), groups=groups).value
        assert [part.shape for part in several] == [(0, 2), (0, 3)]
        solution = solve(torch.cos, torch.zeros(0, 2), groups=groups)
        assert solution.status.shape == (0,) and solution.value.shape == (0, 2)


class TestGradient:
    @pytest.mark.parametrize("groups", [GROUPS, "batch"], ids=["ragged", "batch"])
    def test_against_finite_differences(self, groups):
        mixing, x = (t.requires_grad_() for t in graph(GROUPS))

        def layer(x, mixing):
            block = DEQBlock(lambda z, x: torch.tanh(mixing @ z + x), TIGHT, Implicit(TIGHT))
            return block(x, groups=groups)

        assert torch.autograd.gradcheck(layer, (x, mixing), **FINITE_DIFFERENCES)

    @pytest.mark.parametrize("adjoint", [JFB(), Implicit(TIGHT), SHINE()])
    def test_a_broken_sample_leaves_no_trace(self, adjoint):
        mixing, x = graph(GROUPS)
        x[3] = torch.nan  # all of sample 1
        x.requires_grad_()
        scale = torch.ones((), dtype=x.dtype, requires_grad=True)
        block = DEQBlock(lambda z, x: torch.tanh(mixing @ z + scale * x), TIGHT, adjoint, warn=False)
        z, solution = block(x, z0=torch.zeros_like(x), groups=GROUPS, return_solution=True)
        assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]
        x_grad, scale_grad = torch.autograd.grad(z.sum(), (x, scale))
        assert torch.isfinite(scale_grad) and not x_grad[3].any() and x_grad[[0, 1, 2, 4, 5, 6]].all()


def test_groups_of_the_block_serve_every_call():
    mixing, x = graph(torch.zeros(6, dtype=torch.int64), torch.float32)

    class Mixed(torch.nn.Module):
        def forward(self, z, x):
            return torch.tanh(product(z.mT, mixing).mT + x)

    options = {"solver": Anderson(max_iter=6), "kernel": "torch", "warn": False}  # an export holds all evaluations
    expected, solution = DEQBlock(Mixed(), **options)(x, groups="batch", return_solution=True)
    block = DEQBlock(Mixed(), **options, groups="batch")
    calls = [block, torch.compile(block, backend="eager", fullgraph=True), lambda x: block.trajectory(x, [1])[-1]]
    calls += [torch.export.export(block.eval(), (x,)).module()]
    assert len(solution.status) == 1 and all(torch.equal(call(x), expected) for call in calls)
    ordinary = DEQBlock(Mixed(), "anderson")(x, return_solution=True)[1]
    assert len(ordinary.status) == 6
    assert len(block(x, groups=torch.arange(6), return_solution=True)[1].status) == 6


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([0, 1], TypeError, r"groups must be None, 'batch' or a tensor of integers, got \[0, 1\]"),
        ("whole", TypeError, "got 'whole'"),
        (torch.zeros(3), TypeError, "got a tensor of torch.float32"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"groups must have shape \(3,\) on cpu, .* got \(2,\) on cpu"),
        (torch.tensor([0, -1, 0]), ValueError, "from 0 to below its length 3, got -1"),
        (torch.tensor([0, 3, 0]), ValueError, "got 3"),
        (Groups(GROUPS), ValueError, "groups of 7 rows on cpu cannot serve a z0 of 3 rows"),
        (Groups("batch", 7), ValueError, "groups of 7 rows on cpu cannot serve a z0 of 3 rows"),
    ],
)
def test_bad_groups(groups, error, message):
    with pytest.raises(error, match=message):
        solve(torch.cos, torch.zeros(3, 2), groups=groups)


@pytest.mark.parametrize("adjoint", [JFB(), Implicit(Broyden(rtol=1e-30, max_iter=5)), SHINE(), Unrolled()])
def test_groups_made_once_wait_for_nothing(adjoint):
    """A call with them waits no more often than one without; ragged ones that are made again wait three times."""
    mixing, x = graph(GROUPS)
    block = DEQBlock(lambda z, x: torch.tanh(mixing @ z + x), Broyden(rtol=1e-30, max_iter=5), adjoint, warn=False)
    x.requires_grad_()
    made = Groups(GROUPS)

    def waits(groups):
        def step(f):
            return torch.autograd.grad(block(x, groups=groups).sum(), x)

        return count(step, lambda: None, "cpu").host_waits

    none, once, again = (waits(groups) for groups in (None, made, GROUPS))
    assert none == once < again


class TestInconsistency:
    """Samples that a solve takes for converged are judged again by the evaluation for the gradient."""

    @pytest.mark.parametrize("adjoint", ["jfb", "implicit", "phantom", "shine"])
    def test_coupled_rows(self, adjoint):
        mixing, x = graph(torch.zeros(300, dtype=torch.int64), torch.float32)
        block = DEQBlock(lambda z, x: torch.tanh(1.2 * mixing @ z + x), Anderson(rtol=1e-3), adjoint)
        with pytest.warns(UserWarning, match=r"forward solve, .*\d+ samples INCONSISTENT: pass groups= .* warn=False"):
            _, solution = block(x.requires_grad_(), return_solution=True)
        assert Status.INCONSISTENT in solution.status.tolist()
        _, solution = block(x, groups="batch", return_solution=True)
        assert solution.status.tolist() == [Status.CONVERGED]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("absolute", [False, True])
    def test_nothing_is_said_of_a_cell_that_keeps_its_promise(self, dtype, absolute, recwarn):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        solver = Broyden(**bounds(1e-2 if dtype == torch.bfloat16 else 1e-6, absolute), max_iter=30)
        _, solution = DEQBlock(lambda z, x: torch.tanh(0.5 * z + x), solver)(x, return_solution=True)
        assert solution.converged.all() and not recwarn.list
