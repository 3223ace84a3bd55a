"""Choice of what runs the forward solve of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..solution import Solution
from ..solve import solve_keeping
from ..state.rows import dropped_samples, take_rows
from ..torch_internals import pytree
from ..torch_internals.autograd import in_order_of
from .functorch import solve_values
from .plan import Plan

Runner = Callable[[Plan], Solution]


def choose(plan: Plan) -> Runner:
    """Return what runs the forward solve. This is the only place that knows the precedence of the runners.

    ``refusals.REFUSED`` says what each runner refuses. Only ``torch.compile`` is handled elsewhere, in
    ``DEQBlock.forward``: its trace holds no plan, but an op that makes one when it runs.
    """
    if plan.context == "torch.export":
        return in_export
    if plan.context == "torch.func":
        return solve_values
    in_steps = plan.trace or plan.stop_fn is not None or plan.keep_inverse is not None
    if hasattr(plan.cell, "fixed_point") and not in_steps and plan.groups is None and plan.scale is None:
        return by_cell
    return _by_solver(plan)


def _by_solver(plan: Plan) -> Runner:
    if plan.graphs is not None:
        return by_graphs
    return in_loop if plan.compiled is None else by_compiled_code


def in_loop(plan: Plan) -> Solution:
    """Run the eager loop."""
    marks = dropped_samples(plan.x, len(pytree.tree_leaves(plan.z0)[0]), plan.per_sample) if plan.drop_converged else []

    def f(z: Any, rows: Tensor | None = None) -> Any:
        return plan.cell(z, plan.x if rows is None else take_rows(plan.x, marks, rows))

    return solve_keeping(
        plan.keep_inverse,
        f,
        plan.z0,
        plan.solver,
        plan.kernel,
        groups=plan.groups,
        scale=plan.scale,
        stop_fn=plan.stop_fn,
        drop_converged=plan.drop_converged,
        trace=plan.trace,
    )


def in_export(plan: Plan) -> Solution:
    """Put the solve into the exported program, which keeps all samples in the batch and records no trace."""
    return in_loop(replace(plan, drop_converged=False, trace=False))


def by_cell(plan: Plan) -> Solution:
    """Call the cell's own ``fixed_point``; if it returns None, run graphs, compiled code or the loop."""
    with torch.no_grad():
        solution = plan.cell.fixed_point(plan.x, plan.z0, plan.solver, plan.kernel)  # type: ignore[attr-defined]  # a hook
    if solution is None:
        return _by_solver(plan)(plan)
    # A copy, because the cell may return the same Solution again; its tree may be in another order of keys than z0's.
    leaves = in_order_of(plan.z0, solution.value)
    return replace(solution, value=pytree.tree_unflatten(leaves, pytree.tree_structure(plan.z0)))


def by_graphs(plan: Plan) -> Solution:
    """Replay the block's CUDA graphs."""
    assert plan.graphs is not None
    return plan.graphs.solve(plan.cell, plan.x, plan.z0, plan.solver, plan.kernel)


def by_compiled_code(plan: Plan) -> Solution:
    """Run the block's compiled code."""
    assert plan.compiled is not None
    return plan.compiled.solve(plan.cell, plan.x, plan.z0, plan.solver, plan.kernel, plan.keep_inverse)
