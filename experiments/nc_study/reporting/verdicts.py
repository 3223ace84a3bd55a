"""What the paired differences between arms say: estimates for every pair, and the protocol's verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy import optimize, stats

from ..protocol import (
    CLAIMS,
    PARTS,
    PRECISION_CHECK,
    PRIMARY,
    Block,
    Claim,
    counts,
)
from ..record import PASSES, NetworkResult
from .runs import Group

SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "inconclusive"
EQUAL = "equal within the band"
NOTHING = "–"
ALPHA = 0.05
POWER = 0.8
DEQ = "deq-implicit"
SAME = 1e-12  # sums that differ by rounding, in units of the sum of sizes, count as equal
BANDS = {"overall": 1.0, "slope": 0.0, "nc1": math.log(1.25)}
BANDS |= dict.fromkeys(("nc2", "nc2_centered", "nc3_centered"), 0.02)
"""Differences that are too small to matter: points of accuracy, logarithm of a ratio of NC1, NC2, NC3; for a slope
none is."""


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

    def detectable(self, alpha: float) -> float:
        """The difference from 0 that a two-sided test at `alpha` finds with a power of 80 %, given this error."""
        bound = stats.t.ppf(1 - alpha / 2, self.freedom)
        shifted = optimize.brentq(lambda shift: stats.nct.sf(bound, self.freedom, shift) - POWER, 0, 10 * bound)
        return float(shifted) * self.error

    def _statistic(self, value: float) -> float:
        apart = self.mean - value
        return apart / self.error if self.error else math.copysign(math.inf, apart) if apart else 0.0


def estimate(settings: Sequence[Sequence[float]], common: bool = False) -> Estimate:
    """The mean over settings of their mean differences, each of two or more seeds. Settings count alike. Each has a
    variance of its own (Welch and Satterthwaite), or all have a `common` one."""
    degrees = [len(seeds) - 1 for seeds in settings]
    variances = [statistics.variance(seeds) for seeds in settings]
    if common:
        variances = [float(np.average(variances, weights=degrees))] * len(settings)
    shares = [variance / len(seeds) for variance, seeds in zip(variances, settings, strict=True)]
    total = sum(shares)
    squares = sum(share**2 / degree for share, degree in zip(shares, degrees, strict=True))
    freedom = total**2 / squares if squares and not common else sum(degrees)
    mean = statistics.fmean(map(statistics.fmean, settings))
    return Estimate(mean, math.sqrt(total) / len(settings), freedom)


def sign_flip(settings: Sequence[Sequence[float]]) -> float:
    """The exact two-sided p-value of no difference: how often the mean over settings is as far from 0 if every seed's
    difference may have either sign."""
    shares = np.array([value / (len(seeds) * len(settings)) for seeds in settings for value in seeds])
    bound = abs(shares.sum()) - SAME * np.abs(shares).sum()
    # All sums are those of one half plus those of the other: 2^15 of each for 30 pairs, not 2^30.
    first, second = (_signed_sums(half) for half in np.array_split(shares, 2))
    second.sort()
    above = len(second) - np.searchsorted(second, bound - first, "left")
    below = np.searchsorted(second, -bound - first, "right")
    return float((above + below).clip(max=len(second)).sum()) / 2.0 ** len(shares)


def _signed_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums - value, sums + value])
    return sums


def shown(quantity: str, settings: Sequence[Sequence[float]], common: bool = False) -> str:
    """Show the mean over settings of mean differences, of NC1 as a ratio, with its 95 % interval if each has two."""
    if not settings or not all(settings):
        return NOTHING
    interval = estimate(settings, common).interval if all(len(seeds) > 1 for seeds in settings) else ()
    form = "×{:.2f}" if quantity == "nc1" else "{:+.3f}" if quantity.startswith("nc") else "{:+.2f}"
    values = (statistics.fmean(map(statistics.fmean, settings)), *interval)
    first, *ends = [form.format(math.exp(value) if quantity == "nc1" else value) for value in values]
    return f"{first} [{', '.join(ends)}]" if ends else first


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjustment of p-values, in their order."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = adjusted[index] = max(largest, min(1.0, (len(values) - rank) * values[index]))
    return adjusted


def judge(expected: str, measured: Estimate, p_different: float, p_equal: float, band: float = math.inf) -> str:
    """The verdict on an expectation, "higher", "lower" or "alike", from an estimate and its adjusted p-values. What is
    expected alike is contradicted if it differs and its 95 % interval is outside the band."""
    if p_equal <= ALPHA:
        return SUPPORTED if expected == "alike" else EQUAL
    if p_different > ALPHA:
        return OPEN
    if expected == "alike":
        return CONTRADICTED if min(map(abs, measured.interval)) > band and measured.p_different <= ALPHA else OPEN
    return SUPPORTED if (measured.mean > 0) == (expected == "higher") else CONTRADICTED


def paired(group: Group, claim: Claim, block: Block, quantity: str) -> dict[int, float]:
    """Differences by seed, arm less control, of the block's seeds that both have finished. A group may have others, of
    another part of the protocol."""
    every = group.differences(block.setting, claim.arm, claim.control, quantity)
    return {seed: difference for seed, difference in every.items() if seed in block.seeds}


def differences(group: Group, claim: Claim, blocks: Sequence[Block]) -> list[list[float]]:
    """The paired differences of each setting."""
    return [[*paired(group, claim, block, claim.quantity).values()] for block in blocks]


def progress(group: Group | None) -> tuple[int, int]:
    """How many of the runs that count are finished, and how many there are."""
    runs = group.finished if group else []
    return sum(counts(run.result.settings) for run in runs), sum(
        len(block.seeds) * len(block.arms) for block in PRIMARY
    )


def precision_check(groups: Sequence[Group]) -> dict[str, float]:
    """Points of overall accuracy by which the arm of the check of the precision is ahead of its control.

    A mean over seeds for each precision; empty before all of its runs and the main runs of these seeds are finished.
    """
    block, accuracies = PRECISION_CHECK, {}
    control, arm = block.arms
    for precision in ("bf16", "fp32"):
        group = next((group for group in groups if group.tuned and group.experiment.precision == precision), None)
        apart = group.differences(block.setting, arm, control, "overall") if group else {}
        if not apart.keys() >= set(block.seeds):
            return {}
        accuracies[precision] = statistics.fmean(apart[seed] for seed in block.seeds)
    return accuracies


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, the estimate that it rests on, its adjusted p-value of no difference, and it as text.

    `signs`: the adjusted p-value of `sign_flip`, a test that was chosen after the results were known.
    """

    claim: Claim
    verdict: str
    estimate: Estimate | None
    p: float
    shown: str
    signs: float


