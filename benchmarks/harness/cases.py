"""The registry: what `pytest benchmarks` measures.

From the fully connected cell of the theory (D = 256) over ResNet-18's last stage (128, 8192) to states as large as
MDEQ's (D = 65536); batches of 1 to 256.
"""

from __future__ import annotations

from typing import Any

import torch

import deqfast

from .cells import CellSolveCase
from .collapse import CollapseCase
from .entry import Case
from .maps import NEVER
from .ops import BroydenStepCase, FCVjpCase, NormOpCase, OpCase, StepCase, TransposedCase
from .options import OPTIONS, SMALL_OPTIONS
from .scaling import SCALING
from .solves import FCSolveCase, SolveCase
from .training import TOL, TrainingCase

BF16 = torch.bfloat16
ITERATIONS = 20
SOLVERS: tuple[Any, ...] = (
    deqfast.Picard(NEVER, ITERATIONS),
    deqfast.Anderson(NEVER, ITERATIONS),
    deqfast.Anderson(NEVER, ITERATIONS, history_dtype=BF16),
    deqfast.Broyden(NEVER, ITERATIONS),
)
FC, MEDIUM, LAST_STAGE, ONE, MDEQ = (128, 256), (256, 1024), (128, 8192), (1, 65536), (32, 65536)


def steps(batch: int, dim: int) -> list[OpCase]:
    """The steps of the solvers, Broyden's from pairs and from steps, and the transposed product; windows full."""
    size: dict[str, Any] = {"batch": batch, "dim": dim}
    return [
        StepCase(op="picard_step", **size),
        StepCase(method="and2", history=6, **size),
        StepCase(method="and2", history=6, history_dtype=BF16, **size),
        StepCase(method="good", history=20, **size),
        BroydenStepCase(**size),
        TransposedCase(**size),
    ]


def improving(batch: int, dim: int) -> list[OpCase]:
    """Steps that copy the best iterate."""
    size: dict[str, Any] = {"batch": batch, "dim": dim, "improving": True}
    return [
        StepCase(op="picard_step", **size),
        StepCase(method="and2", history=6, history_dtype=BF16, **size),
        StepCase(method="good", history=20, **size),
    ]


GPU: dict[str, Any] = {"devices": ("cuda",)}
STAGE_IMAGE, MDEQ_IMAGE = (128, 512, 4, 4), (8, 64, 32, 32)
OPS: list[OpCase] = [
    *steps(*FC),
    *steps(*LAST_STAGE),
    *steps(*ONE),
    *steps(*MDEQ),
    *improving(*LAST_STAGE),
    *(StepCase(method="good", history=18, batch=batch, dim=dim, **GPU) for batch, dim in (LAST_STAGE, MDEQ)),
    *(
        NormOpCase(op=op, shape=STAGE_IMAGE, dtypes=dtypes)
        for op in ("norm_act", "norm_act_residual")
        for dtypes in ("fp32", "bf16 beside fp32")
    ),
    *(NormOpCase(op=f"{op}_backward", shape=STAGE_IMAGE) for op in ("norm_act", "norm_act_residual")),
    *(NormOpCase(op=op, shape=MDEQ_IMAGE) for op in ("norm_act", "norm_act_residual")),
    FCVjpCase(batch=128, dim=1024),
]

SOLVES: list[SolveCase] = [
    *(
        SolveCase(solver=solver, batch=batch, dim=dim)
        for batch, dim in (LAST_STAGE, MEDIUM, ONE, MDEQ)
        for solver in SOLVERS
    ),
    *(SolveCase(solver=solver, batch=FC[0], dim=FC[1], map="fc") for solver in SOLVERS),
]

FC_SOLVES: list[FCSolveCase] = [
    FCSolveCase(batch=128, dim=256),
    FCSolveCase(batch=128, dim=256, weight_dtype=BF16),
    FCSolveCase(batch=1, dim=256),
    FCSolveCase(batch=128, dim=1024),
]

