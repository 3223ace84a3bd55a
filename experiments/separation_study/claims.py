"""Verdicts on the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from nc_study.reporting.verdicts import ALPHA, estimate, holm

SEEDS = 5  # fewer seeds decide nothing
HOLDS, FAILS, OPEN = "holds", "does not hold", "not distinguishable"


@dataclass(frozen=True)
class Claim:
    """Row of the table of verdicts: a claim with its verdict, the numbers and seeds that it is based on, and the
    reason."""

    claim: str
    verdict: str
    numbers: str
    seeds: int
    source: str  # one of frame.SOURCES: of the task that it was judged on
    reason: str


def within(value: float, tolerance: float) -> str:
    """Judge "this is 0 to rounding"."""
    return HOLDS if value <= tolerance else FAILS


@dataclass(frozen=True)
class Comparison:
    """Claim "the first is less than the second" on trained networks, or that it is `greater`. It has the paired
    differences (first minus second, one for each seed) of every task that it is judged on."""

    claim: str
    source: str
    tasks: Sequence[Sequence[float]]
    reason: str
    judged: bool = True  # False if `reason` says why nothing can be judged
    greater: bool = False


def compare(comparisons: Sequence[Comparison]) -> list[Claim]:
    """Judge claims together: Holm's adjustment of two-sided p-values, each of the mean over tasks of the mean
    differences. Fewer than five seeds in a task decide nothing."""
    found = [estimate(one.tasks) if min(map(len, one.tasks)) > 1 else None for one in comparisons]
    adjusted = holm([one.p_different if one else 1.0 for one in found])
    claims = []
    for one, pooled, p in zip(comparisons, found, adjusted, strict=True):
        seeds = min(map(len, one.tasks))
        verdict = OPEN
        numbers = f"{fmean(map(fmean, one.tasks)):+.2f} of one seed" if seeds else "no seed"
        if pooled:
            low, high = pooled.interval
            numbers = f"{pooled.mean:+.2f} [{low:+.2f}, {high:+.2f}], p = {p:.2g}"
            if one.judged and seeds >= SEEDS and p <= ALPHA:
                verdict = HOLDS if (pooled.mean > 0) == one.greater else FAILS
        claims.append(Claim(one.claim, verdict, numbers, seeds, one.source, one.reason))
    return claims
