"""The linear fixed points of the implicit function theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..execution.functorch import groups_of_members
from ..execution.linearised import Product
from ..execution.plan import Plan, reciprocal
from ..solution import Solution
from ..solve import solve
from ..solvers import Solver
from ..state.groups import Groups
from ..state.norms import sample_norms
from ..state.packing import factors_of
from ..state.rows import known_finite, per_row, rows_of
from ..torch_internals import pytree

Products = Callable[[list[Tensor]], Sequence["Tensor | None"]]
"""u -> A u, with None for zeros."""


@dataclass(frozen=True)
class LinearSolve:
    """Solve of u = A u + g from u = g, sample by sample.

    With J the Jacobian of the cell in z, a gradient has A = J^T and u = (I - J^T)^-1 g. A tangent has A = J. Only
    products with A are needed: by a recorded evaluation, by compiled code, or by torch.func.

    Attributes:
        solver: with atol=0.
        kernel: see ``deqfast.solve``.
        groups: samples of several rows, if any.
        scale: sizes of the tensors of u, if given.
        on_backward: called with the Solution.
    """

    solver: Solver
    kernel: str
    groups: Groups | None
    scale: object
    on_backward: Callable[[Solution], None]

    @classmethod
    def of(cls, plan: Plan, solver: Solver) -> LinearSolve:
        """Solve with the Jacobian at the plan's z*; u has the scale of z."""
        return cls(solver, plan.kernel, plan.groups, plan.scale, plan.on_backward)

    def transposed(self) -> LinearSolve:
        """Solve with the transposed matrix; its u has the inverse scale."""
        return self if self.scale is None else replace(self, scale=reciprocal(self.scale))

    def __call__(
        self, products: Products | Product, right: list[Tensor], spec: pytree.TreeSpec, members: int = 1
    ) -> list[Tensor]:
        """Return u for the right-hand side g = `right`, the leaves of a tree.

        Args:
            products: u -> A u.
            right: g; a row that is not finite is passed on as it is, because a GradScaler must see it.
            spec: structure of the tree.
            members: number of members of a vmap whose rows are in this batch.
        """
        finite, start = None, right
        if not all(map(known_finite, right)):
            finite = torch.stack([torch.isfinite(rows_of(g)).all(dim=1) for g in right]).all(dim=0)
            start = [torch.where(per_row(finite, g), g, torch.zeros_like(g)) for g in right]
        groups = groups_of_members(self.groups, members)
        # The system is linear: with a right-hand side of size 1 the scale of the loss does not matter. Beyond 2^100 the
        # factor would not be representable.
        factors = factors_of(self.scale, spec)
        exponent = torch.frexp(sample_norms(start, groups, maximum=True, factors=factors)).exponent.clamp(-100, 100)
        sizes = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
        of_rows = sizes if groups is None else groups.of_rows(sizes)
        start = [(g / per_row(of_rows, g)).to(g.dtype) for g in start]  # float16 does not represent all sizes
        solution = self._solve(products, start, spec, groups)
        values = [(u * per_row(of_rows, u)).to(u.dtype) for u in pytree.tree_leaves(solution.value)]
        residual = solution.residual_abs * sizes
        self.on_backward(replace(solution, value=pytree.tree_unflatten(values, spec), residual_abs=residual))
        if finite is None:
            return values
        return [torch.where(per_row(finite, g), u, g) for u, g in zip(values, right, strict=True)]

    def _solve(
        self, products: Products | Product, start: list[Tensor], spec: pytree.TreeSpec, groups: Groups | None
    ) -> Solution:
        if isinstance(products, Product):
            return products.solve(start, self.solver, self.kernel)

        def f(u: object) -> object:
            pairs = zip(products(pytree.tree_leaves(u)), start, strict=True)
            return pytree.tree_unflatten([g if p is None else p + g for p, g in pairs], spec)

        return solve(
            f,
            pytree.tree_unflatten(start, spec),
            self.solver,
            self.kernel,
            groups=groups,
            scale=self.scale,
        )
