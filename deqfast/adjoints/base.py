"""Base of the adjoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._checks import ChecksKeywords
from ..execution.choose import choose
from ..execution.functorch import Derivative, attach_derivative
from ..execution.plan import Plan
from ..solution import Solution


@dataclass(frozen=True)
class Adjoint(ChecksKeywords):
    """Base of the adjoints, which attach a gradient to the value of a solve.

    A subclass is a frozen dataclass of its settings and defines ``differentiate``, for torch.func also ``derivative``.
    """

    def __call__(self, plan: Plan) -> tuple[Any, Solution]:
        """Value of the plan, with its gradient if one is recorded, and the Solution of the forward solve."""
        solution = choose(plan)(plan)
        if plan.context == "torch.func":
            return attach_derivative(plan, solution, self.derivative(plan)), solution
        if not plan.is_differentiated:
            return solution.value, solution
        return self.differentiate(plan, solution)

    def differentiate(self, plan: Plan, solution: Solution) -> tuple[Any, Solution]:
        """``solution.value`` with its gradient, and the solution as the gradient's evaluation confirms it."""
        raise NotImplementedError

    def derivative(self, plan: Plan) -> Derivative:
        """Derivative of the value under torch.func and in forward-mode AD; raises unless a subclass defines it."""
        return Derivative(type(self).__name__)
