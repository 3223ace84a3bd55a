"""Gradients by the implicit function theorem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..solution import Solution
from ..solve import solve
from ..solvers import Solver, as_solver
from .base import Adjoint, Problem, attach, detached, per_row, without_broken


@dataclass(frozen=True)
class Implicit(Adjoint):
    """Implicit function theorem: u = J^T u + g is solved as a fixed point, started at u = g, then one product more.

    The exact gradient, to the tolerance of both solves. The cell's graph at z* is kept until the backward pass, which
    needs several products with it. After it ``DEQBlock.backward_solution`` is the Solution of its solve. Source: Bai et
    al., NeurIPS 2019.

    Args:
        solver: the solver of the backward solve or the name of one, with stop="rel", so that the scale of the loss
            changes nothing; None takes the forward's with tol 1e-6.

    Raises:
        ValueError: `solver` is no solver, or has stop="abs".

    Examples:
        >>> adjoint = deqfast.Implicit(deqfast.Anderson(tol=1e-5, max_iter=30))
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=adjoint)
        >>> block(torch.randn(4, 3)).sum().backward()
        >>> bool(block.backward_solution.converged.all())
        True
    """

    solver: str | Solver | None = None

    def __post_init__(self) -> None:
        if self.solver is not None:
            object.__setattr__(self, "solver", as_solver(self.solver))
            if self.solver.stop != "rel":  # type: ignore[union-attr]
                raise ValueError(f"the solver of Implicit must have stop='rel', got {self.solver}")

    def differentiate(self, problem: Problem, solution: Solution) -> Any:
        z, x, broken = without_broken(problem, solution)
        z = detached(z, requires_grad=True)
        evaluation = problem.cell(z, x)
        if not _depends_on_more(evaluation, z):
            return solution.value
        device = pytree.tree_leaves(z)[0].device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

        def solve_adjoint(grads: list[Tensor]) -> list[Tensor]:
            with torch.autocast(device, enabled=enabled, dtype=dtype):
                return self._solve_adjoint(problem, z, evaluation, grads)

        return attach(solution.value, evaluation, broken, "Implicit", solve_adjoint)

    def _solve_adjoint(self, problem: Problem, z: Any, evaluation: Any, grads: list[Tensor]) -> list[Tensor]:
        inputs, spec = pytree.tree_flatten(z)
        outputs = pytree.tree_leaves(evaluation)
        # A gradient that is not finite is not solved for but passed on: a GradScaler must see it.
        finite = torch.stack([torch.isfinite(g.flatten(1)).all(dim=1) for g in grads]).all(dim=0)
        start = [torch.where(per_row(finite, g), g, torch.zeros_like(g)) for g in grads]

        attached = [i for i, y in enumerate(outputs) if y.requires_grad]  # the rest depends on nothing

        def f(u: Any) -> Any:
            leaves = pytree.tree_leaves(u)
            products = torch.autograd.grad(
                [outputs[i] for i in attached],
                inputs,
                [leaves[i].to(outputs[i].dtype) for i in attached],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return pytree.tree_unflatten([p + g for p, g in zip(products, start, strict=True)], spec)

        solver = self.solver if self.solver is not None else replace(problem.solver, tol=1e-6, stop="rel")
        solution = solve(f, pytree.tree_unflatten(start, spec), solver, **problem.options)
        problem.on_backward(solution)
        values = pytree.tree_leaves(solution.value)
        return [torch.where(per_row(finite, g), u, g) for u, g in zip(values, grads, strict=True)]


def _depends_on_more(evaluation: Any, z: Any) -> bool:
    """Answer whether `evaluation` is differentiable in anything but the leaves `z`."""
    own = {id(leaf) for leaf in pytree.tree_leaves(z)}
    nodes = [y.grad_fn for y in pytree.tree_leaves(evaluation)]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf's node
        if variable is not None and id(variable) not in own:
            return True
        nodes.extend(following for following, _ in node.next_functions)
    return False
