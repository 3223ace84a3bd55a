"""Damped fixed-point (Picard) iteration."""

from dataclasses import dataclass

from torch import Tensor

from .._checks import check_number
from ..ops import Kernel
from .base import Solver, State


@dataclass(frozen=True)
class Picard(Solver):
    """Damped fixed-point iteration z <- z + relaxation (f(z) - z), for contractive f; keeps no history.

    Args:
        rtol, max_iter, atol, norm: see ``Solver``.
        relaxation: length of the step, in (0, 2].

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> deqfast.solve(lambda z: 0.5 * z + 1, torch.zeros(2, 3), deqfast.Picard(rtol=1e-4, max_iter=50))
        Solution(2 CONVERGED, evaluations=14)
    """

    relaxation: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("relaxation", self.relaxation, 0.0, 2.0, low_open=True)

    def init(self, z: Tensor, kernel: Kernel) -> State:
        return State.start(z, kernel)

    def operation(self, state: State) -> tuple[str, tuple[Tensor, ...], tuple[float, ...]]:
        return "picard_step", (), (self.relaxation,)
