"""One warning of samples without an answer, without a wait for the device."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .solution import Solution, Status

_REMEDIES = {
    Status.MAX_ITER: "give the solver more evaluations (max_iter) or a looser tolerance, or make the cell contract "
    "more",
    Status.ESCAPED: "the cell may have no fixed point: normalise its output, damp the steps or bound its weights",
    Status.NONFINITE: "look for NaN or overflow in x, the parameters or the cell",
    Status.INCONSISTENT: "pass groups= if the cell couples the samples of a batch; hold fixed during a solve what "
    "changes from call to call, such as dropout or spectral norm in training",
}
_INSIDE = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))
OF_BLOCKS = "return_solution=True and backward_solution report every solve, warn=False silences"


def is_late(status: Tensor) -> bool:
    """Return whether a look at `status` would wait for the device, and is taken one call late."""
    return status.is_cuda


def warn(text: str) -> None:
    """Warn, at the line from which torch or deqfast was called."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


@dataclass
class _Counts:
    """Samples of a solve by status, of those asked for; on a GPU they are there once the event has arrived."""

    asked: list[Status]
    numbers: Tensor
    samples: int
    arrived: Any = None  # an event


class Notice:
    """Warning about the solves of one kind, given at most once for each status.

    Args:
        kind: "forward" or "backward".
        more: what tells of every solve, and how to silence this.
    """

    def __init__(self, kind: str, more: str = OF_BLOCKS) -> None:
        self.kind, self.more = kind, more
        self.given: set[Status] = set()
        self.pending: _Counts | None = None

    def look(self, solution: Solution) -> None:
        """Look at the solution, on a GPU at the one before if it has arrived, and warn of what is wrong with it."""
        asked = [status for status in _REMEDIES if status not in self.given]
        if solution.counts is not None and not is_late(solution.status):
            if asked:
                self._judge({status: solution.counts[status] for status in asked}, len(solution.status))
            return
        if self.pending is not None and self.pending.arrived.query():
            self._judge(dict(zip(self.pending.asked, self.pending.numbers.tolist(), strict=True)), self.pending.samples)
            self.pending = None
        if not asked or self.pending is not None:
            return
        counts = torch.stack([(solution.status == status).sum() for status in asked])
        pinned = torch.empty_like(counts, device="cpu", pin_memory=counts.is_cuda).copy_(counts, non_blocking=True)
        self.pending = _Counts(asked, pinned, len(solution.status))
        self.pending.arrived = torch.cuda.current_stream(counts.device).record_event()

    def _judge(self, counts: dict[Status, int], samples: int) -> None:
        found = {status: number for status, number in counts.items() if number and status not in self.given}
        if not found:
            return
        self.given.update(found)
        said = "; ".join(f"{n} of {samples} samples {status.name}: {_REMEDIES[status]}" for status, n in found.items())
        warn(f"deqfast: in a {self.kind} solve, {said}. Said once; {self.more}")

    def __getstate__(self) -> dict[str, object]:
        """State without what is under way on a device."""
        return {**self.__dict__, "pending": None}
