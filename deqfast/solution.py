"""What a solve returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torch import Tensor


class Status(IntEnum):
    """How a sample's solve ended; `message` says it in a sentence."""

    MAX_ITER = 0
    CONVERGED = 1
    NONFINITE = 2
    STALLED = 3

    @property
    def message(self) -> str:
        return _MESSAGES[self]


_MESSAGES = {
    Status.MAX_ITER: "The evaluations of f ran out before the tolerance was met; the best iterate is returned.",
    Status.CONVERGED: "The residual met the tolerance.",
    Status.NONFINITE: "f returned a value that is not finite; the best finite iterate is returned.",
    Status.STALLED: "The residual reached the rounding floor of a low-precision f above the tolerance.",
}


@dataclass(frozen=True)
class Solution:
    """The outcome of a solve for a batch of B samples, all without gradient.

    value: like z0; per sample the iterate whose residual is reported: the converged one, else the best finite one,
        else z0.
    status: (B,) int8 of ``Status``.
    iterations: (B,) int32, the values of f the sample used until its status was set.
    residual_rel, residual_abs: (B,) |f(z) - z| / |f(z)| and |f(z) - z| at `value`; infinite if f was never finite.
    residual: (B,) that of the two by which the solver stopped.
    evaluations: calls of f in the solve, without the gradient's.
    sample_evaluations: samples that these calls held, evaluations * B unless finished ones were left out.
    transposed_inverse: maps v like z0 to an estimate of (I - J^T)^-1 v, J the Jacobian of f at `value`, from the
        history of the solve; None where it was not kept.
    trace: (evaluations, B) residual of the best iterate after every evaluation, or None where it was not asked for.
    """

    value: Any
    status: Tensor
    iterations: Tensor
    residual: Tensor
    residual_rel: Tensor
    residual_abs: Tensor
    evaluations: int
    sample_evaluations: int
    trace: Tensor | None = None
    transposed_inverse: Callable[[Any], Any] | None = None

    @property
    def converged(self) -> Tensor:
        """(B,) bool: the samples whose residual met the tolerance."""
        return self.status == Status.CONVERGED

    def __repr__(self) -> str:
        ended = self.status.tolist()
        counts = ", ".join(f"{ended.count(status)} {status.name}" for status in Status if status in ended)
        return f"Solution({counts or 'empty batch'}, evaluations={self.evaluations})"
