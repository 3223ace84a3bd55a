"""Gradients by the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..execution.functorch import At, Derivative, Map, Task, attached, for_members, in_dtypes_of, jvp, transpose, unfold
from ..execution.linearised import Product
from ..solution import Solution
from ..solve import solve
from ..solvers import Broyden, Solver, as_solver
from ..state.norms import sample_norms
from ..state.packing import factors_of
from ..state.rows import per_row, rows_of
from ..torch_internals.autograd import (
    Gradients,
    Valve,
    detached,
    for_products,
    in_order_of,
    present_autocast,
    product,
    requiring_grad,
    vjp,
)
from ..torch_internals.dynamo import uncompiled
from ..torch_internals.transforms import Members
from .attach import Evaluate, Recorded, Rule, attach
from .base import Adjoint, Problem, reciprocal
from .confirm import confirmed

# With all of its history Broyden takes the fewest products to a gradient that is right to 1e-5 where J has a spectral
# radius of 0.95 to 0.99; what converges before is not charged for the rest.
DEFAULT_SOLVER = Broyden(tol=1e-6, max_iter=100)

Products = Callable[[list[Tensor]], Sequence["Tensor | None"]]


@dataclass(frozen=True)
class Implicit(Adjoint):
    """Implicit function theorem: u = J^T u + g is solved as a fixed point, started at u = g, then one product more.

    The exact gradient, to the tolerance of both solves. Whatever u the solve returns, its residual r = J^T u + g - u is
    no longer than J^T g, the residual of JFB's u = g, up to rounding; and |u - u*| <= |(I - J^T)^-1| |r|.

    The cell's graph at z* is kept until the backward pass, which needs several products with it. Differentiable any
    number of times: the gradient of a gradient is an implicit solve again. After a backward pass
    ``DEQBlock.backward_solution`` is the Solution of its solve. Source: Bai et al., NeurIPS 2019.

    Args:
        solver: the solver of the backward solve or the name of one, with stop="rel" and atol=0, so that the scale of
            the loss changes nothing; None: ``Broyden(tol=1e-6, max_iter=100)``, whatever the forward's.

    Raises:
        ValueError: `solver` is no solver, or has an absolute tolerance.

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
            solver = as_solver(self.solver)
            object.__setattr__(self, "solver", solver)
            if solver.stop != "rel" or solver.atol:
                raise ValueError(f"the solver of Implicit must have stop='rel' and atol=0, got {self.solver}")

    def differentiate(self, problem: Problem, solution: Solution) -> tuple[Any, Solution]:
        z, x, broken = problem.without_broken(solution)
        settings = _Settings(as_solver(self.solver or DEFAULT_SOLVER), problem.options, problem.on_backward)
        rule = _Inverted(settings, problem.cell, z, x)
        if problem.linearised is not None and rule.recorded.is_differentiable:
            rule.product = problem.linearised(problem.cell, z, x)
        value = attach(problem.forward_value(solution, rule.recorded.outputs, broken), rule.recorded, rule, broken)
        return value, confirmed(solution, problem, z, rule.recorded.outputs)

    def derivative(self, problem: Problem) -> Derivative:
        settings = _Settings(as_solver(self.solver or DEFAULT_SOLVER), problem.options, problem.on_backward)
        return _Implicitly(settings, pytree.tree_structure(problem.z0))


@dataclass(frozen=True)
class _Settings:
    """Solves with the Jacobian of a map, first and higher alike; `options` are those of solves for its state."""

    solver: Solver
    options: dict[str, Any]
    on_backward: Callable[[Solution], None]

    def transposed(self) -> _Settings:
        """Settings of solves with the transposed Jacobian, whose state is a gradient."""
        return replace(self, options={**self.options, "scale": reciprocal(self.options.get("scale"))})


