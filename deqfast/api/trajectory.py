"""Intermediate states of one solve, each with the gradient of an adjoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .._checks import check_count
from ..engine.device_loop import is_captured
from ..engine.plan import Plan, in_loop
from ..engine.refusals import Refusals, check_served, kinds
from ..gradients import SHINE, Adjoint, Reversible, Unrolled
from ..solution import Solution
from ..solvers import Auto, Solver
from ..state.rows import per_row
from ..torch_internals import pytree

REFUSES: Refusals = {
    SHINE: "its history exists only at the end of a solve",
    Auto: "a sample may wait, and the states would not be those of its own evaluations",
    **dict.fromkeys((Unrolled, Reversible), "it runs no solver"),
    "torch.func": "its states get their gradients from torch.autograd, and none in forward-mode AD either",
    "torch.export": "it counts the evaluations in Python",
}


class Taps:
    """Map that keeps copies of its arguments at the calls `at`, counted from 1."""

    def __init__(self, f: Callable[[Any, Any], Any], at: Sequence[int]) -> None:
        self.f, self.at = f, frozenset(at)
        self.calls = 0
        self.states: list[Any] = []

    def __call__(self, z: Any, x: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            self.states.append(pytree.tree_map(torch.clone, z))
        return self.f(z, x)


def solve_along(plan: Plan, at: Sequence[int]) -> tuple[list[Any], Solution]:
    """States that the forward solve of a plan gives to its cell at the evaluations `at`, and its Solution.

    A sample that ends earlier has its value there. Only the eager loop for whole batches counts calls, and runs.
    """
    plan = replace(plan, options=plan.options.whole)
    if not at:
        return [], in_loop(plan)
    if is_captured(pytree.tree_leaves(plan.z0)[0].device):
        plan = replace(plan, options=replace(plan.options, counted=at[-1]))
    taps = Taps(plan.cell, at)
    solution = in_loop(replace(plan, cell=taps))
    rows = solution.iterations if plan.groups is None else plan.groups.per_row(solution.iterations)

    def with_values(state: Any, at: int) -> Any:
        return pytree.tree_map(lambda s, v: torch.where(per_row(rows < at, s), v, s), state, solution.value)

    states = [with_values(state, n) for state, n in zip(taps.states, at, strict=False)]
    return states + [pytree.tree_map(torch.clone, solution.value) for _ in at[len(states) :]], solution


def differentiate_along(plan: Plan, adjoint: Adjoint, at: Sequence[int]) -> tuple[list[Any], Solution]:
    """States of ``solve_along``, followed by z*, each with the adjoint's gradient; and the Solution."""
    plan = replace(plan, linearised=None)
    states, solution = solve_along(plan, at)
    if not torch.is_grad_enabled():
        return [*states, solution.value], solution
    states = [adjoint.differentiate(plan, solution.changed(value=state))[0] for state in states]
    value, solution = adjoint.differentiate(plan, solution)
    return [*states, value], solution


def check_trajectory(adjoint: Adjoint, solver: Solver, at: Sequence[int]) -> list[int]:
    """Return the evaluations `at`; raises TypeError or ValueError if this solver or adjoint cannot give them."""
    check_served("trajectory", REFUSES, kinds(solver) + kinds(adjoint))
    if isinstance(at, str) or not isinstance(at, Sequence):
        raise TypeError(f"at must be a list of evaluations, counted from 1, got {at!r}")
    for evaluation in at:
        check_count("at", evaluation)
        if evaluation > solver.max_iter:
            raise ValueError(f"at must be at most the solver's max_iter, {solver.max_iter}, got {evaluation}")
    if any(a >= b for a, b in zip(at, at[1:], strict=False)):
        raise ValueError(f"at must ascend, got {list(at)}")
    return list(at)
