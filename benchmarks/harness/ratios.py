"""The ratios of times that the gate compares: ours to a reference, both timed in turns within one run.

A reference is another provider of the same case, or "copy": the time in which the copy of the same round would have
moved the bytes that the case must move. f is subtracted, with its time of the same round, where solver time is meant.
The time is that of the processor, on one thread: whatever else runs on a shared machine has its own. What several
threads gain, and what a call sleeps, is told by the suite alone.
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

from .cases import find
from .counted import one_thread
from .entry import Contender
from .record import processor
from .timing import Copy, in_turns

PROVIDER = "cpp"
# (section, case, reference)
RATIOS = [
    *(("solves", f"{solver}-128x8192", reference)
      for solver in ("picard", "anderson-m6", "anderson-m6-bf16", "broyden-n20") for reference in ("torchdeq", "copy")),
    ("fc", "fc-solve-128x256-fp32", "torchdeq"),
    ("nc", "nc-5000x512-K10-fp32", "pinv"),
    ("nc", "nc-5000x512-K10-fp32", "copy"),
    ("training", "residual-anderson-jfb-32x128x4x4", "explicit"),
]  # fmt: skip


def depends_on() -> str:
    available = deqfast.backends()[PROVIDER]
    kernel = f"kernel {PROVIDER}" if available else f"no kernel {PROVIDER} ({available.reason})"
    try:
        peer = f"torchdeq {metadata.version('torchdeq')}"
    except metadata.PackageNotFoundError:
        peer = "no torchdeq"
    machine = f"{processor()} ({torch.backends.cpu.get_cpu_capability()})"
    return f"{machine}, {os.cpu_count()} cores, torch {'.'.join(torch.__version__.split('.')[:2])}, {peer}, {kernel}"


@functools.cache
def copy() -> Copy:
    return Copy()


def name_of(case: str, reference: str) -> str:
    return f"{case} / {reference}"


def pairs(section: str, case: str, reference: str) -> Callable[[int], list[float]]:
    """A function that times n pairs and gives their ratios; the answers of both sides are checked here, once."""
    found = find(section, case)
    with one_thread():
        ours = found.contender(PROVIDER, "cpu")
        theirs = Contender(copy()) if reference == "copy" else found.contender(reference, "cpu")
    calls: dict[Any, Callable[[], Any]] = {"ours": ours.call, "theirs": theirs.call}
    calls |= {name: side.f for name, side in (("f", ours), ("their f", theirs)) if side.f is not None}
    # Bytes that the copy moves while it is timed, in units of those that the case must move.
    copied = 2 * copy().source.nbytes / ours.facts["bytes"] if reference == "copy" else 1.0

    def measure(count: int) -> list[float]:
        with one_thread():
            times = in_turns(calls, rounds=count, seconds=math.inf, clock=time.process_time)
        ours.verify()
        none = [0.0] * count
        own = [a - f for a, f in zip(times["ours"], times.get("f", none), strict=True)]
        other = [b - f for b, f in zip(times["theirs"], times.get("their f", none), strict=True)]
        return [a * copied / b if b > 0 else math.inf for a, b in zip(own, other, strict=True)]

    return measure
