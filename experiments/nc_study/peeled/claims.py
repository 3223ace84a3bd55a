"""The paper's claims about the layer-peeled problems, each with a verdict and the numbers behind it."""

from __future__ import annotations

import math

from ..config import MODELS
from ..rundir import Row
from .theory import (
    CONDITION,
    FAILS,
    HOLDS,
    ROUNDING,
    SAME,
    about_zero,
    all_ratios_above_one,
    at_least,
    equal,
    less,
)

NAMES = {"explicit": "explicit", "deq": "DEQ"}
SAME_CLASS = "features collapse to class means"
EQUATION = {"explicit": "(22)", "deq": "(33)"}


def _claim(case: Row, source: str, claim: str, verdict: str, numbers: Row, text: str, model: str | None = None) -> Row:
    place = {name: case[name] for name in ("features", "e_w", "e_h")}
    return {
        "claim": claim,
        "source": source,
        "model": model,
        **place,
        "verdict": verdict,
        "numbers": numbers,
        "text": text,
    }


def balanced_claims(part: Row) -> list[Row]:
    """Theorem 3.1 with the bounds of its proof, and Theorem B.3."""
    rows = []
    for case in part["cases"]:
        for model in MODELS:
            rows += _collapse_claims(case, model, case["models"][model])
            rows += _bound_claims(case, model, case["models"][model])
        rows.append(_loss_claim(case, "Theorem B.3", case["models"]))
    return [*rows, _two_classes_claim(part["two_classes"])]


def _collapse_claims(case: Row, model: str, record: Row) -> list[Row]:
    rows = []
    meaning = {"nc1": SAME_CLASS, "nc2": "class means form a simplex ETF", "nc3": "self-duality"}
    for name, text in meaning.items():
        value = record["nc"][name]
        verdict = about_zero(value)
        shown = "undefined" if value is None else f"{value:.2g}"
        numbers = {name: value, "loss": record["loss"], "loss of the ETF": record["etf_loss"]}
        sentence = f"{name.upper()} = {shown} at the best point found"
        if name == "nc2" and verdict == FAILS:
            gain = math.log(len(record["spectrum"]))
            sentence += (
                f"; it lies {record['below_chance']:.4g} below log K, the best simplex ETF only "
                f"{gain - record['etf_loss']:.4g}"
            )
        rows.append(_claim(case, f"Theorem 3.1, {name.upper()}", text, verdict, numbers, sentence + ".", model))
    error = max(record["weight_gram_error"], record["duality_error"])
    numbers = {name: record[name] for name in ("weight_gram_error", "duality_error")}
    text = f"Relative errors: W W^T {record['weight_gram_error']:.2g}, sqrt(E_W/E_H) W H {record['duality_error']:.2g}."
    claim = "W W^T = sqrt(E_W/E_H) W H = K E_W/(K-1) (I - 11^T/K)"
    rows.append(_claim(case, "Theorem 3.1, NC2", claim, about_zero(error), {"error": error, **numbers}, text, model))
    return rows


def _bound_claims(case: Row, model: str, record: Row) -> list[Row]:
    source, rows = EQUATION[model], []
    loss, scale = record["loss"], _scale(record)
    for name, bound in record["paper_bound"].items():
        numbers = {"gap": loss - bound, "loss": loss, "bound": bound}
        text = f"Loss {loss:.6g}, bound {bound:.6g}"
        text += "; below 0, so that it says nothing." if bound <= 0 else "."
        claim = f"lower bound of the loss, its constant {name}"
        rows.append(_claim(case, source, claim, at_least(loss, bound, scale), numbers, text, model))
    bound = record["paper_bound"]["repaired"]
    text = f"Loss {loss:.6g}, bound {bound:.6g}, simplex ETF {record['etf_loss']:.6g}."
    numbers = {"gap": loss - bound, "loss": loss, "bound": bound}
    claim = "that bound, its constant repaired, is the infimum"
    rows.append(_claim(case, source, claim, equal(loss, bound, scale), numbers, text, model))
    return rows


def _scale(record: Row) -> float:
    """Size by which losses are told apart: distance from 0 or from log K, whichever is less."""
    return min(record["loss"], record["below_chance"])


def _loss_claim(case: Row, source: str, models: Row) -> Row:
    explicit, deq = models["explicit"]["below_chance"], models["deq"]["below_chance"]
    numbers = {"explicit - DEQ": deq - explicit, "explicit": models["explicit"]["loss"], "DEQ": models["deq"]["loss"]}
    text = f"Below log K by {explicit:.6g} (explicit) and {deq:.6g} (DEQ)."
    scale = max(_scale(models[model]) for model in MODELS)
    verdict = less(models["deq"]["loss"], models["explicit"]["loss"], scale)
    return _claim(case, source, "the DEQ reaches a lower loss", verdict, numbers, text)


def _two_classes_claim(record: Row) -> Row:
    case = {"features": "backbone", "e_w": record["e_w"], "e_h": record["e_h"]}
    bound = record["paper_bound"]["repaired"]
    verdict = at_least(record["loss"], bound, _scale(record))
    numbers = {"gap": record["loss"] - bound, "loss": record["loss"], "bound": bound}
    text = f"K = 2: loss {record['loss']:.6g}, bound {bound:.6g}; for K = 2 it fails whenever E_H > 1/2."
    return _claim(case, "(33)", "lower bound (repaired), two classes, E_H > 1/2", verdict, numbers, text, "deq")


