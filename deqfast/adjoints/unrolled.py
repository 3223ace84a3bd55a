"""Backpropagation through the iterations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..exporting import is_exporting, outside_exports
from ..ops.steps.reference import residuals
from ..packing import Packing, evaluate
from ..solution import Solution, Status
from ..solve import finite_rows
from ..solvers import Solver
from ..solvers.base import check_count
from ..transforms import values
from .attach import detached
from .base import Adjoint, Problem
from .samples import per_row


@dataclass(frozen=True)
class Unrolled(Adjoint):
    """Backpropagation through plain calls of the cell from z0, without a solver.

    The value is the last iterate; the Solution's residual is that of the iterate before it, the last one f was
    evaluated at. Differentiable any number of times, also in z0. Memory grows with the calls.

    Args:
        steps: number of calls, at least 1; None takes the solver's max_iter.

    Raises:
        TypeError, ValueError: `steps` is not such a number.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.Unrolled(steps=30))
        >>> x = torch.randn(4, 3, requires_grad=True)
        >>> (gradient,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
        >>> gradient.square().sum().backward()  # a second derivative
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        packing = Packing(problem.z0, problem.groups)
        with outside_exports(torch.no_grad()):
            finite_rows(packing, problem.z0)
        value, solution = self._unroll(problem, packing, problem.z0, problem.x)
        broken = solution.status == Status.NONFINITE
        if is_exporting():
            value = pytree.tree_map(lambda v, z: torch.where(per_row(broken, v), z, v), value, problem.z0)
            return value, replace(solution, value=value)
        if not bool(values(broken).any()):
            return pytree.tree_map(torch.clone, value), solution  # users may work in place on the output of a layer
        # Once more with stand-ins, so that the broken rows leave no trace in the gradients of the others.
        stand_ins = replace(solution, value=problem.z0)
        z0, x, broken = problem.without_broken(stand_ins)
        healthy, _ = self._unroll(problem, packing, z0, x)
        value = pytree.tree_map(lambda v, z: torch.where(per_row(broken, v), z.detach(), v), healthy, problem.z0)
        return value, replace(solution, value=detached(value))

    def _unroll(self, problem: Problem, packing: Packing, z: Any, x: Any) -> tuple[Any, Solution]:
        steps = self.steps or problem.solver.max_iter
        previous = z
        for _ in range(steps):
            value = evaluate(problem.cell, z, x)
            packing.check_value(value)
            previous, z = z, pytree.tree_map(lambda new, old: new.to(old.dtype), value, z)
        with outside_exports(torch.no_grad()):
            return z, _judge(packing, problem.solver, steps, previous, z)


def _judge(packing: Packing, solver: Solver, steps: int, previous: Any, z: Any) -> Solution:
    """Solution of `steps` calls of f, the last of which gave z = f(previous)."""
    now, before = packing.pack(z), packing.pack(previous)
    relative, absolute = residuals(now - before, now, solver.offset, solver.norm == "max")
    measure = absolute if solver.stop == "abs" else relative
    finite = torch.isfinite(now).all(dim=1) & torch.isfinite(measure)
    status = torch.where(measure <= solver.tol, Status.CONVERGED, Status.MAX_ITER)
    status = torch.where(finite, status, Status.NONFINITE).to(torch.int8)

    def where_finite(residual: Tensor) -> Tensor:
        return torch.where(finite, residual, torch.inf)

    return Solution(
        value=detached(z),
        status=status,
        iterations=torch.full_like(status, steps, dtype=torch.int32),
        residual=where_finite(measure),
        residual_rel=where_finite(relative),
        residual_abs=where_finite(absolute),
        evaluations=steps,
        sample_evaluations=steps * packing.batch,
    )
