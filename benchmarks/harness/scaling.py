"""Cases of how time and memory grow: one variable at a time around 32 samples of 8192 elements and 20 iterations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

import deqfast

from .counters import memory
from .entry import Case, Contender, kernel_of
from .maps import NEVER, Contraction
from .record import Row
from .solves import SolveCase

BATCH, DIM, ITERATIONS = 32, 8192, 20
LONG = 40  # iterations, so that a window of 32 pairs is full for a while
SIZES = {
    "batch": [2**k for k in range(9)],
    "dim": [4**k for k in range(4, 9)],
    "dim, one sample": [4**k for k in range(4, 11)],
    "history": [2**k for k in range(6)],
    "iterations": [2, 4, 8, 16, 32, 60],
}
SAMPLES = 2  # that are solved in float64, too
# By how much the residual may be above that of the same solve in float64; Broyden's jump near the floor of fp32.
ALLOWED, FLOOR = 1.25, 1e-4


@dataclass(frozen=True, kw_only=True)
class ScalingCase(SolveCase):
    """A point of a curve. axis: the column that changes along it; series: which curve; label: of the solver."""

    section = "scaling"
    providers = SolveCase.providers
    peers = SolveCase.peers
    axis: str
    series: str
    label: str

    @property
    def name(self) -> str:
        return f"{self.label}-{self.series}-{self.size()[self.axis]}".replace(", ", "-").replace(" ", "-")

    def size(self) -> Row:
        window = {"history": getattr(self.solver, "history", 0)}
        return super().size() | window | {"axis": self.axis, "series": self.series, "solver": self.label}

    def allowed(self) -> float:
        """Against the same solve of a few samples in float64, as few iterations or pairs reach little."""
        solver = self.solver
        if getattr(solver, "history_dtype", None) is not None:
            solver = replace(solver, history_dtype=None)
        exact = Contraction(self.batch, self.dim)
        exact.c, exact.eigenvalues = exact.c[:SAMPLES].double(), exact.eigenvalues.double()
        solution = deqfast.solve(exact, torch.zeros_like(exact.c), solver, "torch")
        return ALLOWED * max(exact.residual(solution.value), FLOOR)


@dataclass(frozen=True, kw_only=True)
class GradientMemoryCase(Case):
    """Memory of forward and backward of a residual cell by iterations: what a gradient keeps of the trajectory."""

    section = "scaling"
    providers = ("cpp", "triton", "cuda")
    peers = ()
    adjoint: str
    iterations: int
    shape: tuple[int, ...] = (8, 32, 16, 16)

    @property
    def name(self) -> str:
        return f"{self.adjoint}-gradient-{self.iterations}"

    def size(self) -> Row:
        batch, *rest = self.shape
        columns = {"axis": "iterations", "series": "gradient", "solver": self.adjoint, "iterations": self.iterations}
        return {"batch": batch, "dim": torch.Size(rest).numel(), "dtype": "fp32"} | columns

    def contender(self, provider: str, device: str) -> Contender:
        solver = deqfast.Anderson(NEVER, self.iterations)
        adjoints = {
            "jfb": deqfast.JFB(),
            "implicit": deqfast.Implicit(solver),
            "unrolled": deqfast.Unrolled(steps=self.iterations),
        }
        torch.manual_seed(0)
        cell, x = deqfast.ResidualCell(self.shape[1]).to(device), torch.randn(self.shape).to(device)
        block = deqfast.DEQBlock(cell, solver, adjoints[self.adjoint], kernel_of(provider, device).name)

        def step() -> None:
            block.zero_grad()
            block(x).square().mean().backward()

        step()
        return Contender(step, {"peak_bytes": memory(step)[1]})


def solvers(axis: str, x: int) -> Iterator[tuple[str, Any]]:
    """The solvers of a point, with a tolerance that stops none."""
    iterations = x if axis == "iterations" else LONG if axis == "history" else ITERATIONS
    window = x if axis == "history" else None
    if window is None:
        yield "picard", deqfast.Picard(NEVER, iterations)
    anderson = deqfast.Anderson(NEVER, iterations, history=window or 6)
    yield "anderson", anderson
    yield "anderson bf16 history", replace(anderson, history_dtype=torch.bfloat16)
    yield "broyden", deqfast.Broyden(NEVER, iterations, history=window or min(iterations, 32))


def curves() -> Iterator[ScalingCase]:
    for series, sizes in SIZES.items():
        axis, _, one = series.partition(", ")
        for x in sizes:
            shape = {"batch": 1 if one else BATCH, "dim": DIM} | ({axis: x} if axis in ("batch", "dim") else {})
            for label, solver in solvers(axis, x):
                yield ScalingCase(full=True, axis=axis, series=series, label=label, solver=solver, **shape)


SCALING: list[Case] = [
    *curves(),
    *(
        GradientMemoryCase(full=True, adjoint=adjoint, iterations=count)
        for adjoint in ("jfb", "implicit", "unrolled")
        for count in SIZES["iterations"]
    ),
]
