"""What the paired differences between the networks say to each claim of the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from ..config import MODELS
from ..paper import CLAIMS, PAPER, Claim
from ..record import GROUPS, NetworkResult
from .runs import Group

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not distinguishable"
SEEDS_NEEDED = 3
CONFIDENCE = 0.95
ALIKE = math.log(1.25)
"""Two metrics are alike if their ratio lies between 1/1.25 and 1.25: the bounds of bioequivalence tests. The paper,
which says "comparable", gives none."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim in one group of runs, and the numbers that it rests on."""

    claim: Claim
    verdict: str
    numbers: str


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of Student's 95 % interval for the mean of at least two values."""
    mean = statistics.fmean(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    return mean - half, mean + half


def sign_test(positive: int, negative: int) -> float:
    """Return the two-sided probability of signs at least as uneven, were either as likely."""
    count = positive + negative
    return float(stats.binomtest(positive, count).pvalue) if count else 1.0


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


def judge_all(group: Group) -> list[Judgement]:
    """Judge every claim of the paper."""
    return [judge(group, claim) for claim in CLAIMS]


def judge(group: Group, claim: Claim) -> Judgement:
    """Judge a claim. Settings with three or more seeds decide, each by its interval: the claim holds if it does in all,
    and not if the opposite is found in one. Where they leave it open, and without such settings, the signs of all the
    settings' means are tested."""
    settings = [setting for setting in group.settings if (setting.majority is None) == claim.balanced]
    found = [[difference(claim, *pair) for pair in group.pairs(setting).values()] for setting in settings]
    known = [[value for value in values if value is not None] for values in found]
    measured = [values for values in known if values]
    strong = [judge_interval(*t_interval(one), claim.expected) for one in measured if len(one) >= SEEDS_NEEDED]
    means = [statistics.fmean(values) for values in measured]
    pairs = sum(map(len, measured))
    if FAILS in strong:
        verdict = FAILS
    elif set(strong) == {HOLDS}:
        verdict = HOLDS
    else:
        verdict = _judge_signs(claim, means) or (UNDECIDED if strong else f"not enough runs ({pairs})")
    parts = _numbers(claim, means, pairs, strong) if means else []
    if undefined := sum(map(len, found)) - pairs:
        parts.append(f"the metric is not defined in {_count(undefined, 'pair')}")
    return Judgement(claim, verdict, "; ".join(parts) or "no pair of networks with the same seed")


def _judge_signs(claim: Claim, means: list[float]) -> str | None:
    """Judge by the signs; None where they cannot tell: equal signs in six settings are the fewest that a sign test
    tells from chance, and no signs can show likeness."""
    positive, negative = _signs(means)
    if claim.expected == "alike" or sign_test(positive + negative, 0) > 1 - CONFIDENCE:
        return None
    if sign_test(positive, negative) > 1 - CONFIDENCE:
        return UNDECIDED
    return HOLDS if (positive > negative) == (claim.expected == "higher") else FAILS


def _signs(means: list[float]) -> tuple[int, int]:
    return sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)


def _numbers(claim: Claim, means: list[float], pairs: int, strong: list[str]) -> list[str]:
    """Tell signs and mean over the settings, and how the settings with enough seeds came out."""
    mean, (positive, negative) = statistics.fmean(means), _signs(means)
    if claim.expected == "alike":
        shown = f"DEQ / explicit ×{math.exp(mean):.3g}"
    else:
        shown = f"DEQ - explicit {f'{mean:+.2f} points' if claim.quantity in GROUPS else f'{mean:+.3f}'}"
    where = f"{_count(len(means), 'setting')} ({_count(pairs, 'pair')})"
    parts = [f"{shown} on average over {where}; higher in {positive}, lower in {negative}"]
    if strong:
        counts = (f"{kind} in {strong.count(kind)}" for kind in (HOLDS, FAILS, UNDECIDED) if kind in strong)
        parts.append(f"of {_count(len(strong), 'setting')} with {SEEDS_NEEDED} or more seeds: {', '.join(counts)}")
    return parts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def paper_differences(claim: Claim, dataset: str) -> list[float]:
    """Return DEQ - explicit in the paper's settings of a data set; empty where the paper prints no such numbers."""
    if claim.quantity not in GROUPS:
        return []
    found = []
    for setting, accuracies in PAPER.items():
        if setting.dataset == dataset and (setting.majority is None) == claim.balanced:
            explicit, deq = (getattr(accuracies[model], claim.quantity) for model in MODELS)
            found += [deq.mean - explicit.mean] if explicit and deq else []
    return found
