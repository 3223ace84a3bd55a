"""The claims of the paper, and what the paired differences between the networks say to each of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from ..cells import Cell
from ..config import MODELS
from ..results import COLLAPSE, GROUPS, PAPER
from ..rundir import Row
from .runs import Group

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "not distinguishable"
SEEDS_NEEDED = 3
CONFIDENCE = 0.95
ALIKE = math.log(1.25)
"""Two metrics are alike if their ratio lies between 1/1.25 and 1.25: the bounds of bioequivalence tests. The paper,
which says "comparable", gives none."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper about one quantity of the DEQ beside that of the explicit network."""

    text: str
    source: str
    quantity: str
    expected: str
    balanced: bool = False

    @property
    def unit(self) -> str:
        """Of the difference."""
        if self.expected == "alike":
            return ""
        return " points" if self.quantity in GROUPS else ""

    def value(self, summary: Row) -> float | None:
        """The quantity of one network; None where it is not defined."""
        if self.quantity in GROUPS:
            spread = summary["accuracy"].get(self.quantity)
            return None if spread is None else spread["mean"]
        return summary["nc"].get(self.quantity)

    def difference(self, explicit: Row, deq: Row) -> float | None:
        """DEQ - explicit, or log(DEQ / explicit) where they are said to be alike; None where it is not defined."""
        before, after = self.value(explicit), self.value(deq)
        if before is None or after is None:
            return None
        if self.expected != "alike":
            return after - before
        return math.log(after / before) if before > 0 and after > 0 else None

    def show(self, difference: float) -> str:
        """A difference as it stands in a table."""
        if self.expected == "alike":
            return f"×{math.exp(difference):.3g}"
        return f"{difference:+.2f}" if self.quantity in GROUPS else f"{difference:+.3f}"


CENTRED = "not in the paper, see below"
QUANTITIES = {
    **{name: name.upper() for name in COLLAPSE},
    **{f"{name}_centered": f"{name.upper()}, centred" for name in ("nc2", "nc3")},
    **{group: f"accuracy, {group}" for group in GROUPS},
}
"""What a claim may be about, as the tables name it."""

CLAIMS = (
    Claim("Imbalanced: the DEQ's overall accuracy is higher", "Tables 2-4", "overall", "higher"),
    Claim("Imbalanced: the DEQ's accuracy on the majority is higher", "Tables 2-4", "majority", "higher"),
    Claim("Imbalanced: the DEQ's accuracy on the minority is higher", "Tables 2-4", "minority", "higher"),
    Claim("Imbalanced: NC1 of both is alike at the end", "section 5.3, figures 3b, 4, 5", "nc1", "alike"),
    Claim("Imbalanced: the DEQ is nearer to the ETF, NC2 is lower", "theorem 4.1, figures 3b, 4, 5", "nc2", "lower"),
    Claim(
        "Imbalanced: the DEQ is nearer to self-duality, NC3 is lower", "theorem 4.1, figures 3b, 4, 5", "nc3", "lower"
    ),
    Claim("Imbalanced: NC2 is lower with centred class means too", CENTRED, "nc2_centered", "lower"),
    Claim("Imbalanced: NC3 is lower with centred class means too", CENTRED, "nc3_centered", "lower"),
    Claim("Balanced: the DEQ's accuracy is higher, if marginally", "Table 1", "overall", "higher", balanced=True),
    Claim("Balanced: NC1 of both is alike at the end", "theorem 3.1, figure 3a", "nc1", "alike", balanced=True),
    Claim("Balanced: NC2 of both is alike at the end", "theorem 3.1, figure 3a", "nc2", "alike", balanced=True),
    Claim("Balanced: NC3 of both is alike at the end", "theorem 3.1, figure 3a", "nc3", "alike", balanced=True),
)


@dataclass(frozen=True)
class Interval:
    """Mean of some values and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def t_interval(values: Sequence[float]) -> Interval:
    """Student's 95 % interval for the mean of at least two values."""
    mean, count = statistics.fmean(values), len(values)
    half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def sign_test(positive: int, negative: int) -> float:
    """Two-sided probability of signs at least as uneven, were either as likely."""
    count = positive + negative
    tail = sum(math.comb(count, i) for i in range(max(positive, negative), count + 1)) / 2**count
    return min(1.0, 2 * tail)


