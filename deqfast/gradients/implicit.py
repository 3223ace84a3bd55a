"""Gradients by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import Plan
from ..solution import Solution
from ..solvers import Anderson, MixedAnderson, Solver, as_solver
from ..torch_internals import autograd, pytree
from ..torch_internals.autograd import Gradients
from ..torch_internals.dynamo import uncompiled
from ..torch_internals.transforms import Members
from .base import Adjoint, Evaluate, Recorded, Rule, attach, confirmed
from .derivative import Attached, Derivative, Linearisation, OnValues, StateFunction, in_dtypes_of, transpose, unfold
from .linear import Captured, LinearSolve
from .linearised import Product

# With 16 pairs Anderson takes as few products as Broyden with its whole history on trained cells, and much less memory.
# At a spectral radius of 0.9 plain iteration gains six digits in 131 products; unused evaluations cost nothing.
DEFAULT_SOLVER = Anderson(rtol=1e-6, max_iter=150, history_size=16)


@dataclass(frozen=True)
class Implicit(Adjoint):
    """Implicit function theorem: solves u = J^T u + g as a fixed point from u = g, then takes one more product.

    The gradient is exact, to the tolerances of both solves. Up to rounding, the residual r = J^T u + g - u of the
    returned u is no longer than J^T g, the residual of JFB's u = g. The error is |u - u*| <= |(I - J^T)^-1| |r|.

    The cell's graph at z* is kept until the backward pass, which needs several products with it. Differentiable any
    number of times: the gradient of a gradient is another implicit solve. After a backward pass
    ``DEQBlock.backward_solution`` is the Solution of its solve. Source: Bai et al., NeurIPS 2019.

    Args:
        solver: the solver of the backward solve or the name of one, with a positive rtol and atol=0, so that the scale
            of the loss does not matter. None: ``Anderson(rtol=1e-6, max_iter=150, history_size=16)``.

    Raises:
        ValueError: `solver` is not a solver or a solver's name, is ``MixedAnderson``, or has an absolute tolerance.

    Examples:
        >>> adjoint = deqfast.Implicit(deqfast.Anderson(rtol=1e-5, max_iter=30))
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=adjoint)
        >>> block(torch.randn(4, 3)).sum().backward()
        >>> bool(block.backward_solution.converged.all())
        True
    """

    solver: str | Solver | None = None

    def __post_init__(self) -> None:
        if self.solver is not None:
            solver = as_solver(self.solver)
            object.__setattr__(self, "solver", solver)
            if solver.atol:
                raise ValueError(f"the solver of Implicit must have a positive rtol and atol=0, got {self.solver}")
            if isinstance(solver, MixedAnderson):
                raise ValueError(f"the solver of Implicit must not be MixedAnderson, which is for states, got {solver}")

    def differentiate(self, plan: Plan, solution: Solution) -> tuple[Any, Solution]:
        z, x, broken = plan.without_broken(solution)
        rule = _Inverted(self._solve(plan), plan.cell, z, x)
        if plan.linearised is not None and rule.recorded.is_differentiable:
            rule.product = plan.linearised(plan.cell, z, x)
        elif plan.graphs is not None and plan.solves is not None:
            ordinary = autograd.multiplier(rule.recorded.outputs, pytree.tree_leaves(rule.z))
            rule.product = Captured(plan.graphs, plan.cell, z, x, ordinary)
        value = attach(plan.forward_value(solution, rule.recorded.outputs, broken), rule.recorded, rule, broken)
        return value, confirmed(solution, plan.options, z, rule.recorded.outputs)

    def derivative(self, plan: Plan) -> Derivative:
        return _Implicitly(self._solve(plan), pytree.tree_structure(plan.z0))

    def _solve(self, plan: Plan) -> LinearSolve:
        solver = self.solver or DEFAULT_SOLVER
        assert isinstance(solver, Solver)  # the constructor has replaced a name
        return LinearSolve.of(plan, solver)


class _Inverted(Rule):
    """u = (I - J^T)^-1 g, with J the Jacobian of `evaluate` in z. Differentiable any number of times.

    The products J^T v of the solve come from compiled code if it exists, else from the recorded evaluation.

    Args:
        solve: solve with the Jacobian.
        evaluate: the map (z, x) -> z.
        z: z*, a tree.
        x: the second argument of `evaluate`.
    """

    has_second_derivatives = True

    def __init__(self, solve: LinearSolve, evaluate: Evaluate, z: Any, x: Any) -> None:
        super().__init__("Implicit")
        # A graph of compiled code may serve a single product, and is not differentiable twice.
        self.solve, self.evaluate, self.x = solve, uncompiled(evaluate), x
        self.z = autograd.detached(z, requires_grad=True)
        with autograd.for_products(evaluate):
            self.recorded = Recorded(self.evaluate, self.z, x)
        self.autocast = autograd.present_autocast(pytree.tree_leaves(z)[0].device.type)
        self.product: Product | Captured | None = None  # compiled, or by a CUDA graph

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self.z)
        multiply = self.product or autograd.multiplier(self.recorded.outputs, leaves)
        with self.autocast():
            return self.solve.transposed()(multiply, grads, spec)

    def pull_members(self, grads: list[Tensor], members: Members) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self.z)

        def products(u: list[Tensor]) -> Gradients:
            pulled = autograd.product(self.recorded.outputs, leaves, unfold(u, members.count), is_grads_batched=True)
            return [None if p is None else p.flatten(0, 1) for p in pulled]

        with self.autocast():
            grads = [g.flatten(0, 1) for g in grads]
            solved = self.solve.transposed()(products, grads, spec, members.count)
        return unfold(solved, members.count)

    def pull_with_graph(self, grads: list[Tensor], sources: Sequence[Tensor]) -> tuple[list[Tensor], Gradients]:
        """u = (I - J^T)^-1 g as a fixed point, u = J(z*, x)^T u + g, which is differentiable in g, z* and x.

        The gradient in a source s is p(z*) = (df/ds)^T u. The recorded evaluation gives it for a constant z*, and thus
        lacks (dp/dz) (dz*/ds) in its derivative. The further gradient p(z*) - p(z), of value zero, supplies this.
        """
        spec = pytree.tree_structure(self.z)
        with torch.no_grad():
            u = pytree.tree_unflatten(self.pull(grads), spec)
        with self.autocast():
            moving = attach(autograd.detached(self.z), self.recorded, self)
            rule = _Inverted(self.solve.transposed(), self._adjoint_map, u, (grads, moving, self.x))
            u = pytree.tree_leaves(attach(u, rule.recorded, rule))
            if not self._is_repeatable():
                return u, [self.refuse(torch.zeros_like(source), sources) for source in sources]
            pairs = zip(self._products(moving, u), self._products(autograd.detached(self.z), u), strict=True)
            gaps = [None if a is None or b is None else a - b for a, b in pairs]
        return u, [None if gap is None else gap - gap.detach() for gap in gaps]

    @torch.no_grad()
    def _is_repeatable(self) -> bool:
        """Return whether the cell, with its hooks, masks and weights, is unchanged since it was recorded."""
        again = autograd.in_order_of(self.z, self.evaluate(autograd.detached(self.z), self.x))
        pairs = [(a, b, 1e3 * torch.finfo(b.dtype).eps) for a, b in zip(again, self.recorded.outputs, strict=True)]
        return all(torch.allclose(a, b, rtol=tol, atol=tol) for a, b, tol in pairs)

    def _products(self, z: Any, u: list[Tensor]) -> Gradients:
        """Products of u with the Jacobian in the sources of an evaluation at z, with a graph."""
        valve = autograd.Valve()
        x = valve(self.x)
        evaluation = autograd.in_order_of(self.z, self.evaluate(valve(z), x))
        with valve.closed():
            return autograd.vjp(evaluation, [*autograd.requiring_grad(x), *self.recorded.held], u, create_graph=True)

    def _adjoint_map(self, u: Any, given: tuple[list[Tensor], Any, Any]) -> Any:
        """u -> J^T u + g with a graph, given (g, z, x)."""
        grads, z, x = given
        with torch.enable_grad():
            z = pytree.tree_map(lambda t: t if t.requires_grad else t.detach().requires_grad_(), z)
            evaluation = autograd.in_order_of(self.z, self.evaluate(z, x))
            products = autograd.vjp(evaluation, pytree.tree_leaves(z), pytree.tree_leaves(u), create_graph=True)
        leaves = [g if p is None else p + g for p, g in zip(products, grads, strict=True)]
        return pytree.tree_unflatten(leaves, pytree.tree_structure(self.z))


class _Implicitly(Derivative):
    """Derivatives by the implicit function theorem, as solves that are differentiable in the same way.

    Tangents are dz = (I - J)^-1 df, with df those of the function at a fixed state. Gradients use the transpose.
    """

    def __init__(self, solve: LinearSolve, spec: pytree.TreeSpec) -> None:
        super().__init__("Implicit")
        self.solve, self.spec = solve, spec

    def pull(self, at: Linearisation, grads: list[Tensor]) -> list[Tensor]:
        return at.pull(self._solved(_Product(at.f, len(grads), transposed=True), grads, at))

    def push(self, at: Linearisation, tangents: list[Tensor]) -> list[Tensor]:
        pushed = at.push(tangents)
        return self._solved(_Product(at.f, len(pushed), transposed=False), pushed, at)

    def _solved(self, product: _Product, right: list[Tensor], at: Linearisation) -> list[Tensor]:
        """Solution of u = product(u) + right."""
        rows = [*at.state, *at.rows]
        solve = self.solve.transposed() if product.transposed else self.solve

        def work(f: Callable[[list[Tensor]], list[Tensor]], right: list[Tensor], members: int) -> list[Tensor]:
            return solve(f, right, self.spec, members)

        u = OnValues.of(work, product, right, rows, at.others, at.members)
        derivative = _Implicitly(solve, self.spec)
        return Attached.of(derivative, _Affine(product), u, [*right, *rows], at.others, at.members)


@dataclass(frozen=True)
class _Product(StateFunction):
    """Product of a state with the Jacobian of f at the state formed by the first `count` tensors of `rows`."""

    f: StateFunction
    count: int
    transposed: bool

    def bind(self, rows: list[Tensor], others: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        z, rest = rows[: self.count], rows[self.count :]
        transposed = torch.func.vjp(lambda z: in_dtypes_of(z, self.f(z, rest, others)), z)[1]
        product = transposed if self.transposed else transpose(transposed, z)
        return lambda state: product(state)[0]

    def folded(self, members: int, dims: list[int | None], randomness: str) -> StateFunction:
        return replace(self, f=self.f.folded(members, dims, randomness))


@dataclass(frozen=True)
class _Affine(StateFunction):
    """Sum of a product and of the first tensors of its `rows`."""

    product: StateFunction

    def __call__(self, state: list[Tensor], rows: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        right, rest = rows[: len(state)], rows[len(state) :]
        return [p + g for p, g in zip(self.product(state, rest, others), right, strict=True)]

    def folded(self, members: int, dims: list[int | None], randomness: str) -> StateFunction:
        return _Affine(self.product.folded(members, dims, randomness))
