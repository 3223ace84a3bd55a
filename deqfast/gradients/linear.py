"""The linear fixed points of the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import Plan
from ..engine.runners.cuda_graph import Graphs
from ..engine.solve import Options, Solve, Solves
from ..solution import Solution
from ..solvers import Solver
from ..state.norms import sample_norms
from ..state.packing import factors_of
from ..state.rows import all_finite, known_finite, per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, for_products, in_order_of, multiplier
from ..torch_internals.dynamo import uncompiled
from .derivative import for_members
from .linearised import Product

Products = Callable[[list[Tensor]], Sequence["Tensor | None"]]
"""u -> A u, with None for zeros."""


@dataclass(frozen=True)
class Captured:
    """u -> J^T u at z for a solve in a CUDA graph, which evaluates cell(z, x) in its own memory."""

    graphs: Graphs
    cell: Any
    z: Any
    x: Any
    ordinary: Products  # without a graph


def _affine(products: Products, right: list[Tensor], spec: pytree.TreeSpec) -> Callable[[Any], Any]:
    """u -> A u + right, for trees of this structure."""

    def f(u: Any) -> Any:
        if isinstance(u, Tensor):  # without a tree, which takes longer
            product = products([u])[0]
            return right[0] if product is None else product + right[0]
        pairs = zip(products(pytree.tree_leaves(u)), right, strict=True)
        return pytree.tree_unflatten([g if p is None else p + g for p, g in pairs], spec)

    return f


def _linearised(cell: Any, at: tuple[Any, Any], right: Any) -> Callable[[Any], Any]:
    """u -> J^T u + right, by an evaluation of the cell at (z, x)."""
    z, evaluate = detached(at[0], requires_grad=True), uncompiled(cell)
    with torch.enable_grad(), for_products(cell):
        outputs = in_order_of(z, evaluate(z, at[1]))
    return _affine(multiplier(outputs, pytree.tree_leaves(z)), *pytree.tree_flatten(right))


@dataclass(frozen=True)
class LinearSolve:
    """Solve of u = A u + g from u = g, sample by sample.

    With J the Jacobian of the cell in z, a gradient has A = J^T and u = (I - J^T)^-1 g. A tangent has A = J. Only
    products with A are needed: by a recorded evaluation, by compiled code, or by torch.func.
    """

    options: Options  # of the solve; the solver has atol=0
    for_transpose: Options  # of the solve with the transposed matrix, whose u has the inverse scale
    solves: Solves | None  # keeps the compiled solves, if given
    on_backward: Callable[[Solution], None]  # called with the Solution

    @classmethod
    def of(cls, plan: Plan, solver: Solver) -> LinearSolve:
        """Solve with the Jacobian at the plan's z*; u has the scale of z."""
        return cls(*plan.options.linear(solver), plan.solves, plan.on_backward)

    def transposed(self) -> LinearSolve:
        """Solve with the transposed matrix."""
        return LinearSolve(self.for_transpose, self.options, self.solves, self.on_backward)

    def __call__(
        self, products: Products | Product | Captured, right: list[Tensor], spec: pytree.TreeSpec, members: int = 1
    ) -> list[Tensor]:
        """Return u for the right-hand side g = `right`, the leaves of a tree.

        Args:
            products: u -> A u.
            right: g; a row that is not finite is passed on as it is, because a GradScaler must see it.
            spec: structure of the tree.
            members: number of members of a vmap whose rows are in this batch.
        """
        finite, start = None, right
        parts = self.options.state_group
        if parts is not None or not all(map(known_finite, right)):
            finite = all_finite(right, parts)
            start = [torch.where(per_row(finite, g), g, torch.zeros_like(g)) for g in right]
        options = self.options if members == 1 else for_members(self.options, members)
        groups = options.groups
        # With a right-hand side of size 1 the loss's scale does not matter. Factors above 2^100 would overflow.
        factors = factors_of(options.scale, spec)
        exponent = torch.frexp(sample_norms(start, groups, True, factors, parts)).exponent.clamp(-100, 100)
        sizes = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        rows = sizes if groups is None else groups.per_row(sizes)
        start = [(g / per_row(rows, g)).to(g.dtype) for g in start]  # float16 does not represent all sizes
        solution = self._solve(products, start, spec, options)
        values = [(u * per_row(rows, u)).to(u.dtype) for u in pytree.tree_leaves(solution.value)]
        residual = solution.residual_abs * sizes
        self.on_backward(solution.changed(value=pytree.tree_unflatten(values, spec), residual_abs=residual))
        if finite is None:
            return values
        return [torch.where(per_row(finite, g), u, g) for u, g in zip(values, right, strict=True)]

    def _solve(
        self, products: Products | Product | Captured, start: list[Tensor], spec: pytree.TreeSpec, options: Options
    ) -> Solution:
        if isinstance(products, Product):
            return products.solve(start, options)
        if isinstance(products, Captured):
            captured, z0 = products, pytree.tree_unflatten(start, spec)
            assert self.solves is not None  # as always in a block
            solve, at = self.solves.of(options, z0), (captured.z, captured.x)
            ordinary = partial(self._solve, captured.ordinary, start, spec, options)
            return captured.graphs.solve(solve, captured.cell, at, z0, ordinary, _linearised)
        z0 = pytree.tree_unflatten(start, spec)
        kept = self.solves if options is self.options else None
        return (Solve(z0, options) if kept is None else kept.of(options, z0))(_affine(products, start, spec), z0)
