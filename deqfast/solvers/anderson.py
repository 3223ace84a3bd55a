"""Anderson acceleration."""

from dataclasses import dataclass

import torch

from .._checks import check_choice, check_number
from ..kernels.constants import ANDERSON_I, ANDERSON_II
from .multisecant import Multisecant


@dataclass(frozen=True)
class Anderson(Multisecant):
    """Anderson acceleration of type II (least squares on the residuals) or I (on the steps).

    Source: Fang and Saad, Numer. Linear Algebra Appl. 16 (2009).

    Args:
        rtol, max_iter, atol, norm: see ``Solver``.
        history_size: pairs kept, at least 1, at most 32 on triton and cuda; None: as for ``Broyden``.
        kind: "II" or "I".
        relaxation: weight of the residual in the step, in (0, 2].
        ridge: added to the diagonal of the window matrix scaled to unit columns, so that the solve does not depend on
            the scale of z; in [0, 1].
        history_dtype: dtype of the pairs: None for the state's, or torch.bfloat16, which halves the memory.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> f = lambda z: 0.9 * torch.cos(z) + 1
        >>> deqfast.solve(f, torch.zeros(2, 3), deqfast.Anderson(rtol=1e-5, history_size=4))
        Solution(2 CONVERGED, evaluations=7)
    """

    history_size: int | None = 6
    kind: str = "II"
    relaxation: float = 1.0
    ridge: float = 1e-6
    history_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("I", "II"))
        check_number("relaxation", self.relaxation, 0.0, 2.0, low_open=True)
        check_number("ridge", self.ridge, 0.0, 1.0)

    def method(self) -> tuple[int, float, float, float]:
        return ANDERSON_I if self.kind == "I" else ANDERSON_II, 1.0, self.relaxation, self.ridge
