"""Claims of the paper about the layer-peeled problems: closed forms, conditions, and a verdict on each claim.

Let x = K/(K-1) sqrt(E_W E_H). With a simplex ETF for classifier and features, the loss is log(1 + (K-1) exp(-g x)).
Here g is the factor by which the layer stretches the features, relative to a norm of sqrt(E_H). Under a constraint on
the final features g = 1. Under one on h0, a layer with equal singular values on the K-1 dimensions gives
g = E_H/sqrt(K-1) (explicit) or 1/(1 - E_H/sqrt(K-1)) (DEQ). No ETF can have a larger g.

No layer stretches any feature by more than g = E_H (explicit) or 1/(1 - E_H) (DEQ). With this g the same formula bounds
the loss of every feasible point. The logits are W A h0 with ||A|| <= g in the spectral norm, so their nuclear norm is
at most ||W||_F g ||h0||_F. Over a nuclear ball a simplex ETF is best, by symmetry and convexity.

For small bounds on h0 the ETF need not be the optimum. Let q be the logits' singular values over their sum: ||q|| is 1
for logits of rank one and 1/sqrt(K-1) for a simplex ETF. Let s = sqrt(E_W E_H). To leading order the log K - loss of
the DEQ is s (1 + E_H ||q||) - s^2 ||q||^2 / 2, as the best layer adds E_H q_i / ||q|| to direction i. It is greatest at
||q|| = sqrt(E_H/E_W): at the ETF only if E_W >= (K-1) E_H. The explicit network's is at most s E_H in first order. It
reaches this at rank one, with the whole norm of W_EX in the one direction that is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from nc_study.config import BOTH
from nc_study.paper import THEORY
from torch import Tensor

from .problem import Part, Problem

SAME = 1e-5
"""Relative difference up to which two numbers of two solves count as the same."""

ZERO = 1e-2
"""Bound below which a number counts as 0 if it is of order 1 otherwise; solves are about 10 times as accurate."""

HOLDS = "holds"
FAILS = "does not hold"
CONDITION = "condition not met"
NOTHING = "says nothing"  # for a bound that all points meet, or a ratio of two zeros
ROUNDING = "not distinguishable from rounding"

# Quantities at infinite R, each a key of THEORY.
LIMIT = tuple(f"majority_{name}" for name in ("nc1", "nc2", "nc2_centered"))
LIMIT += tuple(f"minority_{name}" for name in ("weight", "feature", "spread"))
ALIKE = ("majority_nc2", "minority_weight", "minority_feature")  # in these both networks are claimed to be nearly alike


def etf_stretch(problem: Problem) -> float:
    """Return g of the best layer for a simplex ETF: equal singular values on its K-1 dimensions."""
    if problem.features == "final":
        return 1.0
    share = problem.e_h / math.sqrt(problem.classes - 1)
    return share if problem.model == "explicit" else 1 / (1 - share)


def largest_stretch(problem: Problem) -> float:
    """Return the largest g that a feasible layer has."""
    if problem.features == "final":
        return 1.0
    e = problem.radius
    return {"explicit": e, "skip": 1 + e, "deq": 1 / (1 - e), "series": e / (1 - e)}[problem.model]


def margin(problem: Problem) -> float:
    """Return x, the margin of a simplex ETF with norms at the constraints."""
    return problem.classes / (problem.classes - 1) * math.sqrt(problem.e_w * problem.e_h)


def closed_form_loss(problem: Problem, stretch: float) -> float:
    """Return the loss of a balanced simplex ETF whose features are stretched by g."""
    return math.log1p((problem.classes - 1) * math.exp(-stretch * margin(problem)))


def paper_bounds(problem: Problem) -> dict[str, float]:
    """Return (22) of the explicit network or (33) of the DEQ, with the C1 and C2 that Remark B.2 calls best.

    "printed": the bound as printed. "repaired": its constant taken from Lemma B.1 instead. (19) turns the lemma
    log-softmax <= M1 margin + M2 into loss >= -M1 margin + C4, where C4 must be -M2. The printed C4 is a negative
    number, M2 / N with C1 and C2 exchanged. Repaired, and at the best C1 and C2, the bound is
    log(1 + (K-1) exp(-margin)), with x for the margin in (22) and 2x in (33).
    """
    others, n = problem.classes - 1, len(problem.labels)
    x = (1 if problem.model == "explicit" else 2) * margin(problem)
    q = others / (others + math.exp(x))  # C1 / (C1 + C2)
    printed = ((1 - q) * math.log((1 - q) / others) + q * math.log(q)) / n
    repaired = -q * math.log(q / others) - (1 - q) * math.log(1 - q)
    return {"printed": -q * x + printed, "repaired": -q * x + repaired}


def simplex_gram(classes: int) -> Tensor:
    """Return Theorem 4.1's S with alpha = 1: the Gram matrix (K, K) of a simplex ETF of unit vectors."""
    return (classes * torch.eye(classes, dtype=torch.float64) - 1) / (classes - 1)


