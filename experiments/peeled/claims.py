"""Verdicts on the paper's claims about the layer-peeled problems, each with the number it rests on."""

from __future__ import annotations

import math
from collections import Counter

from nc_study.config import MODELS
from nc_study.paper import THEORY

from .problem import Row
from .theory import SAME

HOLDS = "holds"
FAILS = "does not hold"
CONDITION = "condition not met"
ROUNDING = "not distinguishable from rounding"
VERDICTS = (HOLDS, FAILS, CONDITION, ROUNDING)

ZERO = 1e-2
"""What should be 0 and is of order 1 where it is not counts as 0 up to this; solves are some 10 times as accurate."""

# Quantities at infinite R, each a key of THEORY.
LIMIT = tuple(f"majority_{name}" for name in ("nc1", "nc2", "nc2_centered"))
LIMIT += tuple(f"minority_{name}" for name in ("weight", "feature", "spread"))
ALIKE = ("majority_nc2", "minority_weight", "minority_feature")  # in which both networks are said to be nearly alike


def about_zero(value: float | None) -> str:
    """Judge "this is 0"; None is a number that does not exist."""
    return HOLDS if value is not None and abs(value) <= ZERO else FAILS


def less(smaller: float, larger: float, scale: float | None = None) -> str:
    """Judge "the first is less than the second", two numbers of the size `scale` (None: of their own)."""
    if abs(larger - smaller) <= SAME * (max(abs(smaller), abs(larger)) if scale is None else scale):
        return ROUNDING
    return HOLDS if smaller < larger else FAILS


def at_least(value: float, bound: float, scale: float) -> str:
    """Judge a lower bound of a number of the size `scale`; equality is within it."""
    return HOLDS if value >= bound - SAME * scale else FAILS


def equal(value: float, claimed: float, scale: float) -> str:
    """Judge an equation between numbers of the size `scale`."""
    return HOLDS if abs(value - claimed) <= ZERO * scale else FAILS


def all_ratios_above_one(ratios: list[float | None]) -> str:
    """Judge "every ratio exceeds 1"; None is a ratio that does not exist."""
    if any(ratio is None or ratio < 1 - SAME for ratio in ratios):
        return FAILS
    return ROUNDING if any(ratio is not None and ratio <= 1 + SAME for ratio in ratios) else HOLDS


def claims_of(result: Row) -> list[Row]:
    """Judge every claim about the parts that a result holds."""
    makers = {"balanced": balanced_claims, "imbalanced": imbalanced_claims, "limit": limit_claims}
    return [claim for part, make in makers.items() if result[part] for claim in make(result[part])]


def _judged(
    bounds: Row, key: str, verdict: str, value: float | None, text: str, model: str | None = None, **variant: str
) -> Row:
    """Make the row of a claim of THEORY; `variant` fills in its text."""
    claim = THEORY[key]
    return {
        "source": claim.source,
        "claim": claim.text.format(**variant),
        "model": model,
        **{name: bounds[name] for name in ("features", "e_w", "e_h")},
        "verdict": verdict,
        "value": value,
        "text": text,
    }


def _zero(bounds: Row, key: str, value: float | None, text: str, model: str | None = None) -> Row:
    """Make the row of a claim that a number is 0, which `{}` in the text stands for."""
    shown = "undefined" if value is None else f"{value:.3g}"
    return _judged(bounds, key, about_zero(value), value, text.format(shown), model)


def _scale(record: Row) -> float:
    """Return the size by which losses are told apart: distance from 0 or from log K, whichever is less."""
    return min(record["loss"], record["below_chance"])


def balanced_claims(part: Row) -> list[Row]:
    """Judge Theorem 3.1 with the bounds of its proof, and Theorem B.3."""
    rows = []
    for bounds in part["bounds"]:
        for model, record in bounds["models"].items():
            rows += [*_collapse_claims(bounds, model, record), *_bound_claims(bounds, model, record)]
        rows.append(_loss_claim(bounds, "balanced loss", bounds["models"]))
    two = part["two_classes"]
    loss, bound = two["loss"], two["paper_bound"]["repaired"]
    text = f"K = 2: loss {loss:.6g}, bound {bound:.6g}; for K = 2 it fails whenever E_H > 1/2."
    verdict = at_least(loss, bound, _scale(two))
    return [*rows, _judged({"features": "backbone", **two}, "two classes", verdict, loss - bound, text, "deq")]


def _collapse_claims(bounds: Row, model: str, record: Row) -> list[Row]:
    nc, weights, duality = record["nc"], record["weight_gram_error"], record["duality_error"]
    apart = ""
    if about_zero(nc["nc2"]) == FAILS:
        etf = math.log(len(record["spectrum"])) - record["etf_loss"]
        apart = f"; it lies {record['below_chance']:.4g} below log K, the best simplex ETF only {etf:.4g}"
    text = f"Relative errors: W W^T {weights:.2g}, sqrt(E_W/E_H) W H {duality:.2g}."
    return [
        _zero(bounds, "balanced nc1", nc["nc1"], "NC1 = {} at the best point found.", model),
        _zero(bounds, "balanced nc2", nc["nc2"], f"NC2 = {{}} at the best point found{apart}.", model),
        _zero(bounds, "balanced nc3", nc["nc3"], "NC3 = {} at the best point found.", model),
        _zero(bounds, "balanced gram", max(weights, duality), text, model),
    ]


