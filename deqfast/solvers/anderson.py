"""Anderson acceleration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.constants import ANDERSON_I, ANDERSON_II
from .base import check_choice, check_number
from .multisecant import Multisecant


@dataclass(frozen=True)
class Anderson(Multisecant):
    """Anderson acceleration of type II (least squares on the residuals) or I (on the steps).

    history: pairs kept (None: as for ``Broyden``); kind: "II" or "I"; mixing in ]0, 2]: weight of the residual in the
    step; ridge: added to the diagonal of the window matrix scaled to unit columns, so that the solve does not depend on
    the scale of z; history_dtype: None for the state's, or torch.bfloat16, which halves the memory. The rest as in
    ``Solver``.
    """

    history: int | None = 6
    kind: str = "II"
    mixing: float = 1.0
    ridge: float = 1e-6
    history_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("I", "II"))
        check_number("mixing", self.mixing, 0.0, 2.0, low_open=True)
        check_number("ridge", self.ridge, 0.0, 1.0)

    def method(self) -> tuple[int, float, float, float]:
        return ANDERSON_I if self.kind == "I" else ANDERSON_II, 1.0, self.mixing, self.ridge
