"""The registry: what `pytest benchmarks` measures.

From the fully connected cell of the theory (D = 256) over ResNet-18's last stage (128, 8192) to states as large as
MDEQ's (D = 65536); batches of 1 to 256.
"""

from __future__ import annotations

from typing import Any

import torch

import deqfast

from .collapse import CollapseCase
from .entry import Case
from .maps import NEVER
from .ops import BroydenStepCase, CollapseOpCase, FCOpCase, NormOpCase, OpCase, StepCase
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
FC, SMALL, LAST_STAGE, ONE, MDEQ = (128, 256), (256, 1024), (128, 8192), (1, 65536), (32, 65536)


def steps(batch: int, dim: int) -> list[OpCase]:
    """The steps of the solvers, Broyden's from pairs and from steps, and the transposed product; windows full."""
    size: dict[str, Any] = {"batch": batch, "dim": dim}
    return [
        StepCase(op="picard_step", **size),
        StepCase(method="and2", history=6, **size),
        StepCase(method="and2", history=6, history_dtype=BF16, **size),
        StepCase(method="good", history=20, **size),
        BroydenStepCase(**size),
        StepCase(op="multisecant_transposed", method="good", history=20, **size),
    ]


STAGE_IMAGE, MDEQ_IMAGE = (128, 512, 4, 4), (8, 64, 32, 32)
OPS: list[OpCase] = [
    *steps(*FC),
    *steps(*LAST_STAGE),
    *steps(*ONE),
    *steps(*MDEQ),
    *(NormOpCase(op=op, shape=STAGE_IMAGE, dtypes=dtypes)
      for op in ("norm_act", "norm_act_residual") for dtypes in ("fp32", "bf16 beside fp32")),
    *(NormOpCase(op=f"{op}_backward", shape=STAGE_IMAGE) for op in ("norm_act", "norm_act_residual")),
    *(NormOpCase(op=op, shape=MDEQ_IMAGE) for op in ("norm_act", "norm_act_residual")),
    FCOpCase(op="fc_fixed_point", batch=128, dim=256),
    FCOpCase(op="fc_fixed_point", batch=128, dim=256, weight_dtype=BF16),
    FCOpCase(op="fc_vjp", batch=128, dim=1024),
    *(CollapseOpCase(op=op, samples=samples, dim=dim, classes=classes)
      for op in ("class_means", "within_class_scatter")
      for samples, dim, classes in ((50_000, 512, 10), (2000, 8192, 100))),
]  # fmt: skip

SOLVES: list[SolveCase] = [
    *(SolveCase(solver=solver, batch=batch, dim=dim)
      for batch, dim in (LAST_STAGE, SMALL, ONE, MDEQ) for solver in SOLVERS),
    *(SolveCase(solver=solver, batch=FC[0], dim=FC[1], map="fc") for solver in SOLVERS),
]  # fmt: skip

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

COLLAPSE: list[CollapseCase] = [
    CollapseCase(samples=5000, dim=512, classes=10),
    CollapseCase(samples=50_000, dim=512, classes=10),
    CollapseCase(samples=2000, dim=1024, classes=100, dtype=torch.float64),
    CollapseCase(samples=2000, dim=1024, classes=100, dtype=torch.float64, classifier=False),
    CollapseCase(samples=2000, dim=8192, classes=100, dtype=torch.float64, full=True),
    CollapseCase(samples=2000, dim=8192, classes=100, dtype=torch.float64, classifier=False, full=True),
]

CASES: list[Case] = [*OPS, *SOLVES, *FC_SOLVES, *TRAINING, *COLLAPSE, *SCALING]


def pairs(cases: list[Any]) -> list[tuple[Case, str]]:
    """Every case with each of its providers."""
    return [(case, provider) for case in cases for provider in case.providers]


def find(section: str, name: str) -> Case:
    """A case by name; KeyError naming what there is."""
    names = {case.name: case for case in CASES if case.section == section}
    if name not in names:
        raise KeyError(f"section {section!r} has no case {name!r}, only {', '.join(names)}")
    return names[name]