def verdicts(group: Group | None) -> list[Judgement]:
    """The verdict on each claim of recipe B; none before every primary run has a result. A claim whose quantity is not
    defined in some seed rests on the others, and is open if a setting keeps fewer than two."""
    done, needed = progress(group)
    if group is None or done < needed:
        return []
    claims = CLAIMS["recipe B"]
    return judged(claims, [differences(group, claim, PRIMARY) for claim in claims], registered_signs=False)


def judged(
    claims: Sequence[Claim], measured: Sequence[Sequence[Sequence[float]]], registered_signs: bool
) -> list[Judgement]:
    """Judge claims together, from the differences of each by setting. "Not 0" rests on the flips of signs if they were
    registered, else on Welch's test; the variance is then common to the settings, else each setting's own."""
    estimates = [
        estimate(settings, common=registered_signs) if all(len(seeds) > 1 for seeds in settings) else None
        for settings in measured
    ]
    signs = holm([sign_flip(values) if each else 1.0 for values, each in zip(measured, estimates, strict=True)])
    different = signs if registered_signs else holm([each.p_different if each else 1.0 for each in estimates])
    equal = holm(
        [each.p_equal(BANDS[claim.quantity]) if each else 1.0 for claim, each in zip(claims, estimates, strict=True)]
    )
    return [
        Judgement(
            claim,
            judge(claim.expected, each, p, p_equal, BANDS[claim.quantity]) if each else OPEN,
            each,
            p,
            shown(claim.quantity, values, common=registered_signs),
            sign,
        )
        for claim, values, each, sign, p, p_equal in zip(
            claims, measured, estimates, signs, different, equal, strict=True
        )
    ]


