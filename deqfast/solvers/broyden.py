"""Broyden's method."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from .base import check_choice, check_number
from .multisecant import Multisecant


@dataclass(frozen=True)
class Broyden(Multisecant):
    """Broyden's method on f(z) - z, from the inverse Jacobian -I.

    history: pairs kept (None: max_iter, at most 20); a full window slides, which is Broyden restarted from -I on its
    newest pairs. kind: "good" or "bad" (Broyden's first and second update); step in ]0, 2]: length of the step;
    history_dtype: None for the state's, or torch.bfloat16. The rest as in ``Solver``.
    """

    history: int | None = None
    kind: str = "good"
    step: float = 1.0
    history_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, ("good", "bad"))
        check_number("step", self.step, 0.0, 2.0, low_open=True)

    def method(self) -> tuple[int, float, float, float]:
        return reference.BROYDEN_GOOD if self.kind == "good" else reference.BROYDEN_BAD, self.step, 1.0, 0.0
