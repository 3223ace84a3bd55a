"""What the paired differences between the networks say to each claim of the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy import stats

from ..paper import Claim
from ..record import GROUPS, NetworkResult
from .runs import Group

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not distinguishable"
SEEDS_NEEDED = 3
CONFIDENCE = 0.95
ALIKE = math.log(1.25)
"""Two metrics are alike if their ratio lies between 1/1.25 and 1.25: the bounds of bioequivalence tests. The paper,
which says "comparable", gives none."""


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval for the mean of at least two values."""
    mean = statistics.fmean(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    return mean - half, mean + half


def difference(claim: Claim, explicit: NetworkResult, deq: NetworkResult) -> float | None:
    """Return DEQ - explicit, or log(DEQ / explicit) where they are said to be alike; None where it is not defined."""
    before, after = explicit.quantity(claim.quantity), deq.quantity(claim.quantity)
    if before is None or after is None:
        return None
    if claim.expected != "alike":
        return after - before
    return math.log(after / before) if before > 0 and after > 0 else None


def judge_interval(low: float, high: float, expected: str) -> str:
    """Judge an expectation by the ends of an interval of differences."""
    if expected == "alike":
        if low > ALIKE or high < -ALIKE:
            return FAILS
        return HOLDS if low >= -ALIKE and high <= ALIKE else UNDECIDED
    if low <= 0 <= high:
        return UNDECIDED
    return HOLDS if (low > 0) == (expected == "higher") else FAILS


def judge_signs(means: Sequence[float], expected: str) -> str | None:
    """Judge by a two-sided sign test of the settings' means; None where it cannot tell: equal signs in six settings are
    the fewest that it tells from chance, and no signs can show likeness."""
    positive, negative = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
    count, alpha = positive + negative, 1 - CONFIDENCE
    if expected == "alike" or 2 * 0.5**count > alpha:
        return None
    if stats.binomtest(positive, count).pvalue > alpha:
        return UNDECIDED
    return HOLDS if (positive > negative) == (expected == "higher") else FAILS


def judge(group: Group, claim: Claim) -> tuple[str, str]:
    """Return the verdict on a claim, and the numbers it rests on. Settings with three or more seeds decide, each by
    its interval: the claim holds if it does in all, and not if the opposite is found in one. Where they leave it open,
    and without such settings, the signs of all the settings' means are tested."""
    measured = []
    for setting in group.settings:
        found = [difference(claim, *pair) for pair in group.pairs(setting)]
        known = [value for value in found if value is not None]
        if known and (setting.majority is None) == claim.balanced:
            measured.append(known)
    if not measured:
        return "not enough runs (0)", "no pair of networks with the same seed"
    means = [statistics.fmean(values) for values in measured]
    strong = [judge_interval(*t_interval(one), claim.expected) for one in measured if len(one) >= SEEDS_NEEDED]
    pairs = sum(map(len, measured))
    if FAILS in strong:
        verdict = FAILS
    elif set(strong) == {HOLDS}:
        verdict = HOLDS
    else:
        verdict = judge_signs(means, claim.expected) or (UNDECIDED if strong else f"not enough runs ({pairs})")
    numbers = f"{_mean(claim, means)} on average over {len(means)} settings ({pairs} pairs); "
    numbers += f"higher in {sum(mean > 0 for mean in means)}, lower in {sum(mean < 0 for mean in means)}"
    if strong:
        counts = (f"{kind} in {strong.count(kind)}" for kind in (HOLDS, FAILS, UNDECIDED) if kind in strong)
        numbers += f"; of {len(strong)} with {SEEDS_NEEDED} or more seeds: {', '.join(counts)}"
    return verdict, numbers


def _mean(claim: Claim, differences: Sequence[float]) -> str:
    mean = statistics.fmean(differences)
    if claim.expected == "alike":
        return f"DEQ / explicit ×{math.exp(mean):.3g}"
    return f"DEQ - explicit {f'{mean:+.2f} points' if claim.quantity in GROUPS else f'{mean:+.3f}'}"