class _Inverted(Rule):
    """Gradients pass (I - J^T)^-1, J the Jacobian of `evaluate` in z. Differentiable any number of times.

    Args:
        settings: of the solves.
        evaluate: the map (z, x) -> z.
        z: z*, a tree.
        x: the second argument of `evaluate`.
    """

    def __init__(self, settings: _Settings, evaluate: Evaluate, z: Any, x: Any) -> None:
        super().__init__("Implicit")
        # A graph of compiled code may serve a single product, and is not differentiable twice.
        self.settings, self.evaluate, self.x = settings, uncompiled(evaluate), x
        self.z = detached(z, requires_grad=True)
        with for_products(evaluate):
            self.recorded = Recorded(self.evaluate, self.z, x)
        self.autocast = present_autocast(pytree.tree_leaves(z)[0].device.type)
        self.product: Product | None = None  # compiled

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self.z)
        multiply = self.product or partial(product, self.recorded.outputs, leaves)
        with self.autocast():
            return _invert(multiply, grads, spec, self.settings.transposed())

    def pull_members(self, grads: list[Tensor], members: Members) -> list[Tensor]:
        leaves, spec = pytree.tree_flatten(self.z)

        def products(u: list[Tensor]) -> Gradients:
            found = product(self.recorded.outputs, leaves, unfold(u, members.count), is_grads_batched=True)
            return [None if p is None else p.flatten(0, 1) for p in found]

        with self.autocast():
            grads = [g.flatten(0, 1) for g in grads]
            solved = _invert(products, grads, spec, self.settings.transposed(), members.count)
        return unfold(solved, members.count)

    def pull_with_graph(self, grads: list[Tensor], sources: Sequence[Tensor]) -> tuple[list[Tensor], Gradients]:
        """u = (I - J^T)^-1 g, the fixed point of u -> J^T u + g and as such differentiable in g, z* and x.

        Past the recorded evaluation goes how its products with u move with z*: the difference of the products at a z*
        that moves with the sources, and at one that does not, which is zero.
        """
        spec = pytree.tree_structure(self.z)
        with torch.no_grad():
            u = pytree.tree_unflatten(self.pull(grads), spec)
        with self.autocast():
            moving = attach(detached(self.z), self.recorded, self)
            rule = _Inverted(self.settings.transposed(), self._adjoint_map, u, (grads, moving, self.x))
            u = pytree.tree_leaves(attach(u, rule.recorded, rule))
            if not self._is_repeatable():
                return u, [self.refuse(torch.zeros_like(source), sources) for source in sources]
            pairs = zip(self._products(moving, u), self._products(detached(self.z), u), strict=True)
            gaps = [None if a is None or b is None else a - b for a, b in pairs]
        return u, [None if gap is None else gap - gap.detach() for gap in gaps]

    @torch.no_grad()
    def _is_repeatable(self) -> bool:
        """Return whether the cell is still the function that was recorded: hooks, masks or weights may have changed."""
        again = in_order_of(self.z, self.evaluate(detached(self.z), self.x))
        return all(
            torch.allclose(a, b, rtol=1e3 * torch.finfo(b.dtype).eps, atol=1e3 * torch.finfo(b.dtype).eps)
            for a, b in zip(again, self.recorded.outputs, strict=True)
        )

    def _products(self, z: Any, u: list[Tensor]) -> Gradients:
        """Products of u with the Jacobian in the sources of an evaluation at z, with a graph."""
        valve = Valve()
        x = valve(self.x)
        evaluation = in_order_of(self.z, self.evaluate(valve(z), x))
        with valve.closed():
            return vjp(evaluation, [*requiring_grad(x), *self.recorded.held], u, create_graph=True)

    def _adjoint_map(self, u: Any, given: tuple[list[Tensor], Any, Any]) -> Any:
        """u -> J^T u + g with a graph, given (g, z, x)."""
        grads, z, x = given
        with torch.enable_grad():
            z = pytree.tree_map(lambda t: t if t.requires_grad else t.detach().requires_grad_(), z)
            evaluation = in_order_of(self.z, self.evaluate(z, x))
            products = vjp(evaluation, pytree.tree_leaves(z), pytree.tree_leaves(u), create_graph=True)
        leaves = [g if p is None else p + g for p, g in zip(products, grads, strict=True)]
        return pytree.tree_unflatten(leaves, pytree.tree_structure(self.z))