def relative_distance(value: Tensor, target: Tensor) -> float:
    """Return the Frobenius distance of two matrices over the norm of the second."""
    return float(torch.linalg.matrix_norm(value - target) / torch.linalg.matrix_norm(target))


def gram_condition(backbone_means: Tensor, e_h: float) -> dict[str, int]:
    """Count the entries that meet Theorem 4.1's E_H < 2 S_ij - m_ij < 1/(1-E_H), m the Gram matrix of h0's class means;
    docs/pages/separation.md proves that not all can."""
    entries = 2 * simplex_gram(len(backbone_means)) - backbone_means @ backbone_means.T
    return {"met": int(((entries > e_h) & (entries < 1 / (1 - e_h))).sum()), "entries": entries.numel()}


def cosine_condition(e_w: float, e_h: float) -> float:
    """Return the left side of Theorem 4.1's E_H/(E_W+E_H) + E_H(1-E_H) < 2; it is always below 1.25."""
    return e_h / (e_w + e_h) + e_h * (1 - e_h)


def gram_distances(means: Tensor, e_h: float) -> dict[str, float]:
    """Return the distance of the Gram matrix of the final class means (K, D) from S at three scales."""
    gram, target = means @ means.T, simplex_gram(len(means))
    unit = gram / torch.linalg.matrix_norm(gram) - target / torch.linalg.matrix_norm(target)
    return {
        "alpha = 1": float(torch.linalg.matrix_norm(gram - target)),
        "alpha = E_H": float(torch.linalg.matrix_norm(gram - e_h * target)),
        "scale-free": float(torch.linalg.matrix_norm(unit)),
    }


def cosines(means: Tensor, weight: Tensor) -> list[float | None]:
    """Return cos(h_k, w_k) of each class; None if a vector has collapsed to less than 1e-5 of the longest of its
    kind."""
    sizes = [torch.linalg.vector_norm(rows, dim=1) for rows in (means, weight)]
    there = (sizes[0] > SAME * sizes[0].max()) & (sizes[1] > SAME * sizes[1].max())
    values = torch.nn.functional.cosine_similarity(means, weight, dim=1, eps=0)
    return [value if exists else None for value, exists in zip(values.tolist(), there.tolist(), strict=True)]


def about_zero(value: float | None) -> str:
    """Judge "this is 0"; None is a number that does not exist."""
    if value is None:
        return NOTHING
    return HOLDS if abs(value) <= ZERO else FAILS


def less(smaller: float, larger: float, scale: float | None = None) -> str:
    """Judge "the first is less than the second", two numbers of the size `scale` (None: of their own)."""
    if abs(larger - smaller) <= SAME * (max(abs(smaller), abs(larger)) if scale is None else scale):
        return ROUNDING
    return HOLDS if smaller < larger else FAILS


def at_least(value: float, bound: float, scale: float) -> str:
    """Judge a lower bound of a positive number of the size `scale`; equality is within it."""
    if bound <= 0:
        return NOTHING
    return HOLDS if value >= bound - SAME * scale else FAILS


def all_above_unity(ratios: list[float | None]) -> str:
    """Judge "every ratio exceeds 1"; None is a ratio that does not exist."""
    known = [ratio for ratio in ratios if ratio is not None]
    if known and min(known) < 1 - SAME:
        return FAILS
    if len(known) < len(ratios):
        return NOTHING
    return ROUNDING if min(known) <= 1 + SAME else HOLDS


def claims_of(result: Part) -> list[Part]:
    """Judge every claim about the parts of a result."""
    balanced, imbalanced, limit = (result[part] for part in ("balanced", "imbalanced", "limit"))
    return [*balanced_claims(balanced), *imbalanced_claims(imbalanced), *limit_claims(limit)]


