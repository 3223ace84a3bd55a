"""Backpropagation through iterations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .._checks import check_choice, check_count
from ..engine.plan import Plan
from ..engine.solve import check_finite
from ..ops.steps.reference import Evaluation, evaluated
from ..solution import Solution, Status
from ..solvers import Solver
from ..state.evaluation import evaluate, version
from ..state.packing import Packing
from ..state.rows import per_row, stand_in
from ..torch_internals import pytree
from ..torch_internals.autograd import Graph, detached, requiring_grad
from ..torch_internals.dynamo import outside_exports
from ..torch_internals.ranks import InStep
from ..torch_internals.transforms import values
from ..torch_internals.weights import as_now, behind_held, next_node, tensors_of
from .base import Adjoint


class Iterated(Adjoint):
    """Base of the adjoints that iterate themselves instead of running a solver, with gradients through all iterates.

    The Solution's residual belongs to the last iterate at which f was evaluated.
    """

    def __call__(self, plan: Plan) -> tuple[Any, Solution]:
        packing, together = Packing(plan.z0, plan.groups, plan.options.scale), plan.options.lockstep
        with InStep(together, packing.device) if together else nullcontext() as ranks:
            return self._call(plan, packing, ranks)

    def _call(self, plan: Plan, packing: Packing, ranks: InStep | None) -> tuple[Any, Solution]:
        if plan.context != "torch.export":
            with torch.no_grad():
                check_finite(values(packing.pack(plan.z0)))
        if ranks is not None:
            ranks.most(0)  # all may begin
        value, solution = self.iterate(plan, packing, plan.z0, plan.x)
        broken = solution.status == Status.NONFINITE
        rows = broken if plan.groups is None else plan.groups.per_row(broken)
        if plan.context == "torch.export":
            value = pytree.tree_map(lambda v, z: torch.where(per_row(rows, v), z, v), value, plan.z0)
            return value, replace(solution, value=value)
        is_broken = bool(values(broken).any())
        if not (is_broken if ranks is None else ranks.any(is_broken)):
            return pytree.tree_map(torch.clone, value), solution  # users may work in place on the output of a layer
        # Iterate again with healthy rows in place of the broken ones, which then do not affect the others' gradients.
        _, x, _ = plan.without_broken(solution)
        z0 = pytree.tree_map(lambda leaf: stand_in(leaf, rows), plan.z0)
        healthy, _ = self.iterate(plan, packing, z0, x)
        value = pytree.tree_map(lambda v, z: torch.where(per_row(rows, v), z.detach(), v), healthy, plan.z0)
        return value, replace(solution, value=detached(value))

    def iterate(self, plan: Plan, packing: Packing, z: Any, x: Any) -> tuple[Any, Solution]:
        """Last iterate from z, with its gradient, and the Solution; a subclass defines it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Unrolled(Iterated):
    """Backpropagation through plain calls of the cell from z0, without a solver.

    The value is the last iterate. The Solution's residual belongs to the iterate before it, the last one at which f was
    evaluated. Differentiable any number of times, also in z0. Memory grows with the calls.

    Args:
        steps: number of calls, at least 1; None takes the solver's max_iter.
        checkpoint: keep only the iterates, and compute each call's graph again in the backward pass. This takes twice
            the calls, and the memory of one graph. The cell must not change before the backward pass.

    Raises:
        TypeError, ValueError: `steps` is not such a number, or `checkpoint` is not True or False.
        RuntimeError: with `checkpoint`, x, z0 or a tensor of the cell has been written to before the backward pass.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.Unrolled(steps=30))
        >>> x = torch.randn(4, 3, requires_grad=True)
        >>> (gradient,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
        >>> gradient.square().sum().backward()  # a second derivative
    """

    steps: int | None = None
    checkpoint: bool = False

    def __post_init__(self) -> None:
        if self.steps is not None:
            check_count("steps", self.steps)
        check_choice("checkpoint", self.checkpoint, (False, True))

    def iterate(self, plan: Plan, packing: Packing, z: Any, x: Any) -> tuple[Any, Solution]:
        cell, repeated = plan.cell, None
        if self.checkpoint and torch.is_grad_enabled() and plan.context != "torch.func":  # torch.func refuses it
            x = pytree.tree_map(lambda leaf: leaf, x)  # the caller may fill its containers again
            repeated, begin = Repeated(cell, z, x), next_node()
            cell = partial(checkpoint, repeated, use_reentrant=False)
        steps = self.steps or plan.solver.max_iter
        judge = Judge(packing, plan.solver)
        for _ in range(steps):
            value = evaluate(cell, z, x)
            packing.check_value(value)
            previous, z = z, pytree.tree_map(lambda old, new: new.to(old.dtype), z, value)  # in the order of z
            judge.see(previous, value)
        if repeated is not None:
            repeated.end(Graph(pytree.tree_leaves(value), requiring_grad((previous, x)), begin).behind[0])
        return z, judge.solution(z)


