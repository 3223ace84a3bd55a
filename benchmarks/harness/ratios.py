"""The ratios of times that the gate compares: ours to a reference, both timed in turns within one run.

A reference is another provider of the same case, or "copy": the time in which the copy of the same round would have
moved the bytes that the case must move. f is subtracted, with its time of the same round, where solver time is meant.
The time is that of the processor, on one thread: whatever else runs on a shared machine has its own.

Two ratios are of the clock on the wall, which asks for a quiet machine: two threads of ours beside one ("one thread"),
where they share the samples of a batch and where they share the chunks of one sample.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

import deqfast
from deqfast.testing import records

from .cases import ITERATIONS, find
from .counted import on_threads
from .entry import Case, Contender
from .gate import MARGIN
from .maps import NEVER
from .record import processor_details
from .solves import solve_case
from .timing import Copy, in_turns

ONE_THREAD = "one thread"
# Without a second thread's gain the ratio would be about 1.8 times as high; others' work costs two threads the more.
MARGINS = {ONE_THREAD: 1.5}
ANDERSON = deqfast.Anderson(NEVER, ITERATIONS)
RATIOS: list[tuple[Case, str]] = [
    *(
        (find("solves", f"{solver}-128x8192"), reference)
        for solver in ("picard", "anderson-m6", "anderson-m6-bf16", "broyden-n20")
        for reference in ("torchdeq", "copy")
    ),
    (find("solves", "picard-128x8192"), "eager"),
    (find("solves", "broyden-n20-128x8192"), ONE_THREAD),
    # One sample, so large that a second thread is worth its start twice over.
    (solve_case(ANDERSON, (1, 1 << 18)), ONE_THREAD),
    # So small that the time is the host's, between one kernel and the next.
    (solve_case(ANDERSON, (8, 256)), "eager"),
    (find("ops", "norm_act_residual-8x64x32x32-fp32"), "torch"),
    (find("fc", "fc-solve-128x256-fp32"), "torchdeq"),
    (find("nc", "nc-5000x512-K10-fp32"), "pinv"),
    (find("nc", "nc-5000x512-K10-fp32"), "copy"),
    (find("training", "residual-anderson-jfb-32x128x4x4"), "explicit"),
]
NAMES = {f"{case.name} / {reference}": (case, reference) for case, reference in RATIOS}


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available() -> list[str]:
    """The ratios that this machine can measure: two threads need two cores."""
    return [name for name, (_, reference) in NAMES.items() if reference != ONE_THREAD or cores() > 1]


def margin(name: str) -> float:
    """What the gate allows the ratio to exceed the baseline's by."""
    return MARGINS.get(NAMES[name][1], MARGIN)


def depends_on() -> str:
    """Machine and versions that ratios can be compared between."""
    machine = ", ".join(
        filter(None, [records.processor(), processor_details(), torch.backends.cpu.get_cpu_capability()])
    )
    versions = f"torch {'.'.join(torch.__version__.split('.')[:2])}, torchdeq {metadata.version('torchdeq')}"
    return f"{machine}, {cores()} cores, {versions}, kernel cpp"


@functools.cache
def copy() -> Copy:
    return Copy()


def pairs(case: Case, reference: str) -> Callable[[int], list[float]]:
    """A function that times n pairs and gives their ratios; the answers of both sides are checked here, once."""
    peer = "cpp" if reference == ONE_THREAD else reference
    with on_threads(1):
        ours = case.contender("cpp", "cpu")
        theirs = Contender(copy()) if reference == "copy" else case.contender(peer, "cpu")
    calls: dict[Any, Callable[[], Any]] = {"ours": ours.call, "theirs": theirs.call}
    calls |= {name: side.f for name, side in (("f", ours), ("their f", theirs)) if side.f is not None}
    clock = time.process_time
    if reference == ONE_THREAD:
        calls |= {name: on_threads(2)(calls[name]) for name in ("ours", "f")}
        clock = time.perf_counter
    # Bytes that the copy moves while it is timed, in units of those that the case must move.
    copied = 2 * copy().source.nbytes / ours.facts["bytes"] if reference == "copy" else 1.0

    def measure(count: int) -> list[float]:
        with on_threads(1):
            times = in_turns(calls, rounds=count, seconds=math.inf, clock=clock)
        ours.verify()
        none = [0.0] * count
        own = [a - f for a, f in zip(times["ours"], times.get("f", none), strict=True)]
        other = [b - f for b, f in zip(times["theirs"], times.get("their f", none), strict=True)]
        return [a * copied / b if b > 0 else math.inf for a, b in zip(own, other, strict=True)]

    return measure
