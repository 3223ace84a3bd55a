"""Verdicts on the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nc_study.reporting.verdicts import ALPHA, estimate

SEEDS = 5  # fewer decide nothing
HOLDS, FAILS, OPEN = "holds", "does not hold", "not distinguishable"


@dataclass(frozen=True)
class Claim:
    """A claim with its verdict, the numbers and seeds that this rests on, and the reason."""

    claim: str
    source: str  # one of frame.SOURCES: what the task it was judged on is
    verdict: str
    numbers: str
    seeds: int
    reason: str


def within(value: float, tolerance: float) -> str:
    """Judge "this is 0 to rounding"."""
    return HOLDS if value <= tolerance else FAILS


def less(differences: Sequence[float]) -> tuple[str, str]:
    """Judge "the first is less than the second" by paired differences, first less second, one for each seed.

    Returns the verdict, by Student's 95 % interval of five seeds or more, and the mean with that interval in words.
    """
    if len(differences) < 2:
        return OPEN, f"{differences[0]:+.2f} of one seed" if differences else "no seed"
    found = estimate([differences])
    low, high = found.interval
    undecided = len(differences) < SEEDS or found.p_different > ALPHA
    verdict = OPEN if undecided else HOLDS if found.mean < 0 else FAILS
    return verdict, f"{found.mean:+.2f} [{low:+.2f}, {high:+.2f}]"
