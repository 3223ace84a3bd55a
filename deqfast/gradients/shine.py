"""Gradients by the inverse estimate of the forward solve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._checks import check_number
from ..engine.plan import Plan, run
from ..engine.solve import Inverse
from ..solution import Solution
from ..solvers.multisecant import Multisecant
from ..state.norms import sample_norms
from ..state.packing import factors_of
from ..state.rows import per_row
from ..torch_internals import pytree
from ..torch_internals.autograd import detached
from .base import Adjoint, Recorded, Rule, attach, confirmed


@dataclass(frozen=True)
class SHINE(Adjoint):
    """Sharing of the inverse estimate: as ``JFB``, with (I - J^T)^-1 estimated from the history of the forward solve.

    The history is kept until the backward pass. SHINE costs one more small kernel than JFB, and no solve. Source: Ramzi
    et al., ICLR 2022, extended here to the whole multisecant family.

    Args:
        fallback: largest length of a sample's gradient relative to JFB's, at least 1; JFB's replaces a longer one. On a
            linear cell of spectral radius 0.9 the paper's 1.3 always falls back to JFB; 5 is nearer to the exact one.

    Raises:
        TypeError, ValueError: `fallback` is not as above; in a call, the solver is not Anderson or Broyden.

    Examples:
        >>> solver = deqfast.Broyden(rtol=1e-5, max_iter=30)
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), solver, deqfast.SHINE())
        >>> block(torch.randn(4, 3)).sum().backward()
    """

    fallback: float = 5.0

    def __post_init__(self) -> None:
        check_number("fallback", self.fallback, 1.0)

    def __call__(self, plan: Plan) -> tuple[Any, Solution]:
        if not plan.is_differentiated:
            return super().__call__(plan)
        if not isinstance(plan.solver, Multisecant):
            raise ValueError(f"SHINE needs the history of Anderson or Broyden, got {plan.solver}")
        plan = replace(plan, options=plan.options.keeping)
        solution = run(plan)
        inverse, solution = solution.inverse, solution.changed(inverse=None)  # whose history lives with the graph only
        assert inverse is not None
        z, x, broken = plan.without_broken(solution)
        recorded = Recorded(plan.cell, detached(z), x)
        rule = _Shared(self.fallback, solution, plan, inverse)
        return attach(solution.value, recorded, rule, broken), confirmed(solution, plan.options, z, recorded.outputs)


class _Shared(Rule):
    """Product of the gradients with the inverse estimate; a sample with too long a product keeps its gradient."""

    def __init__(self, fallback: float, solution: Solution, plan: Plan, inverse: Inverse) -> None:
        super().__init__("SHINE")
        self.fallback, self.groups, self.inverse = fallback, plan.groups, inverse
        self.parts = plan.options.state_group
        self.spec = pytree.tree_structure(solution.value)
        self.factors = factors_of(plan.options.linear(plan.solver)[1].scale, self.spec)

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        shared = pytree.tree_leaves(self.inverse(pytree.tree_unflatten(grads, self.spec)))
        norms = partial(sample_norms, groups=self.groups, factors=self.factors, parts=self.parts)
        lengths, plain = norms(shared), norms(grads)
        trusted = lengths <= self.fallback * plain
        trusted = trusted if self.groups is None else self.groups.per_row(trusted)
        return [torch.where(per_row(trusted, u), u, g) for u, g in zip(shared, grads, strict=True)]
