"""Warnings about unconverged samples, without waiting for the device."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..engine.device_loop import is_captured
from ..solution import Arriving, Solution, Status, count_statuses
from ..torch_internals.transforms import values

REMEDIES = {
    Status.MAX_ITER: "give the solver more evaluations (max_iter) or a looser tolerance, or make the cell contract "
    "more",
    Status.ESCAPED: "the cell may lack a fixed point: normalise its output, damp the steps or bound its weights",
    Status.NONFINITE: "look for NaN or overflow in x, the parameters or the cell",
    Status.INCONSISTENT: "pass groups= if the cell couples samples of a batch; hold fixed during a solve what changes "
    "the cell between calls, such as dropout",
}
_INSIDE = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[1]))
BLOCK_OPTIONS = (
    "deqfast.diagnose(block, x) says why; return_solution=True and backward_solution report every solve, warn=False "
    "silences"
)


def is_late(status: Tensor) -> bool:
    """Return whether reading `status` would wait for the device; if so, it is read one call late."""
    return status.is_cuda


def warn(text: str) -> None:
    """Warn at the line of the caller's code, outside of torch and deqfast."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


class Notice:
    """Warning about the solves of one kind, given at most once for each status.

    Args:
        kind: "forward" or "backward".
        more: which options report every solve, and silence this warning.
        expected: statuses that cause no warning.
    """

    def __init__(self, kind: str, more: str = BLOCK_OPTIONS, expected: Iterable[Status] = ()) -> None:
        self.kind, self.more = kind, more
        self.asked = [status for status in REMEDIES if status not in expected]
        self.pending: Arriving | None = None

    def look(self, solution: Solution) -> None:
        """Warn if samples of the solution did not converge. On a GPU, check the solution of an earlier call."""
        if not is_late(solution.status):
            self._judge(solution.counts or count_statuses(solution.status))
            return
        if is_captured(solution.status.device):
            return
        if self.pending is not None and self.pending.has_arrived():
            self._judge(self.pending.counts())
            self.pending = None
        if self.asked and self.pending is None:
            self.pending = solution.arriving or Arriving(values(solution.status))

    def _judge(self, counts: list[int]) -> None:
        unsolved = list(filter(counts.__getitem__, self.asked))
        if not unsolved:
            return
        samples, self.asked = sum(counts), [status for status in self.asked if status not in unsolved]
        said = "; ".join(f"{counts[s]} of {samples} samples ended with {s.name}: {REMEDIES[s]}" for s in unsolved)
        warn(f"deqfast: in a {self.kind} solve, {said}. Shown once; {self.more}")

    def __getstate__(self) -> dict[str, object]:
        """State without the counts that a device is still computing."""
        return {**self.__dict__, "pending": None}