def _invert(
    product: Products | Product,
    grads: list[Tensor],
    spec: pytree.TreeSpec,
    settings: _Settings,
    members: int = 1,
) -> list[Tensor]:
    """u = product(u) + grads for a linear product, solved with the rows of so many members of a vmap in one batch."""
    # A gradient that is not finite is not solved for but passed on: a GradScaler must see it.
    finite = torch.stack([torch.isfinite(rows_of(g)).all(dim=1) for g in grads]).all(dim=0)
    start = [torch.where(per_row(finite, g), g, torch.zeros_like(g)) for g in grads]
    # The system is linear: solved with gradients of size 1, the scale of the loss is none of the solver's business.
    options = for_members(settings.options, members)
    groups = options.get("groups")
    # Beyond 2^100 the factor would not be representable.
    factors = factors_of(options.get("scale"), spec)
    exponent = torch.frexp(sample_norms(start, groups, maximum=True, factors=factors)).exponent.clamp(-100, 100)
    rows = exponent if groups is None else groups.of_rows(exponent)
    start = [torch.ldexp(g, per_row(-rows, g)) for g in start]
    solution = _solve_affine(product, start, spec, settings.solver, options)
    values = [torch.ldexp(u, per_row(rows, u)) for u in pytree.tree_leaves(solution.value)]
    residual = torch.ldexp(solution.residual_abs, exponent)
    settings.on_backward(replace(solution, value=pytree.tree_unflatten(values, spec), residual_abs=residual))
    return [torch.where(per_row(finite, g), u, g) for u, g in zip(values, grads, strict=True)]


def _solve_affine(
    product: Products | Product, start: list[Tensor], spec: pytree.TreeSpec, solver: Solver, options: dict[str, Any]
) -> Solution:
    """u = product(u) + start, from `start`."""
    if isinstance(product, Product):
        return product.solve(start, solver, options["kernel"])

    def f(u: Any) -> Any:
        products = product(pytree.tree_leaves(u))
        return pytree.tree_unflatten([g if p is None else p + g for p, g in zip(products, start, strict=True)], spec)

    return solve(f, pytree.tree_unflatten(start, spec), solver, **options)


class _Implicitly(Derivative):
    """Derivatives by the implicit function theorem, as solves that are differentiable in the same way.

    dz = (I - J)^-1 (the map's derivative in all but the state), and its transpose for gradients.
    """

    def __init__(self, settings: _Settings, spec: pytree.TreeSpec) -> None:
        self.settings, self.spec = settings, spec

    def pull(self, base: Map, grads: list[Tensor], at: At) -> list[Tensor]:
        u = self._solve(_Product(base, len(grads), transposed=True), grads, at)
        return torch.func.vjp(at.of_given(base), at.given)[1](u)[0]

    def push(self, base: Map, tangents: list[Tensor], at: At) -> list[Tensor]:
        pushed = jvp(at.of_given(base), at.given, tangents)
        return self._solve(_Product(base, len(pushed), transposed=False), pushed, at)

    def _solve(self, product: _Product, right: list[Tensor], at: At) -> list[Tensor]:
        """u = product(u) + right."""
        rows = [*at.state, *at.rows]
        derivative = _Implicitly(self.settings.transposed(), self.spec) if product.transposed else self
        solved = Task(product, derivative._work, at.members).run(right, rows, at.others)
        return attached(derivative, _Affine(product), solved, [*right, *rows], at.others, at.members)

    def _work(self, f: Callable[[list[Tensor]], list[Tensor]], right: list[Tensor], members: int) -> list[Tensor]:
        return _invert(f, right, self.spec, self.settings, members)


@dataclass(frozen=True)
class _Product(Map):
    """Product of a state with the Jacobian of `base` at the `count` tensors of its state, with which `rows` begin."""

    base: Map
    count: int
    transposed: bool

    def bind(self, rows: list[Tensor], others: list[Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
        z, rest = rows[: self.count], rows[self.count :]
        transposed = torch.func.vjp(lambda z: in_dtypes_of(z, self.base(z, rest, others)), z)[1]
        product = transposed if self.transposed else transpose(transposed, z)
        return lambda state: product(state)[0]

    def folded(self, members: int, dims: list[int | None], randomness: str) -> Map:
        return replace(self, base=self.base.folded(members, dims, randomness))


@dataclass(frozen=True)
class _Affine(Map):
    """Sum of a product and of what its `rows` begin with."""

    product: Map

    def __call__(self, state: list[Tensor], rows: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        right, rest = rows[: len(state)], rows[len(state) :]
        return [p + g for p, g in zip(self.product(state, rest, others), right, strict=True)]

    def folded(self, members: int, dims: list[int | None], randomness: str) -> Map:
        return _Affine(self.product.folded(members, dims, randomness))
