"""Cases of how time and memory grow: one variable at a time around 32 samples of 8192 elements and 20 iterations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import deqfast

from .maps import NEVER
from .record import Row
from .solves import SolveCase

SIZES = {
    "batch": [2**k for k in range(9)],
    "dim": [4**k for k in range(4, 9)],
    "history": [2**k for k in range(6)],
    "iterations": [2, 4, 8, 16, 32, 60],
}


@dataclass(frozen=True, kw_only=True)
class ScalingCase(SolveCase):
    """A point of a curve. axis: the column that changes along it; label: of the solver."""

    section = "scaling"
    providers = SolveCase.providers
    peers = SolveCase.peers
    axis: str
    label: str

    @property
    def name(self) -> str:
        return f"{self.label}-{self.axis}-{self.size()[self.axis]}".replace(" ", "-")

    def size(self) -> Row:
        window = {"history": getattr(self.solver, "history", 0)}
        return super().size() | window | {"axis": self.axis, "solver": self.label}

    def allowed(self) -> float:
        """That of other solves; fewer iterations reach little, and what diverges is not timed."""
        return super().allowed() if self.solver.max_iter >= 20 else 1.0


def solvers(iterations: int, history: int | None) -> dict[str, Any]:
    """The solvers of a point, with a tolerance that stops none; history None: 6 pairs of Anderson, Broyden's all."""
    anderson = deqfast.Anderson(NEVER, iterations, history=history or 6)
    return ({} if history else {"picard": deqfast.Picard(NEVER, iterations)}) | {
        "anderson": anderson,
        "anderson bf16 history": replace(anderson, history_dtype=torch.bfloat16),
        "broyden": deqfast.Broyden(NEVER, iterations, history=history or min(iterations, 32)),
    }


def curves() -> Iterator[ScalingCase]:
    for axis, sizes in SIZES.items():
        iterations = 40 if axis == "history" else 20  # 40: a window of 32 pairs is full for a while
        for x in sizes:
            point = {"batch": 32, "dim": 8192, "iterations": iterations, "history": None} | {axis: x}
            for label, solver in solvers(point["iterations"], point["history"]).items():
                shape = {"batch": point["batch"], "dim": point["dim"]}
                yield ScalingCase(full=True, axis=axis, label=label, solver=solver, **shape)


SCALING = list(curves())
