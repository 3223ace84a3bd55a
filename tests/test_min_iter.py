"""The least number of evaluations: no way of running a solve lets a sample converge or stall earlier."""

from dataclasses import replace

import pytest
import torch

import deqfast
from deqfast import Anderson, Auto, Broyden, DEQBlock, FCCell, Implicit, Picard, Status, fc_fixed_point, solve
from deqfast.testing import rounding

LEAST = 8
SLOPES = torch.tensor([[0.0], [0.2], [0.5], [0.9]])  # plain iteration needs 2 to 60 evaluations to 1e-3


on_cpu = pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)


def solvers(**settings):
    return [kind(1e-3, 100, **settings) for kind in (Picard, Anderson, Broyden)]


@pytest.mark.parametrize("solver", solvers(min_iter=LEAST), ids=lambda solver: type(solver).__name__)
def test_no_sample_converges_before(solver, kernel, device):
    slopes = SLOPES.to(device)

    def f(z):
        return slopes * z + 1

    solution = solve(f, torch.zeros(4, 3, device=device), solver, kernel)
    assert solution.converged.all() and solution.iterations.min() == LEAST
    gap = (f(solution.value) - solution.value).norm(dim=1)
    assert (gap <= 1e-3 * f(solution.value).norm(dim=1)).all()
    if isinstance(solver, Picard):  # the same iterates as without, only longer
        plain = solve(f, torch.zeros(4, 3, device=device), Picard(1e-3, 100), kernel)
        assert solution.iterations.tolist() == plain.iterations.clamp_min(LEAST).tolist()
        slow = plain.iterations >= LEAST
        assert slow.any() and torch.equal(solution.value[slow], plain.value[slow])


@pytest.mark.parametrize("solver", solvers(min_iter=LEAST), ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("rounding", [0.0, 1e-6])
@on_cpu
def test_a_start_at_the_fixed_point_converges(solver, rounding, kernel):
    """The first residual is zero. Rounding may make all later ones longer."""
    calls = []

    def f(z):
        calls.append(len(calls))
        return z * (1 + rounding) if len(calls) > 1 else z + 0

    solution = solve(f, torch.ones(4, 3), solver, kernel)
    assert solution.converged.all() and (solution.iterations == LEAST).all()


@on_cpu
def test_an_iterate_that_met_the_tolerance_earlier_does_not_count(kernel):
    """The third residual is zero and all later ones are 1; only a solve that ends there converges."""
    calls = []

    def f(z):
        calls.append(z.clone())
        return z if len(calls) == 3 else z + 1

    z0 = torch.full((1, 1), 10.0)
    solution = solve(f, z0, Picard(1e-3, 12, min_iter=LEAST), kernel)
    assert solution.status.tolist() == [Status.MAX_ITER] and len(calls) == 12
    assert solution.residual.item() == 0 and torch.equal(solution.value, calls[2])  # the best iterate is returned
    calls.clear()
    assert solve(f, z0, Picard(1e-3, 12, min_iter=3), kernel).converged.all() and len(calls) == 3


@on_cpu
def test_nan_and_the_own_rule_end_samples_before(kernel, device):
    weight = torch.tensor([[1.0], [torch.nan]], device=device)
    solution = solve(lambda z: weight * z / 2 + 1, torch.ones(2, 3, device=device), Picard(min_iter=15), kernel)
    assert solution.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert solution.iterations.tolist() == [15, 1]

    def rule(z, value, k):
        return torch.tensor([k == 4, False], device=device)

    solution = solve(lambda z: 0 * z + 1, torch.ones(2, 3, device=device), Picard(min_iter=9), kernel, stop_fn=rule)
    assert solution.status.tolist() == [Status.STOPPED, Status.CONVERGED] and solution.iterations.tolist() == [4, 9]


def test_blocks_functions_and_exports():
    """Cells with one launch take the loop; vmap, exports, trajectories and backward solves count too."""
    cell, x = FCCell(3, 8), torch.randn(4, 3)
    cell.fixed_point = lambda *_: pytest.fail("a cell's own solve knows no min_iter")
    solver = Picard(1e-2, 40, min_iter=20)
    for options in ({}, {"drop_converged": True}, {"kernel": "torch"}):
        block = DEQBlock(cell, solver, Implicit(Broyden(1e-6, 60, min_iter=25)), **options)
        z, solution = block(x, return_solution=True)
        assert solution.converged.all() and (solution.iterations == 20).all()
        z.sum().backward()
        assert block.backward_solution.converged.all() and block.backward_solution.iterations.min() == 25
    states = block.trajectory(x, at=[19, 20])
    assert not torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])
    mapped = torch.func.vmap(lambda x: block(x, return_solution=True)[1].iterations)(x[:, None])
    assert (mapped == 20).all()


@pytest.mark.parametrize("solver", solvers(min_iter=3), ids=lambda solver: type(solver).__name__)
@on_cpu
def test_exports(solver, kernel):
    class Solves(torch.nn.Module):
        def forward(self, x):

            def f(z):
                return torch.tensor([[0.0], [0.9]]) * torch.cos(z) + x

            solution = solve(f, torch.zeros_like(x), replace(solver, max_iter=6), kernel)
            return solution.value, solution.status, solution.iterations

    program, x = torch.export.export(Solves(), (torch.ones(2, 3),)), torch.tensor([[0.1, 1.0, 2.0]]).expand(2, 3)
    found, expected = program.module()(x), Solves()(x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert found[1][0] == Status.CONVERGED and found[2][0] == 3 and found[2][1] > 3


def test_one_launch_takes_the_loop(kernel, device):
    weight, c = 0.05 * torch.randn(8, 8, device=device), torch.randn(4, 8, device=device)
    solver = Picard(1e-2, 40, min_iter=20)
    calls = [fc_fixed_point]
    if kernel == "cpp":
        calls.append(torch.compile(fc_fixed_point, backend="eager", fullgraph=True))
    assert FCCell(3, 8).fixed_point(torch.randn(4, 3), torch.zeros(4, 8), solver, "auto") is None
    for call in calls:
        z, solution = call(weight, c, solver=solver, kernel=kernel)
        assert solution.converged.all() and (solution.iterations == 20).all()
        assert ((torch.tanh(z @ weight.T + c) - z).norm(dim=1) <= 20 * rounding(z.dtype) * z.norm(dim=1)).all()


@on_cpu
def test_a_sample_at_the_rounding_of_f_does_not_stall_before(kernel):
    def f(z):
        return (1.9 * torch.cos(z.float())).to(z.dtype)  # its iterates end on a cycle around the fixed point

    start = 0.1 + torch.rand(4, 64).to(torch.bfloat16)
    plain, late = (solve(f, start, Anderson(1e-6, 80, min_iter=least), kernel) for least in (1, 60))
    stalled = plain.status == Status.STALLED
    assert stalled.any() and plain.iterations[stalled].max() < 60
    assert late.iterations.min() >= 60 and not (late.residual > plain.residual).any()


def test_checks():
    for wrong, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="min_iter must be"):
            Picard(min_iter=wrong)
    with pytest.raises(ValueError, match="min_iter must be at most max_iter, 5, got 6"):
        Broyden(max_iter=5, min_iter=6)
    with pytest.raises(ValueError, match="min_iter must be 1 for Auto, whose samples may wait, got 2"):
        Auto(min_iter=2)
    advised = deqfast.diagnose(DEQBlock(lambda z, x: 0.95 * z + x, Picard(min_iter=20)), torch.randn(4, 8))
    assert any("min_iter=20" in advice for advice in advised.advice)