class Repeated:
    """Cell that a backward pass calls again. It then raises if a tensor that it reads has been written to since.

    The calls themselves may write to buffers, such as running statistics.

    Args:
        cell: the cell of the forward pass.
        z0, x: trees that the calls are given.
    """

    def __init__(self, cell: Callable[[Any, Any], Any], z0: Any, x: Any) -> None:
        self.cell, self.has_ended = as_now(cell), False
        named = {f"{name} of the cell": tensor for name, tensor in tensors_of(cell).items()}
        for name, tree in (("z0", z0), ("x", x)):
            leaves = [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree)
            named |= {name if leaf is tree else f"tensor {i} of {name}": leaf for i, leaf in enumerate(leaves)}
        self.read = [(name, tensor, version(tensor)) for name, tensor in named.items() if isinstance(tensor, Tensor)]

    def __call__(self, z: Any, x: Any) -> Any:
        if self.has_ended:
            self._check()
        return self.cell(z, x)

    def end(self, held: list[Tensor]) -> None:
        """End the forward pass, whose graph led to the weights `held`, which a function may close over."""
        self.has_ended, own = True, behind_held()  # kept weights are not computed again
        self.read = [(name, tensor, before) for name, tensor, before in self.read if version(tensor) == before]
        self.read += [(f"a weight {tuple(tensor.shape)} of the cell", tensor, version(tensor)) for tensor in held]
        self.read = [read for read in self.read if read[1] not in own and not hasattr(read[1], "placements")]

    def _check(self) -> None:
        for name, tensor, before in self.read:
            if version(tensor) != before:
                why = f"{name} has been modified by an inplace operation since the forward pass"
                remedy = "the backward pass calls the cell again: do it after the backward pass"
                raise RuntimeError(f"deqfast: {why}, but {remedy}")


class Judge:
    """Judge of the last of several evaluations of f, by the rule of a solver that does not run."""

    def __init__(self, packing: Packing, solver: Solver) -> None:
        self.packing, self.solver, self.evaluations = packing, solver, 0

    def see(self, z: Any, fz: Any) -> None:
        """Take note of an evaluation f(z) = fz, trees like z0."""
        self.evaluations += 1
        self.last = z, fz
        if self.evaluations == 1:
            now = self._evaluated(None)
            self.begun = torch.stack([now.first, now.start]).nan_to_num(nan=torch.inf)

    def _evaluated(self, begun: Tensor | None) -> Evaluation:
        with outside_exports(torch.no_grad()):
            z, fz = map(self.packing.pack, self.last)
            return evaluated(z, fz, self.solver.rule(), begun)

    def solution(self, value: Any) -> Solution:
        """Return a Solution with this value and the residual of the last evaluation."""
        rule, now = self.solver.rule(self.packing.stall_floor(self.last[1])), self._evaluated(self.begun)
        finite = torch.isfinite(now.res_abs)
        status = torch.where(now.measure(rule.absolute) <= rule.tol, Status.ESCAPED, Status.MAX_ITER)
        status = torch.where(now.converged(rule), Status.CONVERGED, status)
        status = torch.where(finite, status, Status.NONFINITE).to(torch.int8)
        iterations = torch.full_like(status, self.evaluations, dtype=torch.int32)
        relative, absolute = (torch.where(finite, measure, torch.inf) for measure in (now.res_rel, now.res_abs))
        measures, calls = (absolute if rule.absolute else relative, relative, absolute), self.evaluations
        return Solution(detached(value), status, iterations, *measures, calls, calls * self.packing.batch)