def _bound_claims(bounds: Row, model: str, record: Row) -> list[Row]:
    loss, scale, rows = record["loss"], _scale(record), []
    for name, bound in record["paper_bound"].items():
        text = f"Loss {loss:.6g}, bound {bound:.6g}{'; below 0, so that it says nothing' if bound <= 0 else ''}."
        rows.append(
            _judged(bounds, f"bound {model}", at_least(loss, bound, scale), loss - bound, text, model, name=name)
        )
    bound = record["paper_bound"]["repaired"]
    text = f"Loss {loss:.6g}, bound {bound:.6g}, simplex ETF {record['etf_loss']:.6g}."
    return [*rows, _judged(bounds, f"repaired {model}", equal(loss, bound, scale), loss - bound, text, model)]


def _loss_claim(bounds: Row, key: str, models: Row) -> Row:
    explicit, deq = (models[model]["below_chance"] for model in MODELS)
    text = f"Below log K by {explicit:.6g} (explicit) and {deq:.6g} (DEQ)."
    scale = max(_scale(models[model]) for model in MODELS)
    verdict = less(models["deq"]["loss"], models["explicit"]["loss"], scale)
    return _judged(bounds, key, verdict, deq - explicit, text)


def imbalanced_claims(part: Row) -> list[Row]:
    """Judge Theorem 4.1."""
    rows = []
    for bounds in part["bounds"]:
        comparisons = bounds["comparisons"]
        own = comparisons["own optimum"]["models"]
        for model, record in own.items():
            rows.append(_zero(bounds, "imbalanced nc1", record["nc"]["nc1"], "NC1 = {}.", model))
            rows.append(_condition_claim(bounds, model, record["condition"]))
        for name, comparison in comparisons.items():
            rows += _gram_claims(bounds, name, comparison["models"])
        value = bounds["cosine_condition"]
        text = f"{value:.4g}; it is below 1.25 for all E_W > 0 and E_H in ]0, 1[, so that it excludes nothing."
        rows.append(_judged(bounds, "imbalanced nc3 condition", HOLDS if value < 2 else CONDITION, value, text))
        rows += [_cosine_claim(bounds, name, one["cosine_ratios"]) for name, one in comparisons.items()]
        rows.append(_loss_claim(bounds, "imbalanced loss", own))
    return rows


def _condition_claim(bounds: Row, model: str, condition: Row) -> Row:
    verdict = HOLDS if condition["met"] == condition["entries"] else CONDITION
    text = (
        "Met by {met} of {entries} entries ({met_off_diagonal} off the diagonal); the entries add up to {sum:.3g}, and "
        "would have to exceed {needed:.3g}."
    )
    return _judged(bounds, "imbalanced nc2 condition", verdict, condition["met"], text.format(**condition), model)


def _gram_claims(bounds: Row, name: str, models: Row) -> list[Row]:
    rows = []
    for scale, explicit in models["explicit"]["distances"].items():
        deq = models["deq"]["distances"][scale]
        text = f"Distance {deq:.6g} (DEQ) and {explicit:.6g} (explicit)."
        rows.append(_judged(bounds, "imbalanced nc2", less(deq, explicit), deq, text, scale=scale, name=name))
    return rows


def _cosine_claim(bounds: Row, name: str, ratios: list[float | None]) -> Row:
    there = [ratio for ratio in ratios if ratio is not None]
    above, below = sum(ratio > 1 + SAME for ratio in there), sum(ratio < 1 - SAME for ratio in there)
    text = f"Above 1 for {above} classes, 1 for {len(there) - above - below}, below for {below}"
    text += f", 0/0 for {len(ratios) - len(there)}" if len(there) < len(ratios) else ""
    text += f" (from {min(there):.6f} to {max(there):.6f})" if there else ""
    return _judged(bounds, "imbalanced nc3", all_ratios_above_one(ratios), above, f"{text}.", name=name)


def limit_claims(part: Row) -> list[Row]:
    """Judge Proposition 4.2, read at infinite R, and minority collapse (Fang et al., PNAS 2021, Theorem 5)."""
    rows = []
    for bounds in part["bounds"]:
        last = bounds["rows"][-1]["models"]
        for name in LIMIT:
            text = f"{name.replace('_', ' ')} = {{}} at R = infinity."
            rows += [_zero(bounds, name, record[name], text, model) for model, record in last.items()]
        pairs = {name: [last[model][name] for model in MODELS] for name in ALIKE}
        apart = {name: abs(one - other) for name, (one, other) in pairs.items() if None not in (one, other)}
        largest = max(apart, key=apart.__getitem__)
        text = f"The largest difference is {{}}, of the {largest.replace('_', ' ')}."
        rows.append(_zero(bounds, "limit alike", apart[largest], text))
    return rows


def summary(claims: list[Row]) -> str:
    """Count how often each verdict was given."""
    counts = Counter(row["verdict"] for row in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
