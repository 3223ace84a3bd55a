"""Blocks under the transforms of torch.func and in forward-mode AD.

Under transforms, a solve is a function of tensors only: of its start, and of the x, parameters and buffers that the
cell uses. It runs outside of all transforms. Vmaps fold into the batch: every sample of every member is judged,
accelerated and frozen independently, while the cell is called inside of a vmap of its own. Derivatives attach to the
returned values. They consist of solves and calls of the cell, which are transformed in the same way::

    with transforms      z0, x, weights ---------------------------+--> attached --> z* with its derivative
                               |                                   |       ^
                           OnValues                                |   Derivative: pull (gradients), push (tangents)
                               |                                   |       ^
    without transforms         +--> solve z = f(z) of all members -+   Linearisation of f at z*
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.plan import Plan
from ..engine.refusals import Refusals
from ..engine.solve import Solve
from ..gradients import Adjoint, Reversible
from ..gradients.base import confirmed
from ..gradients.derivative import Attached, OnValues, StateFunction, Tensors, for_members
from ..gradients.unrolled import Iterated
from ..solution import Solution
from ..solvers import MixedAnderson
from ..state.packing import Packing
from ..state.rows import per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import present_autocast
from ..torch_internals.transforms import constant, is_transformed
from ..torch_internals.weights import tensors_of

REFUSES: Refusals = {
    "drop_converged": "all members of a vmap are one batch",
    "trace": "its length would differ between the members of a vmap",
    "stop_fn": "the rule would see all members of a vmap as one batch",
    MixedAnderson: "its mixing_fn would see all members of a vmap as one batch",
    "lockstep": "the transforms add calls of the cell, whose number differs between processes",
    "state_group": "the derivatives of sums over processes are not built",
    "compile": "the compiled solve has no transforms",
    "cuda_graph": "the captured solve has no transforms",
    Reversible: "it has no derivative there, nor in forward-mode AD: use Unrolled",
}


class CellFunction(StateFunction):
    """The cell of a plan. Its `others` are the tensors of x, then the parameters and buffers of the cell."""

    def __init__(self, plan: Plan, x: Any) -> None:
        self.cell, self.packing = plan.cell, Packing(plan.z0)
        leaves, self.x_spec = pytree.tree_flatten(x)
        self.x_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.in_x = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        held = tensors_of(self.cell)
        self.names = list(held)
        self.others = [*(leaves[i] for i in self.in_x), *held.values()]
        self.autocast = present_autocast(self.packing.device.type)

    def __call__(self, state: Tensors, rows: Tensors, others: Tensors) -> Tensors:
        x_leaves = list(self.x_leaves)
        for i, tensor in zip(self.in_x, others, strict=False):
            x_leaves[i] = tensor
        arguments = pytree.tree_unflatten(state, self.packing.spec), pytree.tree_unflatten(x_leaves, self.x_spec)
        with self.autocast():
            if isinstance(self.cell, nn.Module):
                held = dict(zip(self.names, others[len(self.in_x) :], strict=True))
                value = torch.func.functional_call(self.cell, held, arguments, tie_weights=False)
            else:
                value = self.cell(*arguments)
        return self.packing.check_value(value)


def solve_values(plan: Plan) -> Solution:
    """Solution of a plan whose tensors belong to transforms; its value has no derivative yet."""
    f, z0 = CellFunction(plan, plan.x), pytree.tree_leaves(plan.z0)
    _check_held(f, z0)
    spec = f.packing.spec
    solved: list[Solution] = []

    def work(f: Callable[[Tensors], Tensors], z0: Tensors, members: int) -> Tensors:
        """The forward solve on the values of all members."""

        def cell(z: Any) -> Any:
            return pytree.tree_unflatten(f(pytree.tree_leaves(z)), spec)

        options = for_members(plan.options, members)
        start = pytree.tree_unflatten(z0, spec)
        solution = Solve(start, options)(cell, start)
        leaves = pytree.tree_leaves(solution.value)
        solved.append(confirmed(solution, options, solution.value, f(leaves)))
        measures = solution.residual, solution.residual_rel, solution.residual_abs
        return [*leaves, solved[-1].status, solution.iterations, *(m.clone() for m in measures)]

    results = OnValues.of(work, f, z0, [], f.others)
    numbers = ("status", "iterations", "residual", "residual_rel", "residual_abs")
    changes: dict[str, Any] = dict(zip(numbers, results[len(z0) :], strict=True))
    value = pytree.tree_unflatten(results[: len(z0)], spec)
    return replace(solved[-1], value=value, position_iterations=None, **changes)


def transform(plan: Plan, adjoint: Adjoint) -> tuple[Any, Solution]:
    """Value with the adjoint's derivative, except for samples that broke down, and the Solution."""
    if isinstance(adjoint, Iterated):
        return adjoint(plan)
    solution, derivative = solve_values(plan), adjoint.derivative(plan)
    z, x, broken = plan.without_broken(solution)
    f = CellFunction(plan, x)
    values, spec = pytree.tree_flatten(solution.value)
    leaves = Attached.of(derivative, f, pytree.tree_leaves(z), [], f.others)
    if broken is not None:
        leaves = [torch.where(per_row(broken, v), v, y) for v, y in zip(values, leaves, strict=True)]
    return pytree.tree_unflatten(leaves, spec), solution


def _check_held(f: CellFunction, z0: Tensors) -> None:
    """Raise RuntimeError if the cell uses a tensor of a transform or graph that is not in `others`."""
    with torch.enable_grad():
        outputs = f([constant(z) for z in z0], [], [constant(tensor) for tensor in f.others])
    if any(is_transformed(y) for y in outputs):
        raise RuntimeError(
            "deqfast: under torch.func and forward-mode AD the cell may hold no tensor that is transformed or requires "
            "a gradient, except its parameters and buffers: its derivative would be lost. Give it to the block in x, "
            "or make the cell an nn.Module"
        )
