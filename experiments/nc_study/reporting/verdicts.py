"""What the paired differences between the networks say to each claim of the paper."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from ..config import MODELS, Setting
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
class Interval:
    """Mean of some values and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def t_interval(values: Sequence[float]) -> Interval:
    """Return Student's 95 % interval for the mean of at least two values."""
    mean = statistics.fmean(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stats.sem(values))
    return Interval(mean, mean - half, mean + half)


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


def show(claim: Claim, value: float) -> str:
    """Write a difference as it stands in a table."""
    if claim.expected == "alike":
        return f"×{math.exp(value):.3g}"
    return f"{value:+.2f}" if claim.quantity in GROUPS else f"{value:+.3f}"


@dataclass(frozen=True)
class Evidence:
    """Paired differences of one claim in one setting, by seed, and how many pairs had none because of an undefined
    metric."""

    claim: Claim
    setting: Setting
    differences: dict[int, float]
    undefined: int

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.differences.values())

    @property
    def interval(self) -> Interval | None:
        """Interval over the seeds, if there are enough."""
        return t_interval(list(self.differences.values())) if len(self.differences) >= SEEDS_NEEDED else None

    @property
    def verdict(self) -> str:
        """What the seeds of this setting say."""
        found = self.interval
        return not_enough(len(self.differences)) if found is None else judge_interval(found, self.claim.expected)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim in one group of runs, and the numbers that it rests on."""

    claim: Claim
    verdict: str
    numbers: str
    evidence: list[Evidence]


def not_enough(pairs: int) -> str:
    """Return the verdict of too few pairs."""
    return f"not enough runs ({pairs})"


def judge_interval(found: Interval, expected: str) -> str:
    """Judge an expectation by an interval of differences."""
    if expected == "alike":
        if found.low > ALIKE or found.high < -ALIKE:
            return FAILS
        return HOLDS if found.low >= -ALIKE and found.high <= ALIKE else UNDECIDED
    low, high = (found.low, found.high) if expected == "higher" else (-found.high, -found.low)
    if low > 0:
        return HOLDS
    return FAILS if high < 0 else UNDECIDED


def judge_all(group: Group) -> list[Judgement]:
    """Judge every claim of the paper."""
    return [judge(group, claim) for claim in CLAIMS]


def judge(group: Group, claim: Claim) -> Judgement:
    """Judge a claim. Settings with three or more seeds decide, each by its interval: the claim holds if it does in all,
    and not if the opposite is found in one. Where they leave it open, and without such settings, the signs of all the
    settings' means are tested."""
    settings = [setting for setting in group.settings if (setting.majority is None) == claim.balanced]
    found = [_evidence(group, claim, setting) for setting in settings]
    evidence = [entry for entry in found if entry.differences]
    strong = [entry.verdict for entry in evidence if entry.interval]
    pairs = sum(len(entry.differences) for entry in evidence)
    if FAILS in strong:
        verdict = FAILS
    elif set(strong) == {HOLDS}:
        verdict = HOLDS
    else:
        verdict = _judge_signs(claim, evidence) or (UNDECIDED if strong else not_enough(pairs))
    parts = _numbers(claim, evidence, strong, pairs) if evidence else []
    if undefined := sum(entry.undefined for entry in found):
        parts.append(f"the metric is not defined in {_count(undefined, 'pair')}")
    return Judgement(claim, verdict, "; ".join(parts) or "no pair of networks with the same seed", evidence)


def _evidence(group: Group, claim: Claim, setting: Setting) -> Evidence:
    found = {seed: difference(claim, *pair) for seed, pair in group.pairs(setting).items()}
    known = {seed: value for seed, value in found.items() if value is not None}
    return Evidence(claim, setting, known, len(found) - len(known))


def _judge_signs(claim: Claim, evidence: list[Evidence]) -> str | None:
    """Judge by the signs; None where they cannot tell: equal signs in six settings are the fewest that a sign test
    tells from chance, and no signs can show likeness."""
    positive, negative = _signs(evidence)
    if claim.expected == "alike" or sign_test(positive + negative, 0) > 1 - CONFIDENCE:
        return None
    if sign_test(positive, negative) > 1 - CONFIDENCE:
        return UNDECIDED
    return HOLDS if (positive > negative) == (claim.expected == "higher") else FAILS


def _signs(evidence: list[Evidence]) -> tuple[int, int]:
    return sum(entry.mean > 0 for entry in evidence), sum(entry.mean < 0 for entry in evidence)


def _numbers(claim: Claim, evidence: list[Evidence], strong: list[str], pairs: int) -> list[str]:
    """Tell signs and mean over the settings, and how the settings with enough seeds came out."""
    positive, negative = _signs(evidence)
    mean = show(claim, statistics.fmean(entry.mean for entry in evidence))
    unit = " points" if claim.quantity in GROUPS and claim.expected != "alike" else ""
    parts = [
        f"DEQ {'/' if claim.expected == 'alike' else '-'} explicit {mean}{unit} on average over "
        f"{_count(len(evidence), 'setting')} ({_count(pairs, 'pair')}); higher in {positive}, lower in {negative}"
    ]
    if strong:
        kinds = [verdict for verdict in (HOLDS, FAILS, UNDECIDED) if verdict in strong]
        counts = ", ".join(f"{verdict} in {strong.count(verdict)}" for verdict in kinds)
        parts.append(f"of {_count(len(strong), 'setting')} with {SEEDS_NEEDED} or more seeds: {counts}")
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
