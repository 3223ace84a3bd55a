"""Which constants of ``deqfast.kernels.config`` make Triton's sweeps over the history fastest on this GPU.

``run`` times full windows with every value of a constant, and CUDA's kernels next to them. ``decide`` states the
decision. Processes compile the kernels side by side before anything is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from .cases import BF16, FC, LAST_STAGE, MDEQ, SINGLE
from .entry import Case, Contender
from .ops import step_case, transposed_case
from .record import Row
from .suite import parts_of
from .timing import in_turns

TOLERANCE = 0.03  # of the least time: the first value within it is taken
CUDA_LEAD = 1.3  # a kernel of Triton may take this many times as long as CUDA's


class Choice(NamedTuple):
    """A constant, its values with the preferred one first, and the cases that decide."""

    constant: str
    values: tuple[float, ...]
    cases: tuple[Case, ...]


CHOICES = {  # the most decisive first
    "broyden": Choice(
        "SWEEP_WARPS", (4, 8), (step_case("good", *LAST_STAGE, 18), *(step_case("good", *s, 20) for s in (MDEQ, FC)))
    ),
    "transposed": Choice("TRANSPOSED_WARPS", (4, 8), tuple(transposed_case(*s) for s in (SINGLE, LAST_STAGE, FC))),
    "anderson-bf16": Choice(
        "SWEEP_WARPS", (4, 8, 16), tuple(step_case("and2", *s, 6, BF16) for s in (LAST_STAGE, MDEQ, FC))
    ),
    "anderson": Choice("SWEEP_WARPS", (4, 8, 16), (step_case("and2", *LAST_STAGE, 6),)),
    "shared": Choice(
        "MIN_COLUMNS", (4096, 1024), (step_case("good", *SINGLE, 20), step_case("and2", *SINGLE, 6, BF16))
    ),
    "parts": Choice("TRANSPOSED_COLUMNS", (1024, 2048), (transposed_case(*SINGLE), transposed_case(*MDEQ))),
    "float64": Choice("SHARE_OF_SUMS", (0.3, 1.0), (step_case("good", *LAST_STAGE, 20, dtype=torch.float64),)),
}


@contextmanager
def setting(constant: str, value: Any) -> Iterator[None]:
    """Plans made here have this value of a constant of ``config``."""
    from deqfast.kernels import config, multisecant_step

    before = getattr(config, constant)
    setattr(config, constant, value)
    for plans in (multisecant_step._PLANS, multisecant_step._TRANSPOSED_PLANS):
        plans._plans.clear()
    try:
        yield
    finally:
        setattr(config, constant, before)


def compile_kernels(name: str, i: int) -> None:
    """Fill Triton's cache with the kernels of a case."""
    choice = CHOICES[name]
    for value in choice.values:
        with setting(choice.constant, value):
            choice.cases[i].contender("triton", "cuda")


def timed(choice: Choice, case: Case) -> Row:
    """Times in us of each value and of CUDA's kernel, and the error of the first value's kernels."""
    calls: dict[Any, Callable[[], Any]] = {}
    made: list[Contender] = []
    for value in choice.values:
        with setting(choice.constant, value):
            made.append(case.contender("triton", "cuda"))
            calls[value] = parts_of(made[-1], "cuda")["whole"]
    made.append(case.contender("cuda", "cuda"))
    calls["cuda"] = parts_of(made[-1], "cuda")["whole"]
    times = in_turns(calls, "cuda", seconds=1.0)
    for contender in made:
        contender.verify()
    microseconds = {str(key): 1e6 * statistics.median(seconds) for key, seconds in times.items()}
    return {"case": case.name, "us": microseconds, "error": made[0].facts["error"]}


def decide(rows: list[Row]) -> dict[str, Any]:
    """The value of each constant, if all its cases were timed; and the cases that are slower than they may be.

    The first value whose sum over the cases is within ``TOLERANCE`` of the least is taken. `slow`: the kernels of the
    chosen value, by the ratio to CUDA's time. Take the kernels if it is empty.
    """
    chosen: dict[str, Any] = {}
    slow: dict[str, float] = {}
    for name, choice in CHOICES.items():
        own = [row["us"] for row in rows if row["choice"] == name and "us" in row]
        if len(own) < len(choice.cases):
            continue
        sums = {value: sum(us[str(value)] for us in own) for value in choice.values}
        taken = next(value for value in choice.values if sums[value] <= (1 + TOLERANCE) * min(sums.values()))
        chosen[name] = {choice.constant: taken}
        ratios = {case.name: us[str(taken)] / us["cuda"] for case, us in zip(choice.cases, own, strict=True)}
        slow |= {case: ratio for case, ratio in ratios.items() if ratio > CUDA_LEAD}
    return {"chosen": chosen, "slow": slow}


def run(seconds: float) -> dict[str, Any]:
    """Time what fits in these seconds. `rows`, the decision, and in `left_out` the cases that did not fit."""
    deadline = time.monotonic() + seconds
    jobs = [(name, i) for name, choice in CHOICES.items() for i in range(len(choice.cases))]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), get_context("spawn")) as pool:
        for job in [pool.submit(compile_kernels, *job) for job in jobs]:
            job.result()
    rows: list[Row] = []
    left_out: list[str] = []
    for name, i in jobs:
        case = CHOICES[name].cases[i]
        if time.monotonic() > deadline:
            left_out.append(case.name)
            continue
        try:
            rows.append({"choice": name, **timed(CHOICES[name], case)})
        except Exception as error:  # one case must not cost the others their rows
            rows.append({"choice": name, "case": case.name, "fault": f"{type(error).__name__}: {error}"})
    return {"rows": rows, **decide(rows), "left_out": left_out}
