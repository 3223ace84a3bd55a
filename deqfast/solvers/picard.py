"""Damped fixed-point (Picard) iteration."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..ops import Kernel
from .base import Solver, State, check_number


@dataclass(frozen=True)
class Picard(Solver):
    """z <- z + damping (f(z) - z), for contractive f. damping lies in ]0, 2]; the rest as in ``Solver``."""

    damping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("damping", self.damping, 0.0, 2.0, low_open=True)

    def init(self, z: Tensor, kernel: Kernel, keep_inverse: bool = False) -> State:
        return State.start(z, kernel)

    def advance(self, state: State, fz: Tensor, k: int, last: bool) -> None:
        state.kernel.op("picard_step")(state.z, fz, *state.monitor(), *self._rule(state, k, last), self.damping)
