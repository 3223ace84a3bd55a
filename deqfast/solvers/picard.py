"""Damped fixed-point (Picard) iteration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .._checks import check_number
from ..ops import Kernel
from .base import Solver, State


@dataclass(frozen=True)
class Picard(Solver):
    """Damped fixed-point iteration z <- z + damping (f(z) - z), for contractive f; keeps no history.

    Args:
        tol: bound on the residual, positive.
        max_iter: calls of f, at least 1.
        stop: "rel" for the residual |f(z) - z| / |f(z)|, "abs" for |f(z) - z|; with `atol` see ``Solver``.
        atol: absolute tolerance next to the relative one, see ``Solver``.
        norm: the norm |.|, see ``Solver``.
        damping: length of the step, in ]0, 2].

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> deqfast.solve(lambda z: 0.5 * z + 1, torch.zeros(2, 3), deqfast.Picard(tol=1e-4, max_iter=50))
        Solution(2 CONVERGED, evaluations=14)
    """

    damping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("damping", self.damping, 0.0, 2.0, low_open=True)

    def init(self, z: Tensor, kernel: Kernel, keep_inverse: bool = False) -> State:
        return State.start(z, kernel)

    def operation(self, state: State) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
        return "picard_step", (), (self.damping,)
