"""Jacobian-free backpropagation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..engine.plan import Plan
from ..solution import Solution
from ..torch_internals.autograd import detached
from .base import Adjoint, Recorded, Rule, attach, confirmed
from .derivative import Derivative, OneStep

_RULE = Rule("JFB")


@dataclass(frozen=True)
class JFB(Adjoint):
    """Jacobian-free backpropagation: one vector-Jacobian product of the cell at z*, with (I - J^T)^-1 replaced by I.

    The cheapest gradient, and a descent direction if f contracts. Source: Fung et al., AAAI 2022.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.JFB())  # the default
        >>> block(torch.randn(4, 3)).square().sum().backward()
    """

    def differentiate(self, plan: Plan, solution: Solution) -> tuple[Any, Solution]:
        z, x, broken = plan.without_broken(solution)
        recorded = Recorded(plan.cell, detached(z), x)
        value = attach(solution.value, recorded, _RULE, broken)
        return value, confirmed(solution, plan.options, z, recorded.outputs)

    def derivative(self, plan: Plan) -> Derivative:
        return OneStep("JFB")
