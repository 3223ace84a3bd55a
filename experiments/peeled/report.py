"""The result of the layer-peeled study as tables and figures."""

from __future__ import annotations

import io
import math
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..config import MODELS
from ..figures import COLOURS, LABELS, MARKERS
from ..rundir import Row, write_atomically, write_json
from .claims import NAMES, summary
from .theory import CONDITION, FAILS, HOLDS, ROUNDING, SAME, ZERO

SHORT = {HOLDS: "holds", FAILS: "**does not hold**", CONDITION: "*condition not met*", ROUNDING: "no difference"}
FLOOR = SAME  # what is smaller is 0 to the accuracy of the solves, and drawn here on a logarithmic axis

NOTES = f"""\
The constraint with E_H is on W_EX h0 and z* ("final": Definition 2.2 and Appendix B.1) or on h0 ("backbone": what the
proofs use in (21), (32), (43) and (44)). Under the first the layer drops out: whatever W_EX (invertible) or W_DEQ is,
some h0 reaches every feature matrix, and both models are the layer-peeled problem (6). Theorem 3.1 needs the first
reading, Theorems B.3 and 4.1 the second, since under the first nothing can differ between the models. The loss of
problem (10) is taken as the mean over all samples; as printed, each sum over n_A samples is also multiplied by K_A
n_A / N. For small bounds on h0 the balanced optimum is no simplex ETF unless K = 2: logits of rank one are best for
W_EX, and for W_DEQ if E_W <= E_H; its ETF is best only from about E_W = (K-1) E_H on. Optima are the best of several
random starts, which proves an upper bound of the minimum; "certified gap" bounds what is missing (under the second
reading from a bound that need not be attained). S is the Gram matrix of K unit vectors in a simplex ETF, times alpha.
A metric up to {ZERO:g} counts as 0, a relative difference up to {SAME:g} as none.\
"""


def markdown(result: Row) -> str:
    """The result as Markdown: what was solved, and the verdict on each claim under each reading and bound."""
    settings, parts = result["settings"], []
    parts.append(
        f"K = {settings['classes']}, D = {settings['dimension']}, n = n_A = {settings['samples']}, "
        f"R = {settings['ratio']}, K_A = {settings['majority']}, seeds {settings['seeds']}; float64, "
        f"{result['seconds']:.0f} s on {result['machine']['cpu']}, torch {result['versions']['torch']}."
    )
    parts.append(NOTES)
    for name, make in (("balanced", _balanced), ("imbalanced", _imbalanced), ("limit", _limit)):
        if result[name]:
            parts.append(make(result[name]))
    parts += local_minima(result)
    parts.append(_verdicts(result["claims"]))
    return "\n\n".join(parts) + "\n"


def local_minima(result: Row) -> list[str]:
    """Where the limit part, whose row with R is the same problem, ends below the imbalanced part: that was local."""
    if not (result["imbalanced"] and result["limit"]):
        return []
    lines = []
    for case, other in zip(result["imbalanced"]["cases"], result["limit"]["cases"], strict=True):
        for row in other["rows"]:
            for model in MODELS if row["ratio"] == result["settings"]["ratio"] else ():
                own = case["comparisons"]["own optimum"]["models"]
                found, best = own[model]["loss"], row["models"][model]["loss"]
                if found > best * (1 + SAME):
                    lines.append(
                        f"Of {place(case)}, {NAMES[model]}, the optimum given for imbalanced classes is local: loss "
                        f"{found:.7g}; the limit part found {best:.7g} for the same problem. What is said of it there, "
                        "other than by a comparison of losses, is said of a local minimum."
                    )
    return lines


