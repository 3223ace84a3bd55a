"""The result of the layer-peeled study as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from nc_study.config import MODELS
from nc_study.figures import COLOURS, LABELS, MARKERS, png
from nc_study.record import to_json
from nc_study.reporting.document import Source, render
from nc_study.rundir import write_atomically

from .claims import CONDITION, FAILS, HOLDS, ROUNDING, ZERO, summary
from .problem import Row
from .theory import SAME

SHORT = {HOLDS: "holds", FAILS: "**does not hold**", CONDITION: "condition not met", ROUNDING: "no difference"}
FLOOR = SAME  # what is smaller is 0 to the accuracy of the solves, and drawn here on a logarithmic axis
LIMIT = {
    "majority_nc1": "majority NC1",
    "majority_nc2": "NC2 of K_A",
    "majority_nc2_centered": "centred",
    "minority_weight": "minority w",
    "minority_feature": "minority h",
    "minority_spread": "spread of w",
    "minority_cosine": "cosine of w",
    "residual": "KKT",
}


def markdown(result: Row) -> str:
    """Write the result as Markdown: what was solved, and the verdict on each claim under each reading and bound."""
    tables = {"balanced": _balanced, "imbalanced": _imbalanced, "limit": _limit}
    return render(
        Path(__file__).with_name("layer_peeled.md"),
        result=result,
        **{part: list(rows(result[part])) if result[part] else [] for part, rows in tables.items()},
        local=local_minima(result),
        summary=summary(result["claims"]),
        verdicts=_verdicts(result["claims"]),
        zero=ZERO,
        same=SAME,
    )


def local_minima(result: Row) -> list[str]:
    """Tell where the limit part, which solves the same problem at R, ends below the imbalanced part: that was local."""
    if not (result["imbalanced"] and result["limit"]):
        return []
    lines = []
    for bounds, other in zip(result["imbalanced"]["bounds"], result["limit"]["bounds"], strict=True):
        own = bounds["comparisons"]["own optimum"]["models"]
        same = [row["models"] for row in other["rows"] if row["ratio"] == result["settings"]["ratio"]]
        for model, found, best in ((model, own[model]["loss"], row[model]["loss"]) for row in same for model in MODELS):
            if found > best * (1 + SAME):
                lines.append(
                    f"For {place(bounds)}, {LABELS[model]}, the optimum given for imbalanced classes is local: loss "
                    f"{found:.7g}; the limit part found {best:.7g} for the same problem. What is said of it there, "
                    "other than by a comparison of losses, is said of a local minimum."
                )
    return lines


def place(bounds: Row) -> str:
    """Name what E_H bounds, and the bounds."""
    return f"{bounds['features']}, E_W = {bounds['e_w']:g}, E_H = {bounds['e_h']:g}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _balanced(part: Row) -> Iterator[Row]:
    for bounds in part["bounds"]:
        for model, record in bounds["models"].items():
            starts = record["starts"]
            yield {
                "bound on, E_W, E_H": place(bounds),
                "model": LABELS[model],
                "loss": f"{record['loss']:.7g}",
                "of the ETF": f"{record['etf_loss']:.7g}",
                "proved bound": f"{record['lower_bound']:.7g}",
                "(22)/(33)": f"{record['paper_bound']['repaired']:.7g}",
                **{name.upper(): _number(record["nc"][name]) for name in ("nc1", "nc2", "nc3")},
                "rank": sum(value > ZERO for value in record["spectrum"]),
                "KKT": _number(record["residual"]),
                "certified gap": _number(record["certified_gap"]),
                "starts at best": f"{starts['at_best']} of {starts['count']}",
                "spread": _number(starts["spread"]),
            }


def _imbalanced(part: Row) -> Iterator[Row]:
    many = part["majority"]
    for bounds in part["bounds"]:
        for name, comparison in bounds["comparisons"].items():
            for model, record in comparison["models"].items():
                yield {
                    "bound on, E_W, E_H": place(bounds),
                    "compared at": name,
                    "model": LABELS[model],
                    "loss": f"{record['loss']:.7g}",
                    "NC1": _number(record["nc"]["nc1"]),
                    "KKT": _number(record["residual"]),
                    **{scale: f"{distance:.5g}" for scale, distance in record["distances"].items()},
                    "cos majority": _range(record["cosines"][:many]),
                    "cos minority": _range(record["cosines"][many:]),
                }


def _range(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "0/0"
    text = f"{min(there):.5f}" if max(there) - min(there) < SAME else f"{min(there):.5f} to {max(there):.5f}"
    return text if len(there) == len(values) else f"{text}, 0/0 for {len(values) - len(there)}"


def _limit(part: Row) -> Iterator[Row]:
    for bounds in part["bounds"]:
        for line in bounds["rows"]:
            ratio = "infinite" if line["ratio"] is None else f"{line['ratio']:g}"
            for model, record in line["models"].items():
                yield {
                    "bound on, E_W, E_H": place(bounds),
                    "R (K_A n_A/N)": f"{ratio} ({line['majority_share']:.4g})",
                    "model": LABELS[model],
                    "loss": f"{record['loss']:.7g}",
                    **{column: _number(record[name]) for name, column in LIMIT.items()},
                }


def _verdicts(claims: list[Row]) -> list[Row]:
    """Make a row of each claim about each model, with a column for each place at which it was judged."""
    places = dict.fromkeys(map(place, claims), "")
    rows: dict[tuple[str, ...], Row] = {}
    for one in claims:
        names = {"source": one["source"], "claim": one["claim"], "model": LABELS.get(one["model"], "both")}
        row = rows.setdefault(tuple(names.values()), {**names, **places})
        row[place(one)] = Source(f"{SHORT[one['verdict']]} ({_number(one['value'])})")
    return list(rows.values())


def write(result: Row, out: Path) -> list[Path]:
    """Write layer_peeled.json, layer_peeled.md and the figures of the parts that were run; return the paths."""
    paths = [out / "layer_peeled.json", out / "layer_peeled.md"]
    write_atomically(paths[0], to_json(result))
    write_atomically(paths[1], markdown(result).encode())
    for name, draw in (("balanced", spectrum_figure), ("limit", limit_figure)):
        if result[name]:
            paths.append(out / f"layer_peeled_{name}.png")
            write_atomically(paths[-1], png(draw(result[name])))
    return paths


def _panels(part: Row) -> tuple[Figure, list[Axes]]:
    count = len(part["bounds"])
    size = (3.4 * count + 0.6, 3.6)
    figure, axes = plt.subplots(1, count, figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axis, bounds in zip(axes[0], part["bounds"], strict=True):
        axis.set_title(
            f"bound on {bounds['features']} features\nE_W = {bounds['e_w']:g}, E_H = {bounds['e_h']:g}", size=10
        )
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _style(model: str) -> dict[str, Any]:
    """Choose open markers for the DEQ: the curves often lie on one another."""
    return {"marker": MARKERS[model], "mfc": "none" if model == "deq" else COLOURS[model], "color": COLOURS[model]}


def spectrum_figure(part: Row) -> Figure:
    """Draw the singular values of the class means at the best point of the balanced problems, and a simplex ETF's."""
    figure, axes = _panels(part)
    for axis, bounds in zip(axes, part["bounds"], strict=True):
        for model in MODELS:
            values = bounds["models"][model]["spectrum"]
            dash = "--" if model == "deq" else "-"
            axis.plot(range(1, len(values) + 1), values, dash, label=LABELS[model], **_style(model))
        etf = [1.0] * (len(values) - 1) + [0.0]
        axis.plot(range(1, len(values) + 1), etf, color="0.4", ls=":", lw=3, zorder=0, label="simplex ETF")
        axis.set_xlabel("index")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("singular value / largest")
    axes[0].legend(fontsize="small", loc="lower left")
    figure.suptitle("Balanced: spectrum of the class means at the optimum")
    return figure


def limit_figure(part: Row) -> Figure:
    """Draw the norm of minority classifiers and features against R, relative to the majority's."""
    figure, axes = _panels(part)
    for axis, bounds in zip(axes, part["bounds"], strict=True):
        finite = [row["ratio"] for row in bounds["rows"] if row["ratio"] is not None]
        places = [*finite, 30 * max(finite)]
        for name, dash, what in (("minority_weight", "-", "w"), ("minority_feature", ":", "h")):
            for model in MODELS:
                values = [max(row["models"][model][name], FLOOR) for row in bounds["rows"]]
                axis.plot(places, values, dash, label=f"{what}, {LABELS[model]}", **_style(model))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(places, [*(f"$10^{{{math.log10(r):.3g}}}$" for r in finite), "∞"], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("R = n_A / n_B")
    axes[0].set_ylabel(f"minority norm / majority norm\n({FLOOR:g}: 0, to the accuracy of the solves)")
    axes[-1].legend(fontsize="small")
    figure.suptitle("Rising imbalance: largest minority classifier (w) and class mean (h)")
    return figure