def conclusions(by_claim: Mapping[str, str]) -> list[str]:
    """The protocol's two conclusions, from the verdict on each claim by its name. The three controls are the explicit
    network, the cell evaluated once, and the explicit block with its normalisation."""
    held = {name for name, verdict in by_claim.items() if verdict == SUPPORTED}
    better = "The DEQ with the implicit gradient classifies long-tailed images better than all three controls"
    if {"A1", "A4", "A5"} <= held:
        better = f"{better}: the equilibrium does it."
    elif "A1" in held and {by_claim["A4"], by_claim["A5"]} <= {EQUAL, CONTRADICTED}:
        better = "The normalised ending improves long-tailed classification. It is not shown that the equilibrium does."
    else:
        better = f"It is not shown that {better[0].lower()}{better[1:]}."
    nearer = "brings" if {"N1", "N3", "N4"} <= held else "is not shown to bring"
    return [better, f"The DEQ's equilibrium {nearer} the features nearer to the ETF than all three controls do."]


@dataclass(frozen=True)
class Part:
    """Part of the amendment of 2026-11-28: its name, the numbers of finished and of all runs, and its verdicts once all
    are finished."""

    name: str
    done: int
    needed: int
    judged: list[Judgement]
    converged: float | None
    """Share of the DEQ's solves that converge with the final weights, the smaller one of both passes; None: no run."""


def parts(groups: Sequence[Group]) -> list[Part]:
    """Judge the parts with claims; none has a verdict before the last of its runs."""
    # Of several groups, such as of two cards, the one with most runs comes first.
    own = {(group.experiment.dataset, group.experiment.width): group for group in reversed(groups) if group.is_of_parts}
    results = []
    for name in filter(CLAIMS.get, PARTS):
        blocks, claims = PARTS[name], CLAIMS[name]
        width = 64 if name == "size" else 16
        networks = [
            (arm, own[block.setting.dataset, width].networks(block.setting, arm).get(seed))
            for block in blocks
            for arm, seed in product(block.arms, block.seeds)
            if (block.setting.dataset, width) in own
        ]
        done = [entry for entry in networks if entry[1]]
        needed = sum(len(block.arms) * len(block.seeds) for block in blocks)
        judgements = []
        if len(done) == needed:
            measured = [_claimed(own, width, claim, blocks) for claim in claims]
            judgements = judged(claims, measured, registered_signs=True)
        converged = _converged([network for arm, network in done if arm == DEQ])
        results.append(Part(name, len(done), needed, judgements, converged))
    return results


def _converged(networks: Sequence[NetworkResult | None]) -> float | None:
    curves = [network.curves for network in networks if network]
    if not curves:
        return None
    return min(statistics.fmean(curve.get(f"{part}_converged", (0,))[-1] or 0 for curve in curves) for part in PASSES)


def _claimed(
    own: Mapping[tuple[str, int], Group], width: int, claim: Claim, blocks: Sequence[Block]
) -> list[list[float]]:
    """Differences of a claim by setting, as `judged` takes them. For the part of all settings, the units that its signs
    flip: a long-tailed setting's mean, or a slope in log10 R of a data set, a division and a seed."""
    quantity = "overall" if claim.quantity == "slope" else claim.quantity
    by_setting = {block.setting: paired(own[block.setting.dataset, width], claim, block, quantity) for block in blocks}
    if claim in CLAIMS["settings"]:
        by_setting = {setting: seeds for setting, seeds in by_setting.items() if setting.ratio}
        if quantity == claim.quantity:
            return [[statistics.fmean(seeds.values()) for seeds in by_setting.values()]]
        lines: dict[tuple[str, int | None, int], list[tuple[float, float]]] = {}
        for setting, seeds in by_setting.items():
            for seed, gain in seeds.items():
                line = lines.setdefault((setting.dataset, setting.majority, seed), [])
                line.append((math.log10(setting.ratio or 1), gain))
        return [[float(stats.linregress(*zip(*line, strict=True)).slope) for line in lines.values()]]
    return [list(seeds.values()) for seeds in by_setting.values()]


def answer(part: Part) -> str:
    """The protocol's rule of decision for the mechanism, as a sentence."""
    if not part.judged:
        return f"No verdict: {part.done} of the {part.needed} runs are finished."
    verdict = {judgement.claim.name: judgement.verdict for judgement in part.judged}
    helps = [verdict[name] for name in ("M1", "M2", "M3")]
    if set(helps) == {SUPPORTED}:
        return "A DEQ helps under imbalance: it beats the explicit network, the normalised one and its cell 4 times."
    if {EQUAL, CONTRADICTED} & {*helps}:
        return "A DEQ does not help under imbalance: it does not beat all three controls by a point."
    return "It is not shown that a DEQ helps under imbalance."