def place(case: Row) -> str:
    """Name of a case: what E_H bounds, and the bounds."""
    return f"{case['features']}, E_W = {case['e_w']:g}, E_H = {case['e_h']:g}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table that is aligned as plain text, too."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
             for row in [head, *rows]]  # fmt: skip
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _balanced(part: Row) -> str:
    head = ["bound on, E_W, E_H", "model", "loss", "of the ETF", "proved bound", "(22)/(33)*", "NC1", "NC2", "NC3",
            "rank", "KKT", "certified gap", "starts at best", "spread"]  # fmt: skip
    rows = []
    for case in part["cases"]:
        for model, record in case["models"].items():
            seeds, nc = record["seeds"], record["nc"]
            losses = [record["loss"], record["etf_loss"], record["lower_bound"], record["paper_bound"]["repaired"]]
            rows.append([
                place(case), NAMES[model], *(f"{loss:.7g}" for loss in losses),
                *(_number(nc[name]) for name in ("nc1", "nc2", "nc3")), str(_rank(record["spectrum"])),
                _number(record["residual"]), _number(record["certified_gap"]),
                f"{seeds['at_best']} of {len(seeds['losses'])}", _number(seeds["spread"]),
            ])  # fmt: skip
    caption = (
        "\n\n(22)/(33)*: with the constant of Lemma B.1 and its best C1, C2; as printed it has the wrong sign "
        "and a factor 1/N, and both bounds are negative. Proved bound: no feasible point is below it."
    )
    return "### Balanced classes, problems (7) and (9)\n\n" + table(head, rows) + caption


def _rank(spectrum: list[float]) -> int:
    return sum(value > ZERO for value in spectrum)


def _imbalanced(part: Row) -> str:
    head = ["bound on, E_W, E_H", "compared at", "model", "loss", "NC1", "KKT", "alpha = 1", "alpha = E_H",
            "scale-free", "cos majority", "cos minority"]  # fmt: skip
    rows, many = [], part["majority"]
    for case in part["cases"]:
        for name, comparison in case["comparisons"].items():
            for model, record in comparison["models"].items():
                distances, cosines = record["distances"], record["cosines"]
                rows.append([
                    place(case), name, NAMES[model], f"{record['loss']:.7g}", _number(record["nc"]["nc1"]),
                    _number(record["residual"]), *(f"{value:.5g}" for value in distances.values()),
                    _range(cosines[:many]), _range(cosines[many:]),
                ])  # fmt: skip
    caption = (
        "\n\nalpha = 1, alpha = E_H: Frobenius distance of the class means' Gram matrix from S; scale-free: after "
        "both are given norm 1. 0/0: h_k or w_k has collapsed to 0."
    )
    return "### Imbalanced classes, problem (10)\n\n" + table(head, rows) + caption


def _range(values: list[float | None]) -> str:
    there = [value for value in values if value is not None]
    if not there:
        return "0/0"
    text = f"{min(there):.5f}" if max(there) - min(there) < SAME else f"{min(there):.5f} to {max(there):.5f}"
    return text if len(there) == len(values) else f"{text}, 0/0 for {len(values) - len(there)}"


def _limit(part: Row) -> str:
    head = ["bound on, E_W, E_H", "R (K_A n_A/N)", "model", "loss", "majority NC1", "NC2 of K_A", "centred",
            "minority w", "minority h", "spread of w", "cosine of w", "KKT"]  # fmt: skip
    names = ("majority_nc1", "majority_nc2", "majority_nc2_centered", "minority_weight", "minority_feature",
             "minority_spread", "minority_cosine", "residual")  # fmt: skip
    rows = []
    for case in part["cases"]:
        for line in case["rows"]:
            ratio = "infinite" if line["ratio"] is None else f"{line['ratio']:g}"
            ratio += f" ({line['majority_share']:.4g})"
            for model, record in line["models"].items():
                values = [_number(record[name]) for name in names]
                rows.append([place(case), ratio, NAMES[model], f"{record['loss']:.7g}", *values])
    caption = (
        f"\n\nEach class is represented by {part['columns']} columns with the weight of the class; at infinite R the "
        "minority has none. Minority w and h: largest norm, relative to that of the majority; spread: largest distance "
        "between two minority classifiers, likewise; cosine: mean over their pairs (-: they are 0)."
    )
    return "### Rising imbalance, Proposition 4.2\n\n" + table(head, rows) + caption