def _judged(
    bounds: Part, key: str, verdict: str, value: float | None, model: str | None = None, **variant: str
) -> Part:
    """Make the row of a claim of THEORY, with the number that the verdict rests on; `variant` fills in its text."""
    source, text = THEORY[key]
    return {
        "source": source,
        "claim": text.format(**variant),
        "model": model,
        **{name: bounds[name] for name in ("features", "e_w", "e_h")},
        "verdict": verdict,
        "value": value,
    }


def _zero(bounds: Part, key: str, value: float | None, model: str | None = None) -> Part:
    return _judged(bounds, key, about_zero(value), value, model)


def _scale(record: Part) -> float:
    """Return the scale for comparing losses: their distance from 0 or from log K, whichever is less."""
    return min(record["loss"], record["below_chance"])


def balanced_claims(part: Part) -> Iterator[Part]:
    """Judge Theorem 3.1 with the bounds of its proof, and Theorem B.3."""
    for bounds in part["bounds"]:
        for model, record in bounds["models"].items():
            for name in ("nc1", "nc2", "nc3"):
                yield _zero(bounds, f"balanced {name}", record["nc"][name], model)
            yield _zero(bounds, "balanced gram", max(record["weight_gram_error"], record["duality_error"]), model)
            loss, scale = record["loss"], _scale(record)
            for name, bound in record["paper_bound"].items():
                verdict = at_least(loss, bound, scale)
                yield _judged(bounds, f"bound {model}", verdict, loss - bound, model, name=name)
            excess = loss - record["paper_bound"]["repaired"]
            yield _judged(bounds, f"repaired {model}", about_zero(excess / scale), excess, model)
        yield _loss_claim(bounds, "balanced loss", bounds["models"])
    two = part["two_classes"]
    loss, bound = two["loss"], two["paper_bound"]["repaired"]
    verdict = at_least(loss, bound, _scale(two))
    yield _judged({"features": "backbone", **two}, "two classes", verdict, loss - bound, "deq")


def _loss_claim(bounds: Part, key: str, models: Part) -> Part:
    explicit, deq = (models[model] for model in BOTH)
    verdict = less(deq["loss"], explicit["loss"], max(_scale(explicit), _scale(deq)))
    return _judged(bounds, key, verdict, deq["below_chance"] - explicit["below_chance"])


def imbalanced_claims(part: Part) -> Iterator[Part]:
    """Judge Theorem 4.1."""
    for bounds in part["bounds"]:
        comparisons = bounds["comparisons"]
        own = comparisons["own optimum"]["models"]
        for model, record in own.items():
            yield _zero(bounds, "imbalanced nc1", record["nc"]["nc1"], model)
            condition = record["condition"]
            verdict = HOLDS if condition["met"] == condition["entries"] else CONDITION
            yield _judged(bounds, "imbalanced nc2 condition", verdict, condition["met"], model)
        for name, comparison in comparisons.items():
            explicit, deq = (comparison["models"][model]["distances"] for model in BOTH)
            for scale, value in deq.items():
                verdict = less(value, explicit[scale])
                yield _judged(bounds, "imbalanced nc2", verdict, value, scale=scale, name=name)
        yield _judged(bounds, "imbalanced nc3 condition", NOTHING, bounds["cosine_condition"])
        for name, comparison in comparisons.items():
            ratios = comparison["cosine_ratios"]
            above = sum(ratio is not None and ratio > 1 + SAME for ratio in ratios)
            yield _judged(bounds, "imbalanced nc3", all_above_unity(ratios), above, name=name)
        yield _loss_claim(bounds, "imbalanced loss", own)


def limit_claims(part: Part) -> Iterator[Part]:
    """Judge Proposition 4.2, read at infinite R, and minority collapse (Fang et al., PNAS 2021, Theorem 5)."""
    for bounds in part["bounds"]:
        last = bounds["rows"][-1]["models"]
        for name in LIMIT:
            for model, record in last.items():
                yield _zero(bounds, name, record[name], model)
        pairs = [[last[model][name] for model in BOTH] for name in ALIKE]
        yield _zero(bounds, "limit alike", max(abs(a - b) for a, b in pairs if None not in (a, b)))
