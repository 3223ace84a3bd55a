"""Attachment of a gradient to a solve. The one place that touches autograd for solves.

The forward value is the solver's z*, in training and evaluation alike. Gradients attach to one more evaluation of the
cell at z*, in which samples whose solve broke down are replaced by a healthy one, and then get no gradient: one NaN
row of x cannot turn a weight gradient into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..graphs import Graphs
from ..ops.double_backward import NoDoubleBackward
from ..solution import Solution, Status
from ..solve import solve
from ..solvers import Solver


@dataclass
class Problem:
    """Forward pass of a DEQBlock: solve z = cell(z, x) from z0 with these settings.

    Attributes:
        cell: the map (z, x) -> z.
        x: the injection, a tensor or a pytree.
        z0: start of the iteration.
        solver: the solver of the forward solve.
        options: arguments of every ``solve``, forward and backward: kernel, check_every.
        on_backward: called with the Solution of a backward solve.
        forward_options: further arguments of the forward ``solve``: compact, trace, keep_inverse.
        graphs: where given, these capture the forward solve and replay it.
    """

    cell: Callable[[Any, Any], Any]
    x: Any
    z0: Any
    solver: Solver
    options: dict[str, Any]
    on_backward: Callable[[Solution], None]
    forward_options: dict[str, Any] = field(default_factory=dict)
    graphs: Graphs | None = None

    def solve(self) -> Solution:
        """Solution of the forward solve: by the cell's own ``fixed_point``, by graphs or by the loop."""
        records = self.forward_options.get("trace") or self.forward_options.get("keep_inverse")
        if hasattr(self.cell, "fixed_point") and not records:
            with torch.no_grad():
                solution = self.cell.fixed_point(self.x, self.z0, self.solver, self.options["kernel"])
            if solution is not None:
                return solution
        if self.graphs is not None:
            return self.graphs.solve(self.cell, self.x, self.z0, self.solver, **self.options)

        batch = len(pytree.tree_leaves(self.z0)[0])

        def f(z: Any, rows: Tensor | None = None) -> Any:
            return self.cell(z, self.x if rows is None else _take_rows(self.x, rows, batch))

        return solve(f, self.z0, self.solver, **self.options, **self.forward_options)


@dataclass(frozen=True)
class Adjoint:
    """Base of the adjoints, which attach a gradient to the value of a problem.

    A subclass is a frozen dataclass of its settings and defines ``differentiate``.
    """

    def __call__(self, problem: Problem) -> tuple[Any, Solution]:
        """Value of the problem, with its gradient where one is recorded, and the Solution of the forward solve."""
        solution = problem.solve()
        if not torch.is_grad_enabled():
            return solution.value, solution
        return self.differentiate(problem, solution), solution

    def differentiate(self, problem: Problem, solution: Solution) -> Any:
        """``solution.value`` with its gradient attached, see ``attach``."""
        raise NotImplementedError


def _take_rows(x: Any, rows: Tensor, batch: int) -> Any:
    """Rows of those tensors in x that have the batch as their first dimension."""

    def take(leaf: Any) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch
        return leaf.index_select(0, rows) if has_batch else leaf

    return pytree.tree_map(take, x)


def per_row(mask: Tensor, like: Tensor) -> Tensor:
    """`mask` (B,) in a shape that broadcasts over the samples of `like`."""
    return mask.view(-1, *([1] * (like.dim() - 1)))


def _stand_in(tree: Any, broken: Tensor, donor: Tensor, healthy: Tensor) -> Any:
    """`tree` with its broken rows replaced by row `donor`, or by zeros where no row is healthy."""

    def replace_rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != len(broken):
            return leaf
        row = leaf.index_select(0, donor)
        return torch.where(per_row(broken, leaf), torch.where(healthy, row, torch.zeros_like(row)), leaf)

    return pytree.tree_map(replace_rows, tree)


def without_broken(problem: Problem, solution: Solution) -> tuple[Any, Any, Tensor]:
    """(z*, x, broken) with stand-ins in the rows whose solve met a value that is not finite."""
    broken = solution.status == Status.NONFINITE
    if not len(broken) or (broken.device.type == "cpu" and not bool(broken.any())):
        return solution.value, problem.x, broken
    healthy = ~broken
    donor = healthy.to(torch.int8).argmax(keepdim=True)
    stand_in = [_stand_in(tree, broken, donor, healthy.any()) for tree in (solution.value, problem.x)]
    return stand_in[0], stand_in[1], broken


class _Attach(torch.autograd.Function):
    """Forward: the solver's values. Backward: `pull` maps their gradients to those of the attached evaluation."""

    @staticmethod
    def forward(ctx: Any, pull: Callable[..., list[Tensor]], name: str, count: int, *tensors: Tensor) -> Any:
        ctx.pull, ctx.adjoint, ctx.count = pull, name, count
        # Copies, not views: users may work in place on the output of a layer.
        return tuple(value.clone() for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            pulled = ctx.pull(list(grads))
        if torch.is_grad_enabled():  # create_graph=True
            pulled = [NoDoubleBackward.apply(g.requires_grad_(), ctx.adjoint) for g in pulled]
        return (None, None, None, *([None] * ctx.count), *pulled)


def attach(
    value: Any,
    evaluation: Any,
    broken: Tensor,
    name: str,
    solve_adjoint: Callable[[list[Tensor]], list[Tensor]] | None = None,
) -> Any:
    """`value` with the gradient of `evaluation`, a tree alike; broken rows get none.

    `solve_adjoint`, if given, transforms the incoming gradients before they enter `evaluation`; `name` is that of the
    adjoint in the error of a double backward.
    """
    values, spec = pytree.tree_flatten(value)
    attached = pytree.tree_leaves(evaluation)
    dtypes = [y.dtype for y in attached]

    def pull(grads: list[Tensor]) -> list[Tensor]:
        grads = [torch.where(per_row(broken, g), torch.zeros_like(g), g) for g in grads]
        if solve_adjoint is not None:
            grads = solve_adjoint(grads)
        return [g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]

    return pytree.tree_unflatten(list(_Attach.apply(pull, name, len(values), *values, *attached)), spec)


def detached(tree: Any, requires_grad: bool = False) -> Any:
    """`tree` with its tensors cut from their graphs, as fresh leaves where `requires_grad`."""
    return pytree.tree_map(lambda t: t.detach().requires_grad_(requires_grad), tree)