def _verdicts(claims: list[Row]) -> str:
    columns = list(dict.fromkeys(place(row) for row in claims))
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in claims:
        key = (row["source"], row["claim"], NAMES.get(row["model"], "both"))
        value = next(iter(row["numbers"].values()))
        lines.setdefault(key, {})[place(row)] = f"{SHORT[row['verdict']]} ({_number(value)})"
    rows = [[*key, *(cells.get(column, "") for column in columns)] for key, cells in lines.items()]
    counts = ", ".join(f"{number} {verdict}" for verdict, number in summary(claims).items())
    head = ["source", "claim", "model", *columns]
    return f"### Verdicts\n\n{counts}. In brackets the first of the numbers behind a verdict.\n\n" + table(head, rows)


def write(result: Row, out: Path) -> list[Path]:
    """layer_peeled.json, layer_peeled.md and the figures of the parts that were run; the paths."""
    paths = [out / "layer_peeled.json", out / "layer_peeled.md"]
    write_json(paths[0], result)
    write_atomically(paths[1], ("# Layer-peeled problems\n\n" + markdown(result)).encode())
    for name, draw in (("balanced", spectrum_figure), ("limit", limit_figure)):
        if result[name]:
            figure = draw(result[name])
            for kind in ("png", "svg"):
                image = io.BytesIO()
                figure.savefig(image, format=kind, dpi=150)
                paths.append(out / f"layer_peeled_{name}.{kind}")
                write_atomically(paths[-1], image.getvalue())
            plt.close(figure)
    return paths


def _panels(part: Row) -> tuple[Figure, list[Axes]]:
    count = len(part["cases"])
    figure, axes = plt.subplots(
        1, count, figsize=(3.4 * count + 0.6, 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axis, case in zip(axes[0], part["cases"], strict=True):
        axis.set_title(f"bound on {case['features']} features\nE_W = {case['e_w']:g}, E_H = {case['e_h']:g}", size=10)
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _fill(model: str) -> str:
    """Open markers for the DEQ: the curves often lie on one another."""
    return "none" if model == "deq" else COLOURS[model]


def spectrum_figure(part: Row) -> Figure:
    """Singular values of the class means at the best point of the balanced problems, with those of a simplex ETF."""
    figure, axes = _panels(part)
    for axis, case in zip(axes, part["cases"], strict=True):
        for model in MODELS:
            values = case["models"][model]["spectrum"]
            axis.plot(range(1, len(values) + 1), values, "--" if model == "deq" else "-", marker=MARKERS[model],
                      mfc=_fill(model), color=COLOURS[model], label=LABELS[model])  # fmt: skip
        etf = [1.0] * (len(values) - 1) + [0.0]
        axis.plot(range(1, len(values) + 1), etf, color="0.4", ls=":", lw=3, zorder=0, label="simplex ETF")
        axis.set_xlabel("index")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("singular value / largest")
    axes[0].legend(fontsize="small", loc="lower left")
    figure.suptitle("Balanced: spectrum of the class means at the optimum")
    return figure


def limit_figure(part: Row) -> Figure:
    """Norm of minority classifiers and features against R, relative to the majority's."""
    figure, axes = _panels(part)
    for axis, case in zip(axes, part["cases"], strict=True):
        finite = [row["ratio"] for row in case["rows"] if row["ratio"] is not None]
        places = [*finite, 30 * max(finite)] if len(finite) < len(case["rows"]) else finite
        for name, dash, what in (("minority_weight", "-", "w"), ("minority_feature", ":", "h")):
            for model in MODELS:
                values = [max(row["models"][model][name], FLOOR) for row in case["rows"]]
                axis.plot(places, values, dash, marker=MARKERS[model], mfc=_fill(model), color=COLOURS[model],
                          label=f"{what}, {LABELS[model]}")  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(places, [*(f"$10^{{{math.log10(r):.3g}}}$" for r in finite), "∞"][: len(places)], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("R = n_A / n_B")
    axes[0].set_ylabel(f"minority norm / majority norm\n({FLOOR:g}: 0, to the accuracy of the solves)")
    axes[-1].legend(fontsize="small")
    figure.suptitle("Rising imbalance: largest minority classifier (w) and class mean (h)")
    return figure
