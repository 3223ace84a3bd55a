"""Result of the layer-peeled study as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nc_study.config import BOTH
from nc_study.reporting.document import Source, render

from .problem import LAYERS, Part
from .theory import CONDITION, FAILS, HOLDS, NOTHING, ROUNDING, SAME, ZERO

Row = dict[str, Any]  # of a table: column -> value
LABELS = {"explicit": "explicit", "deq": "DEQ"}
SHORT = {HOLDS: "holds", FAILS: "**does not hold**", CONDITION: "condition not met", ROUNDING: "no difference"}
SHORT[NOTHING] = NOTHING


def markdown(result: Part) -> str:
    """Write the result as Markdown: the solved problems, and the verdict on each claim under each reading and bound."""
    counts = Counter(row["verdict"] for row in result["claims"])
    return render(
        Path(__file__).with_name("layer_peeled.md"),
        result=result,
        balanced=list(_balanced(result["balanced"])),
        layers=_layers(result["balanced"]["layers"]),
        local=local_minima(result),
        etf=backbone_etf(result["claims"]),
        summary=", ".join(f"{counts[verdict]} {short.strip('*')}" for verdict, short in SHORT.items()),
        verdicts=_verdicts(result["claims"]),
        zero=ZERO,
        same=SAME,
    )


def local_minima(result: Part) -> list[str]:
    """Name the cases in which the limit part, which solves the same problem at R, ends below the imbalanced part."""
    listed = []
    for bounds, other in zip(result["imbalanced"]["bounds"], result["limit"]["bounds"], strict=True):
        for row in other["rows"]:
            for model in BOTH if row["ratio"] == result["settings"]["ratio"] else ():
                loss = bounds["comparisons"]["own optimum"]["models"][model]["loss"]
                best = row["models"][model]["loss"]
                if loss > best * (1 + SAME):
                    listed.append(f"{place(bounds)}, {LABELS[model]}: loss {loss:.7g}, and {best:.7g} was found")
    return listed


def backbone_etf(claims: list[Part]) -> str:
    """Say for each pair of bounds on h0 of which models the balanced class means form a simplex ETF."""
    said: dict[str, list[str]] = {}
    for claim in claims:
        if claim["claim"] == "class means form a simplex ETF" and claim["features"] == "backbone":
            optimum = f"{LABELS[claim['model']]} {'an ETF' if claim['verdict'] == HOLDS else 'no ETF'}"
            said.setdefault(f"E_W = {claim['e_w']:g}, E_H = {claim['e_h']:g}", []).append(optimum)
    return "; ".join(f"{bounds}: {', '.join(optima)}" for bounds, optima in said.items())


def place(bounds: Part) -> str:
    """Name what E_H bounds, and the bounds."""
    return f"{bounds['features']}, E_W = {bounds['e_w']:g}, E_H = {bounds['e_h']:g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _balanced(part: Part) -> Iterator[Row]:
    for bounds in part["bounds"]:
        for model, record in bounds["models"].items():
            yield {
                "bound on, E_W, E_H": place(bounds),
                "model": LABELS[model],
                "loss": f"{record['loss']:.7g}",
                "of the ETF": f"{record['etf_loss']:.7g}",
                "proved bound": f"{record['lower_bound']:.7g}",
                "(22)/(33)": f"{record['paper_bound']['repaired']:.7g}",
                "rank": sum(value > ZERO for value in record["spectrum"]),
                "KKT": _number(record["residual"]),
                "starts at best": f"{record['starts']['at_best']} of {record['starts']['count']}",
            }


def _layers(rows: list[Part]) -> list[Row]:
    """Make a row of each layer, with a column for each bound."""
    table: dict[str, Row] = {layer: {"final features": text} for layer, text in LAYERS.items()}
    for row in rows:
        norm = {"norm": "norm", "square": "norm²"}[row["bound"]]
        column = f"E_W = {row['e_w']:g}, E_H = {row['e_h']:g}, bound on the layer's {norm}"
        table[row["layer"]][column] = f"{row['below_chance']:.4g} (at most {row['most']:.4g})"
    return list(table.values())


def _verdicts(claims: list[Part]) -> list[Row]:
    """Make a row of each claim about each model, with a column for each place at which it was judged."""
    places = dict.fromkeys(map(place, claims), "")
    rows: dict[tuple[str, ...], Row] = {}
    for claim in claims:
        names = {"source": claim["source"], "claim": claim["claim"], "model": LABELS.get(claim["model"], "both")}
        row = rows.setdefault(tuple(names.values()), {**names, **places})
        row[place(claim)] = Source(f"{SHORT[claim['verdict']]} ({_number(claim['value'])})")
    return list(rows.values())