def imbalanced_claims(part: Row) -> list[Row]:
    """Theorem 4.1."""
    rows = []
    for case in part["cases"]:
        own = case["comparisons"]["own optimum"]["models"]
        for model in MODELS:
            value = own[model]["nc"]["nc1"]
            numbers, text = {"nc1": value}, f"NC1 = {'undefined' if value is None else format(value, '.2g')}."
            rows.append(_claim(case, "Theorem 4.1, NC1", SAME_CLASS, about_zero(value), numbers, text, model))
            rows.append(_condition_claim(case, model, own[model]["condition"]))
        for name, comparison in case["comparisons"].items():
            rows += _gram_claims(case, name, comparison["models"])
        rows.append(_cosine_condition_claim(case))
        rows += [_cosine_claim(case, name, comparison) for name, comparison in case["comparisons"].items()]
        rows.append(_loss_claim(case, "Section 4", own))
    return rows


def _condition_claim(case: Row, model: str, condition: Row) -> Row:
    verdict = HOLDS if condition["met"] == condition["entries"] else CONDITION
    text = (
        f"Met by {condition['met']} of {condition['entries']} entries ({condition['met_off_diagonal']} off the "
        f"diagonal); the entries add up to {condition['sum']:.3g}, and would have to exceed {condition['needed']:.3g}."
    )
    claim = "condition E_H < 2 S_ij - m_ij < 1/(1-E_H) for all i, j"
    return _claim(case, "Theorem 4.1, NC2", claim, verdict, condition, text, model)


def _gram_claims(case: Row, name: str, models: Row) -> list[Row]:
    rows = []
    for scale, explicit in models["explicit"]["distances"].items():
        deq = models["deq"]["distances"][scale]
        numbers = {"DEQ": deq, "explicit": explicit}
        text = f"Distance {deq:.6g} (DEQ) and {explicit:.6g} (explicit)."
        claim = f"Gram matrix of the DEQ nearer to the ETF, {scale}, {name}"
        rows.append(_claim(case, "Theorem 4.1, NC2", claim, less(deq, explicit), numbers, text))
    return rows


def _cosine_condition_claim(case: Row) -> Row:
    value = case["cosine_condition"]
    text = f"{value:.4g}; it is below 1.25 for all E_W > 0 and E_H in ]0, 1[, so that it excludes nothing."
    verdict = HOLDS if value < 2 else CONDITION
    claim = "condition E_H/(E_W+E_H) + E_H(1-E_H) < 2"
    return _claim(case, "Theorem 4.1, NC3", claim, verdict, {"value": value}, text)


def _cosine_claim(case: Row, name: str, comparison: Row) -> Row:
    ratios = comparison["cosine_ratios"]
    there = [ratio for ratio in ratios if ratio is not None]
    numbers = {
        "above": sum(ratio > 1 + SAME for ratio in there),
        "equal": sum(abs(ratio - 1) <= SAME for ratio in there),
        "below": sum(ratio < 1 - SAME for ratio in there),
        "undefined": len(ratios) - len(there),
        "ratios": ratios,
    }
    text = f"Above 1 for {numbers['above']} classes, 1 for {numbers['equal']}, below for {numbers['below']}"
    text += f", 0/0 for {numbers['undefined']}" if numbers["undefined"] else ""
    if there:
        text += f" (from {min(there):.6f} to {max(there):.6f})"
    claim = f"cos(h_k, w_k) larger for the DEQ in every class, {name}"
    return _claim(case, "Theorem 4.1, NC3", claim, all_ratios_above_one(ratios), numbers, text + ".")


def limit_claims(part: Row) -> list[Row]:
    """Proposition 4.2, read at infinite R, and minority collapse as Fang et al. (PNAS 2021, Theorem 5) have it."""
    claims = {
        "majority_nc1": "majority features collapse to class means",
        "majority_nc2": "majority class means form a K_A-simplex ETF",
        "majority_nc2_centered": "they do so after centring",
        "minority_weight": "minority classifiers are 0",
        "minority_feature": "minority features are 0",
        "minority_spread": "minority classifiers are equal (Fang et al.)",
    }
    rows = []
    for case in part["cases"]:
        last = case["rows"][-1]["models"]
        for name, claim in claims.items():
            for model in MODELS:
                value = last[model][name]
                shown = "undefined" if value is None else f"{value:.3g}"
                text = f"{name.replace('_', ' ')} = {shown} at R = infinity."
                source = "Fang et al., Theorem 5" if "Fang" in claim else "Proposition 4.2"
                rows.append(_claim(case, source, claim, about_zero(value), {name: value}, text, model))
        rows.append(_alike_claim(case, last))
    return rows


def _alike_claim(case: Row, last: Row) -> Row:
    differences = {
        name: abs(last["explicit"][name] - last["deq"][name])
        for name in ("majority_nc2", "minority_weight", "minority_feature")
        if last["explicit"][name] is not None and last["deq"][name] is not None
    }
    largest = max(differences, key=lambda name: differences[name])
    text = f"The largest difference is {differences[largest]:.3g}, of the {largest.replace('_', ' ')}."
    numbers = {"largest": differences[largest], **differences}
    claim = "explicit network and DEQ nearly alike"
    return _claim(case, "Proposition 4.2", claim, about_zero(differences[largest]), numbers, text)


def summary(claims: list[Row]) -> Row:
    """How often each verdict was given."""
    verdicts = [row["verdict"] for row in claims]
    return {verdict: verdicts.count(verdict) for verdict in (HOLDS, FAILS, CONDITION, ROUNDING)}
