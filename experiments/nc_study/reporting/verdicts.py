"""What the paired differences between arms say: estimates for every pair, and the protocol's verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from runs.paired import ALPHA, Estimate, estimate, holm, sign_flip
from scipy import stats

from ..config import Setting
from ..protocol import (
    MECHANISM_CLAIMS,
    PARTS,
    PRECISION_CHECK,
    PRIMARY,
    SETTINGS_CLAIMS,
    SIZE_CLAIMS,
    Block,
    Claim,
    counts,
)
from ..record import PASSES, NetworkResult
from .runs import Group

SUPPORTED, CONTRADICTED, OPEN = "supported", "contradicted", "inconclusive"
EQUAL = "equal within the band"
NOTHING = "–"
DEQ = "deq-implicit"
BANDS = {"overall": 1.0, "slope": 0.0, "nc1": math.log(1.25)}
BANDS |= dict.fromkeys(("nc2", "nc2_centered", "nc3_centered"), 0.02)
"""Differences that are too small to matter: points of accuracy, logarithm of a ratio of NC1, NC2, NC3; for a slope
none is."""


def shown(quantity: str, settings: Sequence[Sequence[float]], common: bool = False) -> str:
    """Show the mean over settings of mean differences, of NC1 as a ratio, with its 95 % interval if each has two."""
    if not settings or not all(settings):
        return NOTHING
    interval = estimate(settings, common).interval if all(len(seeds) > 1 for seeds in settings) else ()
    form = "×{:.2f}" if quantity == "nc1" else "{:+.3f}" if quantity.startswith("nc") else "{:+.2f}"
    values = (statistics.fmean(map(statistics.fmean, settings)), *interval)
    first, *ends = [form.format(math.exp(value) if quantity == "nc1" else value) for value in values]
    return f"{first} [{', '.join(ends)}]" if ends else first


def judge(expected: str, pooled: Estimate, p_different: float, p_equal: float, band: float = math.inf) -> str:
    """The verdict on an expectation, "higher", "lower" or "alike", from an estimate and its adjusted p-values. What is
    expected alike is contradicted if it differs and its 95 % interval is outside the band."""
    if p_equal <= ALPHA:
        return SUPPORTED if expected == "alike" else EQUAL
    if p_different > ALPHA:
        return OPEN
    if expected == "alike":
        return CONTRADICTED if min(map(abs, pooled.interval)) > band and pooled.p_different <= ALPHA else OPEN
    return SUPPORTED if (pooled.mean > 0) == (expected == "higher") else CONTRADICTED


def differences(group: Group, claim: Claim, blocks: Sequence[Block]) -> list[list[float]]:
    """The paired differences of each setting, arm less control, of the seeds that both have finished."""
    pairs = [(b, group.differences(b.setting, claim.arm, claim.control, claim.quantity)) for b in blocks]
    return [[value for seed, value in seeds.items() if seed in block.seeds] for block, seeds in pairs]


def progress(group: Group | None) -> tuple[int, int]:
    """How many of the runs that count are finished, and how many there are."""
    runs = group.finished if group else []
    return sum(counts(run.result.settings) for run in runs), sum(block.size for block in PRIMARY)


def precision_check(groups: Sequence[Group]) -> dict[str, float]:
    """Points of overall accuracy by which the arm of the check of the precision is ahead of its control.

    A mean over seeds for each precision; empty before all of its runs and the main runs of these seeds are finished.
    """
    block, ahead = PRECISION_CHECK, {}
    control, arm = block.arms
    for precision in ("bf16", "fp32"):
        group = next((each for each in groups if each.tuned and each.experiment.precision == precision), None)
        apart = group.differences(block.setting, arm, control, "overall") if group else {}
        if not apart.keys() >= set(block.seeds):
            return {}
        ahead[precision] = statistics.fmean(apart[seed] for seed in block.seeds)
    return ahead


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


def verdicts(group: Group | None, claims: Sequence[Claim]) -> list[Judgement]:
    """The verdict on each claim; none before every primary run has a result. A claim whose quantity is not defined in
    some seed rests on the others, and is open if a setting keeps fewer than two."""
    done, needed = progress(group)
    if group is None or done < needed:
        return []
    return judged(claims, [differences(group, claim, PRIMARY) for claim in claims], registered_signs=False)


def judged(
    claims: Sequence[Claim], measured: Sequence[Sequence[Sequence[float]]], registered_signs: bool
) -> list[Judgement]:
    """Judge claims together, from the differences of each by setting. "Not 0" rests on the flips of signs if they were
    registered, else on Welch's test; the variance is then common to the settings, else each setting's own."""
    pooled = [estimate(each, registered_signs) if all(len(seeds) > 1 for seeds in each) else None for each in measured]
    bands = [BANDS[claim.quantity] for claim in claims]
    signs = holm([sign_flip(values) if each else 1.0 for values, each in zip(measured, pooled, strict=True)])
    different = signs if registered_signs else holm([each.p_different if each else 1.0 for each in pooled])
    equal = holm([each.p_equal(band) if each else 1.0 for each, band in zip(pooled, bands, strict=True)])
    judgements = []
    for claim, values, each, band, sign, p, p_equal in zip(
        claims, measured, pooled, bands, signs, different, equal, strict=True
    ):
        verdict = judge(claim.expected, each, p, p_equal, band) if each else OPEN
        text = shown(claim.quantity, values, common=registered_signs)
        judgements.append(Judgement(claim, verdict, each, p, text, sign))
    return judgements


def conclusions(verdict: Mapping[str, str]) -> list[str]:
    """The protocol's two conclusions, from the verdict on each claim by its name. The three controls are the explicit
    network, the cell evaluated once, and the explicit block with its normalisation."""
    held = {name for name, each in verdict.items() if each == SUPPORTED}
    better = "The DEQ with the implicit gradient classifies long-tailed images better than all three controls"
    if {"A1", "A4", "A5"} <= held:
        better = f"{better}: the equilibrium does it."
    elif "A1" in held and {verdict["A4"], verdict["A5"]} <= {EQUAL, CONTRADICTED}:
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
    claims = {"mechanism": MECHANISM_CLAIMS, "settings": SETTINGS_CLAIMS, "size": SIZE_CLAIMS}
    # Of several groups, such as of two cards, the one with most runs comes first.
    own = {(each.experiment.dataset, each.experiment.width): each for each in reversed(groups) if each.is_of_parts}
    judged_parts = []
    for name, some in claims.items():
        blocks, width, done = PARTS[name], 64 if name == "size" else 16, []
        by_setting = {block.setting: own.get((block.setting.dataset, width)) for block in blocks}
        for block in blocks:
            for arm, seed in product(block.arms, block.seeds):
                group = by_setting[block.setting]
                if group and (network := group.networks(block.setting, arm).get(seed)):
                    done.append((arm, network))
        needed = sum(block.size for block in blocks)
        judgements = []
        if len(done) == needed:
            measured = [_measured(by_setting, claim) for claim in some]
            judgements = judged(some, measured, registered_signs=True)
        share = _converged([network for arm, network in done if arm == DEQ])
        judged_parts.append(Part(name, len(done), needed, judgements, share))
    return judged_parts


def _converged(networks: Sequence[NetworkResult]) -> float | None:
    if not networks:
        return None
    shares = [[each.curves.get(f"{part}_converged", (0,))[-1] or 0 for each in networks] for part in PASSES]
    return min(map(statistics.fmean, shares))


def _measured(groups: Mapping[Setting, Group | None], claim: Claim) -> list[list[float]]:
    """Differences of a claim by setting, as `judged` takes them. For the part of all settings, the units that its signs
    flip: a long-tailed setting's mean, or a slope in log10 R of a data set, a division and a seed."""
    quantity = "overall" if claim.quantity == "slope" else claim.quantity
    gains = {
        setting: group.differences(setting, claim.arm, claim.control, quantity)
        for setting, group in groups.items()
        if group and (setting.ratio or claim not in SETTINGS_CLAIMS)
    }
    if claim not in SETTINGS_CLAIMS:
        return [list(seeds.values()) for seeds in gains.values()]
    if claim.quantity != "slope":
        return [[statistics.fmean(seeds.values()) for seeds in gains.values()]]
    lines: dict[tuple[str, int | None, int], list[tuple[float, float]]] = {}
    for setting, seeds in gains.items():
        for seed, gain in seeds.items():
            line = lines.setdefault((setting.dataset, setting.majority, seed), [])
            line.append((math.log10(setting.ratio or 1), gain))
    return [[float(stats.linregress(*zip(*line, strict=True)).slope) for line in lines.values()]]


def answer(part: Part) -> str:
    """The protocol's rule of decision for the mechanism, as a sentence."""
    if not part.judged:
        return f"No verdict: {part.done} of the {part.needed} runs are finished."
    verdict = {each.claim.name: each.verdict for each in part.judged}
    helps = [verdict[name] for name in ("M1", "M2", "M3")]
    if set(helps) == {SUPPORTED}:
        return "A DEQ helps under imbalance: it beats the explicit network, the normalised one and its cell 4 times."
    if {EQUAL, CONTRADICTED} & {*helps}:
        return "A DEQ does not help under imbalance: it does not beat all three controls by a point."
    return "It is not shown that a DEQ helps under imbalance."