@dataclass(frozen=True)
class Evidence:
    """The paired differences of one claim in one cell, by seed, and how many pairs had none because of an undefined
    metric."""

    claim: Claim
    cell: Cell
    differences: dict[int, float]
    undefined: int

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.differences.values())

    @property
    def interval(self) -> Interval | None:
        """Over the seeds, if there are enough."""
        return t_interval(list(self.differences.values())) if len(self.differences) >= SEEDS_NEEDED else None

    @property
    def verdict(self) -> str:
        """What the seeds of this cell say."""
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
    """The verdict of too few pairs."""
    return f"not enough runs ({pairs})"


def judge_interval(found: Interval, expected: str) -> str:
    """What an interval of differences says to an expectation."""
    if expected == "alike":
        if found.low > ALIKE or found.high < -ALIKE:
            return FAILS
        return HOLDS if found.low >= -ALIKE and found.high <= ALIKE else UNDECIDED
    low, high = (found.low, found.high) if expected == "higher" else (-found.high, -found.low)
    if low > 0:
        return HOLDS
    return FAILS if high < 0 else UNDECIDED


def judge(group: Group, claim: Claim) -> Judgement:
    """The verdict on a claim. Cells with three or more seeds decide, each by its interval: the claim holds if it does
    in all, and not if the opposite is found in one. Where they leave it open, and without such cells, the signs of all
    the cells' means are tested."""
    found = [entry for cell in group.cells if (entry := _evidence(group, claim, cell))]
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
    undefined = sum(entry.undefined for entry in found)
    if undefined:
        parts.append(f"the metric is not defined in {_count(undefined, 'pair')}")
    return Judgement(claim, verdict, "; ".join(parts) or "no pair of networks with the same seed", evidence)


def _evidence(group: Group, claim: Claim, cell: Cell) -> Evidence | None:
    if (cell.majority is None) != claim.balanced:
        return None
    pairs = group.pairs(cell)
    found = {seed: claim.difference(*pair) for seed, pair in pairs.items()}
    known = {seed: value for seed, value in found.items() if value is not None}
    return Evidence(claim, cell, known, len(found) - len(known))


def _judge_signs(claim: Claim, evidence: list[Evidence]) -> str | None:
    """What the signs say; None where they cannot: equal signs in six cells are the fewest that a sign test tells from
    chance, and no signs can show likeness."""
    positive, negative = _signs(evidence)
    if claim.expected == "alike" or sign_test(positive + negative, 0) > 1 - CONFIDENCE:
        return None
    if sign_test(positive, negative) > 1 - CONFIDENCE:
        return UNDECIDED
    return HOLDS if (positive > negative) == (claim.expected == "higher") else FAILS


def _signs(evidence: list[Evidence]) -> tuple[int, int]:
    return sum(entry.mean > 0 for entry in evidence), sum(entry.mean < 0 for entry in evidence)


def _numbers(claim: Claim, evidence: list[Evidence], strong: list[str], pairs: int) -> list[str]:
    """Signs and mean over the cells, and how the cells with enough seeds came out."""
    positive, negative = _signs(evidence)
    mean = claim.show(statistics.fmean(entry.mean for entry in evidence))
    parts = [
        f"DEQ {'/' if claim.expected == 'alike' else '-'} explicit {mean}{claim.unit} on average over "
        f"{_count(len(evidence), 'cell')} ({_count(pairs, 'pair')}); higher in {positive}, lower in {negative}"
    ]
    if strong:
        kinds = [verdict for verdict in (HOLDS, FAILS, UNDECIDED) if verdict in strong]
        counts = ", ".join(f"{verdict} in {strong.count(verdict)}" for verdict in kinds)
        parts.append(f"of {_count(len(strong), 'cell')} with {SEEDS_NEEDED} or more seeds: {counts}")
    return parts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def paper_differences(claim: Claim, dataset: str) -> list[float]:
    """DEQ - explicit in the paper's cells of a data set; empty where the paper prints no such numbers."""
    if claim.quantity not in GROUPS:
        return []
    cells = [
        entry
        for (data, majority, _), entry in PAPER.items()
        if data == dataset and (majority is None) == claim.balanced
    ]
    spreads = [[cell[model][claim.quantity] for model in MODELS] for cell in cells]
    return [deq["mean"] - explicit["mean"] for explicit, deq in spreads if explicit and deq]