ANDERSON, BROYDEN, PICARD = deqfast.Anderson(TOL, 40), deqfast.Broyden(TOL, 40), deqfast.Picard(TOL, 40)
TRAINING: list[TrainingCase] = [
    TrainingCase(cell="residual", shape=(32, 128, 4, 4), adjoint="jfb", solver=ANDERSON),
    TrainingCase(cell="residual", shape=(32, 128, 4, 4), adjoint="jfb", solver=BROYDEN),
    TrainingCase(cell="residual", shape=(32, 128, 4, 4), adjoint="implicit", solver=ANDERSON),
    TrainingCase(cell="residual", shape=(32, 128, 4, 4), adjoint="jfb", solver=ANDERSON, precision="bf16"),
    TrainingCase(cell="residual", shape=(4, 64, 32, 32), adjoint="jfb", solver=ANDERSON),
    TrainingCase(cell="residual", shape=(128, 512, 4, 4), adjoint="jfb", solver=BROYDEN, full=True),
    TrainingCase(cell="fc", shape=(128, 256), adjoint="jfb", solver=PICARD),
    TrainingCase(cell="fc", shape=(128, 256), adjoint="implicit", solver=ANDERSON),
]

CELLS = [CellSolveCase(shape=STAGE_IMAGE, solver=solver, **GPU) for solver in SOLVERS[2:]]

COLLAPSE: list[CollapseCase] = [
    CollapseCase(samples=5000, dim=512, classes=10),
    CollapseCase(samples=50_000, dim=512, classes=10),
    CollapseCase(samples=50_000, dim=512, classes=10, classifier=False, **GPU),
    CollapseCase(samples=2000, dim=1024, classes=100, dtype=torch.float64),
    CollapseCase(samples=2000, dim=1024, classes=100, dtype=torch.float64, classifier=False),
    CollapseCase(samples=2000, dim=8192, classes=100, dtype=torch.float64, full=True),
    CollapseCase(samples=2000, dim=8192, classes=100, dtype=torch.float64, classifier=False, full=True),
]

CASES: list[Case] = [*OPS, *SOLVES, *FC_SOLVES, *CELLS, *TRAINING, *COLLAPSE, *OPTIONS, *SCALING]

SMALL_CELL: dict[str, Any] = {"shape": (2, 8, 4, 4)}
SMALL: list[Case] = [
    StepCase(op="picard_step", batch=2, dim=64),
    StepCase(op="picard_step", batch=2, dim=64, improving=True),
    StepCase(method="and2", history=6, batch=9, dim=64),
    StepCase(method="and2", history=6, batch=9, dim=64, improving=True),
    StepCase(method="good", history=6, history_dtype=BF16, batch=1, dim=64),
    TransposedCase(batch=9, dim=64),
    BroydenStepCase(batch=9, dim=64),
    NormOpCase(op="norm_act_residual", shape=(2, 16, 3, 5)),
    FCVjpCase(batch=3, dim=16),
    *(SolveCase(solver=solver, batch=2, dim=64) for solver in SOLVERS),
    SolveCase(solver=SOLVERS[1], batch=2, dim=32, map="fc"),
    FCSolveCase(batch=2, dim=32),
    CellSolveCase(solver=SOLVERS[1], **SMALL_CELL),
    TrainingCase(cell="residual", adjoint="jfb", solver=ANDERSON, **SMALL_CELL),
    TrainingCase(cell="residual", adjoint="implicit", solver=BROYDEN, **SMALL_CELL),
    TrainingCase(cell="fc", shape=(3, 16), adjoint="jfb", solver=PICARD),
    CollapseCase(samples=60, dim=9, classes=3),
    *SMALL_OPTIONS,
]


def find(section: str, name: str) -> Case:
    """A case by name; KeyError naming what there is."""
    names = {case.name: case for case in CASES if case.section == section}
    if name not in names:
        raise KeyError(f"section {section!r} has no case {name!r}, only {', '.join(names)}")
    return names[name]
