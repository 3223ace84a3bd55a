"""Registry of the cases that `pytest benchmarks` measures.

From the fully connected cell of the theory (D = 256) over ResNet-18's last stage (128, 8192) to states as large as
MDEQ's (D = 65536); batches of 1 to 256.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import deqfast

from .calls import call_case
from .collapse import collapse_case
from .entry import Case
from .maps import NEVER
from .ops import broyden_step_case, fc_vjp_case, norm_case, step_case, transposed_case
from .rivals import dense, elementwise, rival_case
from .solves import fc_case, solve_case
from .textbook import textbook_case
from .training import TOL, gradient, training_case

BF16 = torch.bfloat16
ITERATIONS = 20
SOLVERS: tuple[Any, ...] = (
    deqfast.Picard(NEVER, ITERATIONS),
    deqfast.Anderson(NEVER, ITERATIONS),
    deqfast.Anderson(NEVER, ITERATIONS, history_dtype=BF16),
    deqfast.Broyden(NEVER, ITERATIONS),
)
FC, MEDIUM, LAST_STAGE, SINGLE, MDEQ = (128, 256), (256, 1024), (128, 8192), (1, 65536), (32, 65536)
STAGE_IMAGE, MDEQ_IMAGE = (128, 512, 4, 4), (8, 64, 32, 32)
GPU: dict[str, Any] = {"devices": ("cuda",)}


def ops() -> Iterator[Case]:
    """Steps of the solvers with full windows, Broyden's from pairs and from steps; ops of the cells."""
    for size in (FC, LAST_STAGE, SINGLE, MDEQ):
        yield step_case(None, *size)
        yield step_case("and2", *size, 6)
        yield step_case("and2", *size, 6, BF16)
        yield step_case("good", *size, 20)
        yield broyden_step_case(*size)
        yield transposed_case(*size)
    for size in (LAST_STAGE, MDEQ):
        yield step_case("good", *size, 18, **GPU)
    for op in ("norm_act", "norm_act_residual"):
        yield norm_case(op, STAGE_IMAGE)
        yield norm_case(op, STAGE_IMAGE, "bf16 with fp32")
        yield norm_case(f"{op}_backward", STAGE_IMAGE)
        yield norm_case(op, MDEQ_IMAGE)
    yield fc_vjp_case(128, 1024)


def solves() -> Iterator[Case]:
    for solver in SOLVERS:
        for shape in (LAST_STAGE, MEDIUM, SINGLE, MDEQ):
            yield solve_case(solver, shape)
        yield solve_case(solver, FC, "fc")
    for batch, dim, dtype in ((128, 256, torch.float32), (128, 256, BF16), (1, 256, torch.float32)):
        yield fc_case(batch, dim, dtype)
    yield fc_case(128, 1024)
    for solver in SOLVERS[2:]:
        yield solve_case(solver, STAGE_IMAGE, "residual", **GPU)


def rivals() -> Iterator[Case]:
    for solver in (SOLVERS[0], SOLVERS[3], SOLVERS[1]):  # a graph by hand of the last could fail, and spoil the next
        yield rival_case(solver, *FC, dense, **GPU)
        for size in ((1, 64), (32, 256), (128, 1024)):
            yield rival_case(solver, *size, dense)
        for size in (LAST_STAGE, (128, 65536)):
            yield rival_case(solver, *size, elementwise)


TEXTBOOK = [textbook_case(128, dim, tol) for dim in (256, 1024) for tol in (1e-3, 1e-5)]
ANDERSON, BROYDEN, PICARD = deqfast.Anderson(TOL, 40), deqfast.Broyden(TOL, 40), deqfast.Picard(TOL, 40)
SMALL_IMAGE = (32, 128, 4, 4)
TRAINING = (
    training_case("residual", SMALL_IMAGE, "jfb", ANDERSON),
    training_case("residual", SMALL_IMAGE, "jfb", BROYDEN),
    training_case("residual", SMALL_IMAGE, "implicit", ANDERSON),
    training_case("residual", SMALL_IMAGE, "jfb", ANDERSON, "bf16"),
    training_case("residual", (4, 64, 32, 32), "jfb", ANDERSON),
    training_case("fc", FC, "jfb", PICARD),
    training_case("fc", FC, "implicit", ANDERSON),
)


def collapse() -> Iterator[Case]:
    """Metrics of features; large ones only with --full, because their pseudo-inverse takes minutes."""
    yield collapse_case(5000, 512, 10)
    yield collapse_case(50_000, 512, 10)
    yield collapse_case(50_000, 512, 10, classifier=False, **GPU)
    for dim, full in ((1024, False), (8192, True)):
        for classifier in (True, False):
            yield collapse_case(2000, dim, 100, torch.float64, classifier, full=full)


LOOSE = deqfast.Broyden(1e-4, 60)
OPTIONS = (
    gradient("fc", FC, LOOSE),
    gradient("linear", FC, LOOSE),
    gradient("residual", (8, 32, 8, 8), LOOSE),
    gradient("residual", (8, 32, 8, 8), deqfast.Anderson(1e-4, 60)),
)
CALLS = [
    call_case(shape, solver, mode)
    for shape in ((1, 64), (32, 64), (8, 256))
    for solver in (deqfast.Picard, deqfast.Anderson, deqfast.Broyden)
    for mode in ("no-grad", "jfb", "implicit")
]
CASES: list[Case] = [*ops(), *solves(), *TRAINING, *collapse(), *OPTIONS, *CALLS, *rivals(), *TEXTBOOK]

CELL = (2, 8, 4, 4)
SMALL: list[Case] = [
    step_case(None, 2, 64),
    step_case("and2", 9, 64, 6),
    step_case("good", 1, 64, 6, BF16),
    transposed_case(9, 64),
    broyden_step_case(9, 64),
    norm_case("norm_act_residual", (2, 16, 3, 5)),
    fc_vjp_case(3, 16),
    *(solve_case(solver, (2, 64)) for solver in SOLVERS),
    solve_case(SOLVERS[1], (2, 32), "fc"),
    fc_case(2, 32),
    solve_case(SOLVERS[1], CELL, "residual"),
    rival_case(SOLVERS[1], 3, 16, dense),
    textbook_case(3, 16, 1e-3),
    training_case("residual", CELL, "jfb", ANDERSON),
    training_case("residual", CELL, "implicit", BROYDEN),
    training_case("fc", (3, 16), "jfb", PICARD),
    call_case((2, 16), deqfast.Anderson, "implicit"),
    collapse_case(60, 9, 3),
    gradient("fc", (3, 16), LOOSE),
]
