"""Rules of the caller's own that end samples."""

import pytest
import torch
from correctness import rounding
from own_sums import product

from deqfast import Anderson, Broyden, DEQBlock, Groups, LinearCell, Picard, Status, solve


def slow(z):
    return 0.9 * z + 1


@pytest.mark.parametrize("solver", [Picard(1e-6, 50), Anderson(1e-6, 50), Broyden(1e-6, 50)])
@pytest.mark.parametrize("kernel", ["torch", "cpp"], indirect=True)
def test_each_sample_ends_where_its_rule_says(solver, kernel):
    seen = {}

    def rule(z, value, k):
        seen[k] = z.clone()
        return torch.tensor([k == 2, k >= 3, False])

    def f(z):
        return torch.sin(product(z, weight.T)) + shift

    torch.manual_seed(0)
    weight, shift = torch.randn(4, 4) / 3, torch.randn(3, 4)
    plain = solve(f, torch.zeros(3, 4), solver, kernel)
    stopped = solve(f, torch.zeros(3, 4), solver, kernel, stop_fn=rule)
    assert stopped.status.tolist() == [Status.STOPPED, Status.STOPPED, Status.CONVERGED]
    assert stopped.iterations[:2].tolist() == [2, 3]
    assert torch.equal(stopped.value[0], seen[2][0]) and torch.equal(stopped.value[1], seen[3][1])
    assert torch.equal(stopped.value[2], plain.value[2]) and stopped.residual[2] == plain.residual[2]
    size, gap = f(stopped.value).norm(dim=1), (f(stopped.value) - stopped.value).norm(dim=1)
    assert ((stopped.residual_abs - gap).abs() <= rounding(torch.float32) * size).all()
    assert ((stopped.residual_rel - gap / size).abs() <= rounding(torch.float32)).all()
    assert not stopped.converged[:2].any()


def test_the_solve_ends_with_the_last_sample_and_convergence_and_nan_come_first():
    solution = solve(slow, torch.zeros(5, 2), Picard(1e-9, 100), stop_fn=lambda z, value, k: torch.full((5,), k == 7))
    assert solution.evaluations == 7 and (solution.status == Status.STOPPED).all()
    always = solve(torch.cos, torch.full((1, 1), 0.739), Picard(1e-2), stop_fn=lambda z, value, k: torch.tensor([True]))
    assert always.status.tolist() == [Status.CONVERGED]
    broken = solve(lambda z: z / 0, torch.ones(1, 1), stop_fn=lambda z, value, k: torch.tensor([True]))
    assert broken.status.tolist() == [Status.NONFINITE]


def test_a_block_with_a_rule_has_gradients_and_no_warning(recwarn):
    """The rule compares with the value of the call before, as models of recurrent depth do with outputs."""
    x, before = torch.randn(8, 6, requires_grad=True), {}

    def settled(z, value, k):
        before[k] = value.clone()
        return (value - before.get(k - 1, torch.inf)).norm(dim=1) < 1e-2

    block = DEQBlock(LinearCell(6), Picard(1e-7, 60), stop_fn=settled)
    value, solution = block(x, return_solution=True)
    assert (solution.status == Status.STOPPED).all() and len(set(solution.iterations.tolist())) > 1
    value.sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad.any() and not recwarn.list


def test_groups_end_as_samples():
    groups = Groups(torch.tensor([0, 1, 1, 0]), 4, torch.device("cpu"))
    solution = solve(
        slow, torch.zeros(4, 2), "picard", groups=groups, stop_fn=lambda z, value, k: torch.tensor([k == 3, False])
    )
    assert solution.status.tolist() == [Status.STOPPED, Status.MAX_ITER] and solution.iterations.tolist() == [3, 20]
    assert torch.equal(solution.value[0], solution.value[3]) and not torch.equal(solution.value[0], solution.value[1])


def test_a_rule_may_keep_what_it_was_given_and_write_to_none_of_the_solvers_memory():
    kept, rows, plain = [], torch.arange(3.0), solve(slow, torch.zeros(3, 2), Picard(1e-3, 50))

    def rule(z, value, k):
        kept.append(z)
        return torch.zeros(3, dtype=torch.bool)

    def spoiling(z, value, k):
        z.sub_(value)
        return torch.zeros(3, dtype=torch.bool)

    for each in (rule, spoiling):
        assert torch.equal(solve(slow, torch.zeros(3, 2), Picard(1e-3, 50), stop_fn=each).value, plain.value)
    assert torch.equal(kept[1], slow(kept[0])) and not kept[0].any()
    with pytest.raises(ValueError, match="stop_fn must not modify its argument value"):
        solve(slow, torch.zeros(3, 2), stop_fn=lambda z, value, k: value.mul_(2).sum(dim=1) > rows)


@pytest.mark.parametrize("drop_converged", [False, True])
def test_a_rule_sees_the_values_dtype(drop_converged):
    rates, seen = torch.linspace(0.1, 0.9, 16)[:, None], set()

    def f(z, rows=None):
        return (rates if rows is None else rates[rows]).double() * torch.cos(z) + 1

    def rule(z, value, k):
        seen.add((z.dtype, value.dtype, len(value)))
        return torch.zeros(16, dtype=torch.bool)

    solution = solve(f, torch.zeros(16, 4), Picard(1e-4, 60), stop_fn=rule, drop_converged=drop_converged)
    assert seen == {(torch.float32, torch.float64, 16)} and solution.converged[:12].all()
    assert (solution.sample_evaluations < 16 * solution.evaluations) == drop_converged


@pytest.mark.parametrize("mask", [None, True, torch.tensor([True]), torch.ones(3), torch.zeros(3).bool().to("meta")])
def test_a_bad_mask_is_named(mask):
    with pytest.raises(ValueError, match=r"stop_fn must return a mask \(3,\) torch.bool on cpu, got"):
        solve(slow, torch.zeros(3, 2), stop_fn=lambda z, value, k: mask)
