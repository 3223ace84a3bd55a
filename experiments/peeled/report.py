"""The result of the layer-peeled study as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from nc_study.config import MODELS
from nc_study.figures import COLOURS, LABELS, MARKERS, png
from nc_study.record import to_json
from nc_study.reporting.document import markdown_table
from nc_study.rundir import write_atomically

from .claims import CONDITION, FAILS, HOLDS, ROUNDING, ZERO, summary
from .problem import Row
from .theory import SAME

SHORT = {HOLDS: "holds", FAILS: "**does not hold**", CONDITION: "condition not met", ROUNDING: "no difference"}
FLOOR = SAME  # what is smaller is 0 to the accuracy of the solves, and drawn here on a logarithmic axis

NOTES = f"""\
The constraint with E_H is on W_EX h0 and z\\* (“final”: Definition 2.2 and Appendix B.1) or on h0 (“backbone”: what the
proofs use in (21), (32), (43) and (44)). Under the first the layer drops out: whatever W_EX (invertible) or W_DEQ is,
some h0 reaches every feature matrix, and both models are the layer-peeled problem (6). Theorem 3.1 needs the first
reading, Theorems B.3 and 4.1 the second, since under the first nothing can differ between the models. The loss of
problem (10) is taken as the mean over all samples; as printed, each sum over n_A samples is also multiplied by K_A
n_A / N. For small bounds on h0 the balanced optimum is no simplex ETF unless K = 2: logits of rank one are best for
W_EX, and for W_DEQ if E_W <= E_H; its ETF is best only from about E_W = (K-1) E_H on. Optima are the best of several
random starts, which proves an upper bound of the minimum; “certified gap” bounds what is missing (under the second
reading from a bound that need not be attained). S is the Gram matrix of K unit vectors in a simplex ETF, times alpha.
A metric up to {ZERO:g} counts as 0, a relative difference up to {SAME:g} as none."""

BALANCED_NOTE = """\
(22)/(33) with the constant of Lemma B.1 and its best C1, C2; as printed it has the wrong sign and a factor 1/N, and
both bounds are negative. Proved bound: no feasible point is below it. KKT: residual of the conditions."""

IMBALANCED_NOTE = """\
alpha = 1, alpha = E_H: Frobenius distance of the class means' Gram matrix from S; scale-free: after both are given
norm 1. 0/0: h_k or w_k has collapsed to 0."""

LIMIT_NOTE = """\
Each class is represented by columns with the weight of the class; at infinite R the minority has none. Minority w and
h: largest norm, relative to that of the majority; spread: largest distance between two minority classifiers, likewise;
cosine: mean over their pairs (–: they are 0)."""


def markdown(result: Row) -> str:
    """Write the result as Markdown: what was solved, and the verdict on each claim under each reading and bound."""
    settings = result["settings"]
    parts = [
        "# Layer-peeled problems",
        f"K = {settings['classes']}, D = {settings['dimension']}, n = n_A = {settings['samples']}, "
        f"R = {settings['ratio']}, K_A = {settings['majority']}, seeds {settings['seeds']}; float64, "
        f"{result['seconds']:.0f} s on {result['machine']['cpu']}, torch {result['versions']['torch']}.",
        NOTES,
    ]
    if result["balanced"]:
        parts += ["## Balanced classes, problems (7) and (9)", _balanced(result["balanced"]), BALANCED_NOTE]
    if result["imbalanced"]:
        parts += ["## Imbalanced classes, problem (10)", _imbalanced(result["imbalanced"]), IMBALANCED_NOTE]
    if result["limit"]:
        parts += ["## Rising imbalance, Proposition 4.2", _limit(result["limit"]), LIMIT_NOTE]
    return "\n\n".join([*parts, *local_minima(result), "## Verdicts", *_verdicts(result["claims"])]) + "\n"


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


def _balanced(part: Row) -> str:
    head = ["bound on, E_W, E_H", "model", "loss", "of the ETF", "proved bound", "(22)/(33)", "NC1", "NC2", "NC3"]
    rows = []
    for bounds in part["bounds"]:
        for model, record in bounds["models"].items():
            losses = (record["loss"], record["etf_loss"], record["lower_bound"], record["paper_bound"]["repaired"])
            collapse = (record["nc"][name] for name in ("nc1", "nc2", "nc3"))
            rank, starts = sum(value > ZERO for value in record["spectrum"]), record["starts"]
            row = [place(bounds), LABELS[model], *(f"{loss:.7g}" for loss in losses), *map(_number, collapse)]
            row += [str(rank), _number(record["residual"]), _number(record["certified_gap"])]
            rows.append([*row, f"{starts['at_best']} of {starts['count']}", _number(starts["spread"])])
    return markdown_table([*head, "rank", "KKT", "certified gap", "starts at best", "spread"], rows)


def _imbalanced(part: Row) -> str:
    head = ["bound on, E_W, E_H", "compared at", "model", "loss", "NC1", "KKT", "alpha = 1", "alpha = E_H"]
    rows, many = [], part["majority"]
    for bounds in part["bounds"]:
        for name, comparison in bounds["comparisons"].items():
            for model, record in comparison["models"].items():
                row = [place(bounds), name, LABELS[model], f"{record['loss']:.7g}", _number(record["nc"]["nc1"])]
                row += [_number(record["residual"]), *(f"{value:.5g}" for value in record["distances"].values())]
                rows.append([*row, _range(record["cosines"][:many]), _range(record["cosines"][many:])])
    return markdown_table([*head, "scale-free", "cos majority", "cos minority"], rows)


def _range(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "0/0"
    text = f"{min(there):.5f}" if max(there) - min(there) < SAME else f"{min(there):.5f} to {max(there):.5f}"
    return text if len(there) == len(values) else f"{text}, 0/0 for {len(values) - len(there)}"


def _limit(part: Row) -> str:
    columns = {
        "majority_nc1": "majority NC1",
        "majority_nc2": "NC2 of K_A",
        "majority_nc2_centered": "centred",
        "minority_weight": "minority w",
        "minority_feature": "minority h",
        "minority_spread": "spread of w",
        "minority_cosine": "cosine of w",
        "residual": "KKT",
    }
    rows = []
    for bounds in part["bounds"]:
        for line in bounds["rows"]:
            ratio = "infinite" if line["ratio"] is None else f"{line['ratio']:g}"
            for model, record in line["models"].items():
                row = [place(bounds), f"{ratio} ({line['majority_share']:.4g})", LABELS[model], f"{record['loss']:.7g}"]
                rows.append([*row, *(_number(record[name]) for name in columns)])
    return markdown_table(["bound on, E_W, E_H", "R (K_A n_A/N)", "model", "loss", *columns.values()], rows)


def _verdicts(claims: list[Row]) -> list[str]:
    columns = list(dict.fromkeys(place(row) for row in claims))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in claims:
        key = (row["source"], row["claim"], LABELS.get(row["model"], "both"))
        lines.setdefault(key, {})[place(row)] = f"{SHORT[row['verdict']]} ({_number(row['value'])})"
    rows = [[*key, *(found.get(column, "") for column in columns)] for key, found in lines.items()]
    table = markdown_table(["source", "claim", "model", *columns], rows)
    return [f"{summary(claims)}. In brackets the number behind a verdict.", table]


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
