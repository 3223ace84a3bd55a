"""Verdicts on the paper's claims, whose texts are in claims.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from nc_study.reporting.verdicts import ALPHA, estimate, holm

SEEDS = 5  # fewer seeds decide nothing
HOLDS, FAILS, OPEN = "holds", "does not hold", "not distinguishable"
TEXTS = {row.pop("key"): row for row in csv.DictReader(Path(__file__).with_name("claims.csv").open(encoding="utf-8"))}
"""Source, claim, numbers and reason of each claim by its key; names in braces are filled in by the experiments."""


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


def filled(key: str, **values: object) -> dict[str, str]:
    """Return the texts of a claim with values filled in."""
    return {name: text.format(**values) for name, text in TEXTS[key].items()}


def exact_claim(key: str, verdict: str, seeds: int, **values: object) -> Claim:
    """Make a claim that is judged without statistics."""
    return Claim(verdict=verdict, seeds=seeds, **filled(key, **values))


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


def comparison(
    key: str, differences: Sequence[Sequence[float]], judged: bool = True, greater: bool = False, **values: object
) -> Comparison:
    """Make a comparison with the texts of a claim."""
    texts = filled(key, **values)
    return Comparison(texts["claim"], texts["source"], differences, texts["reason"], judged, greater)


def compare(comparisons: Sequence[Comparison]) -> list[Claim]:
    """Judge claims together: Holm's adjustment of two-sided p-values, each of the mean over tasks of the mean
    differences. Fewer than five seeds in a task decide nothing."""
    estimates = [estimate(each.tasks) if min(map(len, each.tasks)) > 1 else None for each in comparisons]
    adjusted = holm([pooled.p_different if pooled else 1.0 for pooled in estimates])
    claims = []
    for each, pooled, p in zip(comparisons, estimates, adjusted, strict=True):
        seeds, verdict = min(map(len, each.tasks)), OPEN
        numbers = f"{fmean(map(fmean, each.tasks)):+.2f} of one seed" if seeds else "no seed"
        if pooled:
            low, high = pooled.interval
            numbers = f"{pooled.mean:+.2f} [{low:+.2f}, {high:+.2f}], p = {p:.2g}"
            if each.judged and seeds >= SEEDS and p <= ALPHA:
                verdict = HOLDS if (pooled.mean > 0) == each.greater else FAILS
        claims.append(Claim(each.claim, verdict, numbers, seeds, each.source, each.reason))
    return claims
