"""Phantom gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._checks import check_count, check_number
from ..engine.plan import Plan
from ..solution import Solution
from ..torch_internals import pytree
from ..torch_internals.autograd import detached, in_order_of
from .base import Adjoint, Recorded, Rule, attach, confirmed
from .derivative import Derivative, OneStep, StateFunction


@dataclass(frozen=True)
class Phantom(Adjoint):
    """Phantom gradient: backpropagation through a few damped calls z <- (1 - r) z + r f(z) from z*, r = relaxation.

    In cost and in accuracy it lies between ``JFB`` (steps=1, relaxation=1) and ``Implicit`` (unlimited steps). It takes
    the memory of `steps` evaluations of the cell. Source: Geng et al., NeurIPS 2021.

    With relaxation=1.0 this is the gradient of looped models through `steps` plain loops from z*, which need not be
    exact (``bptt_through`` of Attractor, arXiv 2605.12466). The value remains z*, as in evaluation. For the value of
    the last loop, solve without gradient and call the cell `steps` times.

    Args:
        steps: number of calls, at least 1.
        relaxation: weight of f(z) in a step, in (0, 1].

    Raises:
        TypeError, ValueError: an argument is not a number of this range.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.FCCell(3, 8), adjoint=deqfast.Phantom(steps=3, relaxation=0.8))
        >>> block(torch.randn(4, 3)).sum().backward()
    """

    steps: int = 5
    relaxation: float = 0.5

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_number("relaxation", self.relaxation, 0.0, 1.0, low_open=True)

    def differentiate(self, plan: Plan, solution: Solution) -> tuple[Any, Solution]:
        z, x, broken = plan.without_broken(solution)
        first: list[Tensor] = []

        def damped_calls(z: Any, x: Any) -> Any:
            leaves, spec = pytree.tree_flatten(z)

            def call(leaves: list[Tensor]) -> list[Tensor]:
                values = in_order_of(z, plan.cell(pytree.tree_unflatten(leaves, spec), x))
                first[:] = first or values
                return values

            return pytree.tree_unflatten(self.damped(call, leaves), spec)

        recorded = Recorded(damped_calls, detached(z), x)
        value = attach(plan.forward_value(solution, recorded.outputs, broken), recorded, Rule("Phantom"), broken)
        return value, confirmed(solution, plan.options, z, first)

    def damped(self, f: Callable[[list[Tensor]], list[Tensor]], z: list[Tensor]) -> list[Tensor]:
        """Value of the last damped call of f, starting at z."""
        for _ in range(self.steps):
            pairs = zip(z, f(z), strict=True)
            z = [(b if self.relaxation == 1 else a + self.relaxation * (b - a)).to(a.dtype) for a, b in pairs]
        return z

    def derivative(self, plan: Plan) -> Derivative:
        return OneStep("Phantom", lambda f: Damped(f, self))


@dataclass(frozen=True)
class Damped(StateFunction):
    """Damped calls of a function."""

    f: StateFunction
    phantom: Phantom

    def __call__(self, state: list[Tensor], rows: list[Tensor], others: list[Tensor]) -> list[Tensor]:
        return self.phantom.damped(lambda z: self.f(z, rows, others), state)
