"""Choice of what runs the forward solve of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..solution import Solution
from ..state.rows import dropped_samples, take_rows
from ..torch_internals import pytree
from ..torch_internals.autograd import in_order_of
from .export import solve_in_export
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
    options = plan.options
    in_steps = options.trace or options.stop_fn is not None or options.keeps_inverse
    if hasattr(plan.cell, "fixed_point") and not in_steps and options.groups is None and options.scale is None:
        return by_cell
    if plan.graphs is not None or plan.compiled is not None:
        return _by_solver(plan)
    return in_loop


def _by_solver(plan: Plan) -> Runner:
    if plan.graphs is not None:
        return by_graphs
    return in_loop if plan.compiled is None else by_compiled_code


def in_loop(plan: Plan) -> Solution:
    """Run the eager loop."""
    cell, x = plan.cell, plan.x
    if plan.options.drop_converged:
        marks = dropped_samples(x, len(pytree.tree_leaves(plan.z0)[0]), plan.per_sample)
        return plan.solve(plan.options, plan.z0)(
            lambda z, rows: cell(z, x if rows is None else take_rows(x, marks, rows)), plan.z0, False, plan.keep_inverse
        )
    return plan.solve(plan.options, plan.z0)(lambda z: cell(z, x), plan.z0, plan.is_fresh, plan.keep_inverse)


def in_export(plan: Plan) -> Solution:
    """Put the solve into the exported program, which keeps all samples in the batch and records no trace."""
    return solve_in_export(lambda z: plan.cell(z, plan.x), plan.z0, plan.options)


def by_cell(plan: Plan) -> Solution:
    """Call the cell's own ``fixed_point``; if it returns None, run graphs, compiled code or the loop."""
    with torch.no_grad():
        solution = plan.cell.fixed_point(plan.x, plan.z0, plan.solver, plan.options.kernel)  # type: ignore[attr-defined]  # a hook
    if solution is None:
        return _by_solver(plan)(plan)
    # A copy, because the cell may return the same Solution again; its tree may be in another order of keys than z0's.
    leaves = in_order_of(plan.z0, solution.value)
    return replace(solution, value=pytree.tree_unflatten(leaves, pytree.tree_structure(plan.z0)))


def by_graphs(plan: Plan) -> Solution:
    """Replay the block's CUDA graphs."""
    assert plan.graphs is not None
    return plan.graphs.solve(plan.cell, plan.x, plan.z0, plan.options)


def by_compiled_code(plan: Plan) -> Solution:
    """Run the block's compiled code."""
    assert plan.compiled is not None
    return plan.compiled.solve(plan.cell, plan.x, plan.z0, plan.options, plan.keep_inverse)
