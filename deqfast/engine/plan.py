"""Plan of a forward pass, and its solve by one of the runners."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..solution import Solution, Status
from ..solvers import Solver
from ..state.groups import Groups
from ..state.rows import dropped_samples, has_candidates, per_row, take_rows, without_broken
from ..torch_internals import pytree
from ..torch_internals.autograd import in_order_of
from ..torch_internals.ranks import InStep
from ..torch_internals.transforms import Context
from ..torch_internals.weights import attribute
from .runners.compiled import Compiled
from .runners.cuda_graph import Graphs
from .solve import Options, Solve, Solves


@dataclass(kw_only=True, slots=True)
class Plan:
    """Forward pass of a block: solve z = cell(z, x) from z0; x is a tensor or a pytree."""

    cell: Any
    x: Any
    z0: Any
    options: Options  # of the forward solve; kernel, groups and scale are those of the backward solve too
    is_fresh: bool = False  # z0 is finite, and nobody else uses its memory
    per_sample: Any = None  # which tensors of x have a row per row of z, see ``DEQBlock``
    solves: Solves | None = None  # keeps the compiled solves
    graphs: Graphs | None = None  # capture the forward solve, and the backward solve of ``Implicit``, and replay them
    compiled: Compiled | None = None  # its code runs the forward solve
    linearised: Callable[[Any, Any, Any], Any] | None = None  # its code runs the backward solve of ``Implicit``
    context: Context = "eager"  # where the forward pass runs
    on_backward: Callable[[Solution], None]  # called with the Solution of a backward solve
    advances: bool = False  # the value comes from the gradient's own calls of the cell, and is not z*

    @property
    def solver(self) -> Solver:
        """Solver of the forward solve."""
        return self.options.solver

    @property
    def groups(self) -> Groups | None:
        """Samples of several rows, if any."""
        groups: Groups | None = self.options.groups
        return groups

    def solve(self, options: Options, z0: Any) -> Solve:
        """A solve that is ready to run from z0 with these options; a block keeps it for later calls."""
        return Solve(z0, options) if self.solves is None else self.solves.of(options, z0)

    @property
    def is_differentiated(self) -> bool:
        """Whether the value gets a gradient from torch.autograd."""
        return self.context != "torch.export" and torch.is_grad_enabled()

    @property
    def holds_weights(self) -> bool:
        """Whether parametrised weights are computed once per solve; graphs and transforms compute their own."""
        return self.context == "torch.export" or (self.context == "eager" and self.graphs is None)

    def without_broken(self, solution: Solution) -> tuple[Any, Any, Tensor | None]:
        """(z*, x, broken) without the samples that broke down, see ``rows.without_broken``."""
        options, ranks = self.options, None
        if options.state_group is not None:
            dropped_samples(
                self.x, len(solution.status), self.per_sample, "state_group needs one answer on all processes"
            )
        if options.lockstep is not None and has_candidates(self.x, self.per_sample):  # the ranks look together
            ranks = InStep(options.lockstep, solution.status.device, options.state_group)
        elif not solution.may_include(Status.NONFINITE):
            return solution.value, self.x, None
        with ranks or nullcontext():
            return without_broken(self.cell, self.x, solution, options.groups, self.per_sample, ranks)

    def forward_value(self, solution: Solution, outputs: list[Tensor], broken: Tensor | None) -> Any:
        """Value that gets the gradient: z*, or `outputs` in all rows that did not break down."""
        if not self.advances:
            return solution.value
        leaves, spec = pytree.tree_flatten(solution.value)
        advanced = [y.detach().to(z.dtype, copy=True) for z, y in zip(leaves, outputs, strict=True)]
        if broken is not None:
            advanced = [torch.where(per_row(broken, z), z, y) for z, y in zip(leaves, advanced, strict=True)]
        return pytree.tree_unflatten(advanced, spec)


def run(plan: Plan) -> Solution:
    """Run the forward solve of an eager call: by the cell itself, graphs, compiled code or the loop.

    ``api.refusals.REFUSED`` says what each runner refuses.
    """
    options = plan.options
    # What a cell's own fixed_point does not know.
    needs_loop = options.trace or options.stop_fn is not None or options.keeps_inverse or options.causal
    needs_loop = needs_loop or options.groups is not None or options.scale is not None
    needs_loop = needs_loop or options.lockstep is not None or options.state_group is not None
    if not needs_loop and attribute(plan.cell, "fixed_point") is not None and (solution := _by_cell(plan)) is not None:
        return solution
    if plan.graphs is not None:
        solve = plan.solve(plan.options, plan.z0)
        return plan.graphs.solve(solve, plan.cell, plan.x, plan.z0, lambda: in_loop(plan))
    if plan.compiled is not None:
        return plan.compiled.solve(plan.cell, plan.x, plan.z0, plan.options)
    return in_loop(plan)


def in_loop(plan: Plan) -> Solution:
    """Run the eager loop."""
    cell, x = plan.cell, plan.x
    if plan.options.drop_converged:
        marks = dropped_samples(x, len(pytree.tree_leaves(plan.z0)[0]), plan.per_sample)
        return plan.solve(plan.options, plan.z0)(
            lambda z, rows: cell(z, x if rows is None else take_rows(x, marks, rows)), plan.z0
        )
    f: Any = lambda z: cell(z, x)  # noqa: E731  (it may have an attribute)
    if plan.options.causal and (hook := attribute(cell, "from_position")) is not None:
        if not callable(hook):
            raise TypeError(f"from_position of the cell must be a method, got {type(hook).__name__}")
        f.from_position = lambda z, first, value: hook(z, x, first, value)
    return plan.solve(plan.options, plan.z0)(f, plan.z0, plan.is_fresh)


def _by_cell(plan: Plan) -> Solution | None:
    """Result of the cell's own ``fixed_point``; None if it leaves the solve to the others."""
    with torch.no_grad():
        solution: Solution | None = plan.cell.fixed_point(plan.x, plan.z0, plan.solver, plan.options.kernel)
    if solution is None:
        return None
    # A copy, because the cell may return the same Solution again; its tree may be in another order of keys than z0's.
    leaves = in_order_of(plan.z0, solution.value)
    return replace(solution, value=pytree.tree_unflatten(leaves, pytree.tree_structure(plan.z0)))
