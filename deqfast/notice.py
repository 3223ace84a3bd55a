"""One warning of samples without an answer, without a wait for the device."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from .solution import Solution, Status

_REMEDIES = {
    Status.MAX_ITER: "give the solver more evaluations (max_iter) or a looser tol, or make the cell contract more",
    Status.NONFINITE: "look for NaN or overflow in x, the parameters or the cell",
    Status.INCONSISTENT: "pass groups= if the cell couples the samples of a batch; hold fixed during a solve what "
    "changes from call to call, such as dropout or spectral norm in training",
}
_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
OF_BLOCKS = "return_solution=True and backward_solution tell of every solve, warn=False silences"


def is_late(status: Tensor) -> bool:
    """Answer whether a look at `status` would wait for the device, and is taken one call late."""
    return status.is_cuda


def warn(text: str) -> None:
    """Warn, at the line from which torch or deqfast was called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


class Notice:
    """Warning about the solves of one kind, given at most once.

    Args:
        kind: "forward" or "backward".
        more: what tells of every solve, and how to silence this.
    """

    def __init__(self, kind: str, more: str = OF_BLOCKS) -> None:
        self.kind, self.more, self.is_given = kind, more, False
        self.pending: tuple[Tensor, torch.cuda.Event, int] | None = None

    def look(self, solution: Solution) -> None:
        """Look at the solution, on a GPU at the one before if it has arrived, and warn of what is wrong with it."""
        if self.is_given:
            return
        late = is_late(solution.status)
        if not late and bool(solution.converged.all()):
            return
        counts = torch.stack([(solution.status == status).sum() for status in _REMEDIES])
        if not late:
            self._judge(counts, len(solution.status))
            return
        if self.pending is not None and self.pending[1].query():
            self._judge(self.pending[0], self.pending[2])
            self.pending = None
        if self.pending is None and not self.is_given:
            pinned = torch.empty_like(counts, device="cpu", pin_memory=counts.is_cuda)
            self.pending = (
                pinned.copy_(counts, non_blocking=True),
                torch.cuda.current_stream(counts.device).record_event(),
                len(solution.status),
            )

    def _judge(self, counts: Tensor, samples: int) -> None:
        found = [(number, status) for number, status in zip(counts.tolist(), _REMEDIES, strict=True) if number]
        if not found:
            return
        self.is_given = True
        said = "; ".join(
            f"{number} of {samples} samples {status.name}: {_REMEDIES[status]}" for number, status in found
        )
        warn(f"deqfast: in a {self.kind} solve, {said}. Said once; {self.more}")

    def __getstate__(self) -> dict[str, object]:
        """State without what is under way on a device."""
        return {**self.__dict__, "pending": None}
