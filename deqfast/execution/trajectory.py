"""States on the way of one solve, each with the gradient of an adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .._checks import check_count
from ..adjoints import Adjoint, Problem
from ..solution import Solution
from ..solvers import Solver
from ..state.rows import per_row
from ..torch_internals.dynamo import is_exporting
from .plan import check_served, kinds


class Taps:
    """Map that keeps copies of the states it is given at the calls `at`, which count from 1."""

    def __init__(self, f: Callable[[Any, Any], Any], at: Sequence[int]) -> None:
        self.f, self.at = f, frozenset(at)
        self.calls = 0
        self.states: list[Any] = []

    def __call__(self, z: Any, x: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            self.states.append(pytree.tree_map(torch.clone, z))
        return self.f(z, x)


def solve_along(problem: Problem, at: Sequence[int]) -> tuple[list[Any], Solution]:
    """States that the forward solve of a problem gives to its cell at the evaluations `at`, and its Solution.

    A sample that is done before is given as its value in the Solution. Runs the loop: neither
    graphs, which count no calls, nor compiled code, nor what the cell has in its place, nor compaction.
    """
    options = {**problem.forward_options, "compact": False}
    taps = Taps(problem.cell, at)
    solution = replace(problem, cell=taps, graphs=None, compiled=None, forward_options=options).solve()
    rows = solution.iterations if problem.groups is None else problem.groups.of_rows(solution.iterations)

    def with_values(state: Any, at: int) -> Any:
        return pytree.tree_map(lambda s, v: torch.where(per_row(rows < at, s), v, s), state, solution.value)

    states = [with_values(*of) for of in zip(taps.states, at, strict=False)]
    rest = [pytree.tree_map(torch.clone, solution.value) for _ in at[len(taps.states) :]]
    return [*states, *rest], solution


def differentiate_along(problem: Problem, adjoint: Adjoint, at: Sequence[int]) -> tuple[list[Any], Solution]:
    """States of ``solve_along`` and z* behind them, each with the adjoint's gradient; and the Solution."""
    if problem.is_transformed() or is_exporting():
        raise RuntimeError("deqfast: a trajectory cannot go through torch.func, forward-mode AD or torch.export")
    problem = replace(problem, linearised=None)
    states, solution = solve_along(problem, at)
    if not torch.is_grad_enabled():
        return [*states, solution.value], solution
    states = [adjoint.differentiate(problem, replace(solution, value=state))[0] for state in states]
    value, solution = adjoint.differentiate(problem, solution)
    return [*states, value], solution


def check_trajectory(adjoint: Adjoint, solver: Solver, at: Sequence[int]) -> list[int]:
    """The evaluations `at`; TypeError or ValueError where this solver has no such, or this adjoint no trajectory."""
    check_served("trajectory", kinds(adjoint))
    if isinstance(at, str) or not isinstance(at, Sequence):
        raise TypeError(f"at must be a list of evaluations, counted from 1, got {at!r}")
    for evaluation in at:
        check_count("at", evaluation)
        if evaluation > solver.max_iter:
            raise ValueError(f"at must be at most the solver's max_iter, {solver.max_iter}, got {evaluation}")
    if any(a >= b for a, b in zip(at, at[1:], strict=False)):
        raise ValueError(f"at must ascend, got {list(at)}")
    return list(at)
