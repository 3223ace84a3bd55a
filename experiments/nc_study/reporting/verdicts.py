"""What the paired differences between arms say: estimates for every pair, and the protocol's verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from ..protocol import PRECISION_CHECK, PRIMARY, Block, Claim, counts
from .runs import Group

SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "inconclusive"
EQUAL = "equal within the band"
ALPHA = 0.05
BANDS = {"overall": 1.0, "nc2_centered": 0.02}
"""Differences that are too small to matter: points of accuracy, NC2."""


@dataclass(frozen=True)
class Estimate:
    """The mean of differences, its standard error, and the degrees of freedom of that."""

    mean: float
    error: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % interval."""
        half = float(stats.t.ppf(1 - ALPHA / 2, self.freedom)) * self.error
        return self.mean - half, self.mean + half

    @property
    def p_different(self) -> float:
        """The two-sided test that the mean is 0."""
        return float(2 * stats.t.sf(abs(self._statistic(0)), self.freedom))

    def p_equal(self, band: float) -> float:
        """Two one-sided tests that the mean is outside (-band, band)."""
        above, below = self._statistic(-band), -self._statistic(band)
        return float(stats.t.sf(min(above, below), self.freedom))

    def _statistic(self, value: float) -> float:
        apart = self.mean - value
        return apart / self.error if self.error else math.copysign(math.inf, apart) if apart else 0.0


def estimate(settings: Sequence[Sequence[float]]) -> Estimate:
    """The mean over settings of their mean differences, each of two or more seeds: settings count alike, and each has
    a variance of its own (Welch and Satterthwaite)."""
    variances = [statistics.variance(one) / len(one) for one in settings]
    total = sum(variances)
    shares = sum(variance**2 / (len(one) - 1) for variance, one in zip(variances, settings, strict=True))
    freedom = total**2 / shares if shares else sum(len(one) - 1 for one in settings)
    mean = statistics.fmean(map(statistics.fmean, settings))
    return Estimate(mean, math.sqrt(total) / len(settings), freedom)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjustment of p-values, in their order."""
    found, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = found[index] = max(largest, min(1.0, (len(values) - rank) * values[index]))
    return found


def judge(expected: str, found: Estimate, p_different: float, p_equal: float) -> str:
    """The verdict on an expectation, "higher" or "lower", from an estimate and its adjusted p-values."""
    if p_equal <= ALPHA:
        return EQUAL
    if p_different > ALPHA:
        return OPEN
    return SUPPORTED if (found.mean > 0) == (expected == "higher") else CONTRADICTED


def seeds_of_all_arms(group: Group, block: Block) -> set[int]:
    """The seeds of a block that all of its arms have finished."""
    return set(block.seeds).intersection(*(group.networks(block.setting, arm) for arm in block.arms))


def ready(group: Group) -> dict[Block, int]:
    """The primary settings in which all arms share two seeds or more, enough for an estimate, and how many."""
    shared = {block: seeds_of_all_arms(group, block) for block in PRIMARY}
    return {block: len(seeds) for block, seeds in shared.items() if len(seeds) > 1}


def differences(group: Group, claim: Claim, blocks: Sequence[Block]) -> list[list[float]]:
    """The paired differences of each setting, arm less control, of the seeds that both have finished."""
    return [
        [
            one
            for seed, one in group.differences(block.setting, claim.arm, claim.control, claim.quantity).items()
            if seed in block.seeds
        ]
        for block in blocks
    ]


def progress(group: Group | None) -> tuple[int, int]:
    """How many of the runs that count are finished, and how many there are."""
    runs = group.finished if group else []
    return sum(counts(run.result.settings) for run in runs), sum(len(one.seeds) * len(one.arms) for one in PRIMARY)


def precision_check(groups: Sequence[Group]) -> dict[str, float]:
    """Points of overall accuracy by which the arm of the check of the precision is ahead of its control, on average
    over its seeds, in each precision; empty before all of its runs and the main ones beside them are finished."""
    block, found = PRECISION_CHECK, {}
    control, arm = block.arms
    for precision in ("bf16", "fp32"):
        group = next((one for one in groups if one.tuned and one.experiment.precision == precision), None)
        apart = group.differences(block.setting, arm, control, "overall") if group else {}
        if not apart.keys() >= set(block.seeds):
            return {}
        found[precision] = statistics.fmean(apart[seed] for seed in block.seeds)
    return found


def verdicts(group: Group, claims: Sequence[Claim]) -> list[tuple[str, Estimate | None]]:
    """The verdict on each claim and the estimate behind it. None is given before every primary run has a result: until
    then estimates are of the settings that are ready. A claim whose quantity is not defined in some seed rests on the
    others, if each setting keeps two."""
    done, needed = progress(group)
    blocks = PRIMARY if done == needed else tuple(ready(group))
    measured = [differences(group, claim, blocks) for claim in claims]
    estimates = [estimate(kept) if (kept := [one for one in found if len(one) > 1]) else None for found in measured]
    if done < needed:
        return [(f"not yet: {done} of {needed} runs", found) for found in estimates]
    bands = [BANDS[claim.quantity] for claim in claims]
    whole = [
        one if all(len(seeds) > 1 for seeds in found) else None for one, found in zip(estimates, measured, strict=True)
    ]
    different = holm([one.p_different if one else 1.0 for one in whole])
    equal = holm([one.p_equal(band) if one else 1.0 for one, band in zip(whole, bands, strict=True)])
    rows = zip(claims, whole, different, equal, strict=True)
    judged = [judge(claim.expected, one, *rest) if one else OPEN for claim, one, *rest in rows]
    return list(zip(judged, estimates, strict=True))


def conclusions(found: Mapping[str, str]) -> list[str]:
    """The protocol's two conclusions, from the verdict on each claim by its name; none before there are verdicts."""
    if not set(found.values()) <= {SUPPORTED, CONTRADICTED, EQUAL, OPEN}:
        return []
    held = {name for name, verdict in found.items() if verdict == SUPPORTED}
    than = "than the explicit network, the cell evaluated once and the explicit block with its normalisation"
    better = f"That the DEQ with the implicit gradient classifies long-tailed images better {than} is not shown."
    if {"A1", "A4", "A5"} <= held:
        better = (
            f"The DEQ with the implicit gradient classifies long-tailed images better {than}: the equilibrium does it."
        )
    elif "A1" in held and {found["A4"], found["A5"]} <= {EQUAL, CONTRADICTED}:
        better = (
            "The normalised ending makes long-tailed classification better; that the equilibrium does is not shown."
        )
    nearer = "brings" if {"N1", "N3", "N4"} <= held else "is not shown to bring"
    return [better, f"Its equilibrium {nearer} the features nearer to the ETF than those three have them."]
