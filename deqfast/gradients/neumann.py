"""Truncated Neumann series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._checks import check_count, check_number
from ..engine.plan import Plan
from ..solution import Solution
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, for_products, multiplier, present_autocast
from ..torch_internals.dynamo import uncompiled
from .base import Adjoint, Recorded, Rule, attach, confirmed
from .derivative import Derivative, OneStep
from .phantom import Damped, Phantom


@dataclass(frozen=True)
class Neumann(Adjoint):
    """Neumann series: (I - J^T)^-1 replaced by r (I + M + ... + M^(steps-1)), M = r J^T + (1 - r) I, r = relaxation.

    At an exact z* it is ``Phantom``'s gradient, in one evaluation's memory. Source: Geng et al., NeurIPS 2021, (8).

    Args:
        steps: terms, at least 1; steps=1 with relaxation=1 is ``JFB``. Each but the first is a product with J^T.
        relaxation: in (0, 1].

    Raises:
        TypeError, ValueError: an argument is not a number of this range.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.Neumann(steps=5))
        >>> block(torch.randn(4, 3)).sum().backward()
    """

    steps: int = 5
    relaxation: float = 1.0

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_number("relaxation", self.relaxation, 0.0, 1.0, low_open=True)

    def differentiate(self, plan: Plan, solution: Solution) -> tuple[Any, Solution]:
        z, x, broken = plan.without_broken(solution)
        leaves, spec = pytree.tree_flatten(detached(z, requires_grad=True))
        with for_products(plan.cell):
            recorded = Recorded(uncompiled(plan.cell), pytree.tree_unflatten(leaves, spec), x)
        value = attach(solution.value, recorded, _Series(self, recorded.outputs, leaves), broken)
        return value, confirmed(solution, plan.options, z, recorded.outputs)

    def derivative(self, plan: Plan) -> Derivative:
        phantom = Phantom(self.steps, self.relaxation)  # the same at z*
        return OneStep("Neumann", lambda f: Damped(f, phantom))


class _Series(Rule):
    """Truncated series of the gradients, by Horner's rule."""

    def __init__(self, neumann: Neumann, outputs: list[Tensor], leaves: list[Tensor]) -> None:
        super().__init__("Neumann")
        self.neumann, self.outputs, self.leaves = neumann, outputs, leaves
        self.autocast = present_autocast(leaves[0].device.type)

    def pull(self, grads: list[Tensor]) -> list[Tensor]:
        relaxation = self.neumann.relaxation
        u = [relaxation * g for g in grads]
        with self.autocast():
            multiply = multiplier(self.outputs, self.leaves)
            for _ in range(self.neumann.steps - 1):
                products = multiply(u)
                undamped = [g if p is None else p + g for p, g in zip(products, grads, strict=True)]
                u = [v + relaxation * (w - v) for v, w in zip(u, undamped, strict=True)]
        return u
