"""The forward pass of a block as its adjoint sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._checks import ChecksKeywords
from ..execution.compiled import Compiled
from ..execution.cuda_graph import Graphs
from ..execution.functorch import Derivative, Refused, solve_transformed
from ..execution.linearised import Linearised
from ..solution import Solution
from ..solve import solve
from ..solvers import Solver
from ..state.groups import Groups
from ..state.rows import mark_samples, per_row, take_rows, without_broken
from ..torch_internals.transforms import in_forward_mode, in_torch_func


def reciprocal(scale: Any) -> Any:
    """Tree of one over each number, None for None."""
    return None if scale is None else pytree.tree_map(lambda number: 1 / number, scale)


@dataclass
class Problem:
    """Forward pass of a DEQBlock: solve z = cell(z, x) from z0 with these settings.

    Attributes:
        cell: the map (z, x) -> z.
        x: the injection, a tensor or a pytree.
        z0: start of the iteration.
        solver: the solver of the forward solve.
        options: arguments of every ``solve``, forward and backward: kernel, check_every, groups, scale.
        on_backward: called with the Solution of a backward solve.
        forward_options: further arguments of the forward ``solve``: compact, trace, halt, keep_inverse.
        graphs: where given, these capture the forward solve and replay it.
        compiled: where given, its code runs the forward solve.
        linearised: where given, its code runs the backward solve of ``Implicit``.
        per_sample: which tensors of x have a row per row of z, see ``DEQBlock``.
        advances: the value with its gradient is not z* but what the gradient's own calls of the cell make of it.
    """

    cell: Callable[[Any, Any], Any]
    x: Any
    z0: Any
    solver: Solver
    options: dict[str, Any]
    on_backward: Callable[[Solution], None]
    forward_options: dict[str, Any] = field(default_factory=dict)
    graphs: Graphs | None = None
    compiled: Compiled | None = None
    linearised: Linearised | None = None
    per_sample: Any = None
    advances: bool = False

    def forward_value(self, solution: Solution, outputs: list[Tensor], broken: Tensor) -> Any:
        """Value that the gradient is attached to: z*, or these `outputs` in all rows that did not break down."""
        if not self.advances:
            return solution.value
        leaves, spec = pytree.tree_flatten(solution.value)
        pairs = zip(leaves, outputs, strict=True)
        return pytree.tree_unflatten(
            [torch.where(per_row(broken, z), z, y.detach().to(z.dtype)) for z, y in pairs], spec
        )

    def without_broken(self, solution: Solution) -> tuple[Any, Any, Tensor]:
        """(z*, x, broken), see ``samples.without_broken``."""
        return without_broken(self.x, solution, self.groups, self.per_sample)

    def is_transformed(self) -> bool:
        """Return whether torch.func or forward-mode AD goes through this forward pass."""
        return in_torch_func() or in_forward_mode()

    def is_asked(self, name: str) -> bool:
        """Return whether an option of the forward solve is given; a rule may be a container, and empty."""
        option = self.forward_options.get(name)
        return option is not None and option is not False

    def given(self) -> list[str]:
        """Names of the options of the forward solve that are given."""
        options = [name for name in self.forward_options if self.is_asked(name)]
        return options + ["compile"] * (self.compiled is not None) + ["cuda_graph"] * (self.graphs is not None)

    @property
    def groups(self) -> Groups | None:
        """Samples of several rows, if any."""
        return self.options.get("groups")

    @property
    def scale(self) -> Any:
        """Sizes of the tensors of the state, if given."""
        return self.options.get("scale")

    @property
    def scale_of_gradients(self) -> Any:
        """Sizes of gradients of the state: one is as long as its tensor is short."""
        return reciprocal(self.scale)

    def solve(self) -> Solution:
        """Solution of the forward solve: by the cell's own ``fixed_point``, graphs, compiled code or the loop."""
        records = any(self.is_asked(name) for name in ("trace", "halt", "keep_inverse"))
        if hasattr(self.cell, "fixed_point") and not records and self.groups is None and self.scale is None:
            with torch.no_grad():
                solution = self.cell.fixed_point(self.x, self.z0, self.solver, self.options["kernel"])
            if solution is not None:
                return solution
        if self.graphs is not None:
            options = {name: self.options[name] for name in ("kernel", "check_every")}
            return self.graphs.solve(self.cell, self.x, self.z0, self.solver, **options)
        if self.compiled is not None:
            keeps = self.forward_options.get("keep_inverse", False)
            return self.compiled.solve(self.cell, self.x, self.z0, self.solver, self.options["kernel"], keeps)

        compact = self.forward_options.get("compact")
        marks = mark_samples(self.x, len(pytree.tree_leaves(self.z0)[0]), self.per_sample) if compact else []

        def f(z: Any, rows: Tensor | None = None) -> Any:
            return self.cell(z, self.x if rows is None else take_rows(self.x, marks, rows))

        return solve(f, self.z0, self.solver, **self.options, **self.forward_options)


@dataclass(frozen=True)
class Adjoint(ChecksKeywords):
    """Base of the adjoints, which attach a gradient to the value of a problem.

    A subclass is a frozen dataclass of its settings and defines ``differentiate``, for torch.func also ``derivative``.
    """

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        """Value of the problem, with its gradient where one is recorded, and the Solution of the forward solve."""
        if problem.is_transformed():
            return solve_transformed(problem, self)
        solution = problem.solve()
        if not torch.is_grad_enabled():
            return solution.value, solution
        return self.differentiate(problem, solution)

    def differentiate(self, problem: Problem, solution: Solution) -> tuple[Any, Solution]:
        """``solution.value`` with its gradient, and the solution as the gradient's evaluation confirms it."""
        raise NotImplementedError

    def derivative(self, problem: Problem) -> Derivative:
        """Derivative of the value under torch.func and in forward-mode AD, which an adjoint without it refuses."""
        return Refused(
            f"deqfast: {type(self).__name__} has no derivative under torch.func and in forward-mode AD: use "
            "Implicit(), JFB(), Phantom() or Unrolled()"
        )
