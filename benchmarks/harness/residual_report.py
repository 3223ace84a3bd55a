"""What the rows of time_to_residual.py say: per solver over many problems, per problem, and as a figure."""

from __future__ import annotations

import io
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .drawn import stamp
from .files import write_bytes
from .tables import aligned

if TYPE_CHECKING:  # not otherwise: a report works where torch does not
    from .record import Row

# Okabe and Ito's palette; who solved is told by the line, too.
COLOURS = {"picard": "#009E73", "fixed_point_iter": "#009E73", "anderson": "#0072B2", "broyden": "#D55E00"}
LINES = {"deqfast": "-", "torchdeq": "--"}
LEVELS = "#777777"
# deqfast's solvers with the settings that they have by default, of all that time_to_residual.py compares.
DEFAULTS = ("deqfast picard", "deqfast anderson m=6", "deqfast broyden n=20")
DEFAULT = "deqfast broyden n=20"  # what deqfast.solve and DEQBlock take unless they are told
ON_TORCH = {name: name.replace("deqfast", "torch") for name in DEFAULTS}  # the same with kernel="torch"
SMALL_RIDGE = "torchdeq anderson m=6 lam=1e-8"  # torchdeq's own is 1e-4, absolute
RANGE = (3e-8, 3.0)  # of the residuals shown


def solves(rows: list[Row]) -> list[Row]:
    """The rows of solves to a tolerance."""
    return [row for row in rows if row["section"] == "residual"]


def summary(rows: list[Row], tol: float) -> list[Row]:
    """A row per provider over the problems of `rows` at a tolerance.

    evaluations: median, where the tolerance was missed the most there may be; failures: problems in which it was;
    ms, shared: total time over the problems that all providers solved, and how many these are; f_share: of f in that;
    gain, gains: geometric mean of the time of torchdeq's same method over this one's, and over how many problems, those
    that both solved.
    """
    chosen = [row for row in solves(rows) if row["tol"] == tol]
    failed = {row["case"] for row in chosen if not row["reached"]}
    lines = []
    for name in dict.fromkeys(row["provider"] for row in chosen):
        own = [row for row in chosen if row["provider"] == name]
        solved = [row for row in own if row["reached"]]
        shared = [row for row in solved if row["case"] not in failed]
        gains = [row["gain"] for row in solved if "gain" in row]
        evaluations = (row["evaluations" if row["reached"] else "most_evaluations"] for row in own)
        lines.append({
            "provider": name, "tol": tol, "problems": len(own), "failures": len(own) - len(solved),
            "evaluations": statistics.median(evaluations),
            "ms": sum(row["ms"] for row in shared) if shared else None, "shared": len(shared),
            "f_share": sum(row["f_ms"] for row in shared) / sum(row["ms_min"] for row in shared) if shared else None,
            "gain": statistics.geometric_mean(gains) if gains else None, "gains": len(gains),
        })  # fmt: skip
    return lines


def summary_table(rows: list[Row]) -> str:
    """What `summary` says at every tolerance, for people."""
    blocks = []
    for tol in dict.fromkeys(row["tol"] for row in solves(rows)):
        lines = summary(rows, tol)
        table = [["solver", "median evals", "failed", f"ms of {lines[0]['shared']}", "of it f", "x torchdeq", "of"]]
        table += [
            [line["provider"], f"{line['evaluations']:g}", str(line["failures"]), optional(line["ms"], ".1f"),
             optional(line["f_share"], ".0%"), optional(line["gain"], ".1f"), str(line["gains"] or "-")]
            for line in lines
        ]  # fmt: skip
        blocks.append(f"{lines[0]['problems']} problems to a relative residual of {tol:g}\n{text(table)}")
    blocks.append(
        "ms: total over the problems that all solved; x torchdeq: geometric mean over the problems (of how many) that\n"
        "torchdeq solved too by the same method"
    )
    return "\n\n".join(blocks)


def case_table(rows: list[Row], case: str) -> str:
    """All solves of a problem, for people: what a default solver is chosen by."""
    found = [row for row in solves(rows) if row["case"] == case]
    table = [["solver", "tol", "evals", "a sample", "ms", "of it f", "x torchdeq", "samples missed"]]
    table += [
        [row["provider"], f"{row['tol']:g}", str(row["evaluations"]), optional(row.get("mean_evaluations"), ".1f"),
         optional(row.get("ms"), ".1f"), optional(row["f_ms"] / row["ms_min"] if row["reached"] else None, ".0%"),
         optional(row.get("gain"), ".1f"), str(row["samples_missed"])]
        for row in found
    ]  # fmt: skip
    return f"{case}: B={found[0]['batch']} D={found[0]['dim']}\n{text(table)}"


def text(table: list[list[str]]) -> str:
    """The table with its first column to the left, the others to the right."""
    return "\n".join(aligned([[*line, ""] for line in table], 1))


def optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(rows: list[Row], path: Path) -> None:
    """Residual against time and against evaluations, a column per problem that has courses, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    courses = [row for row in rows if row["section"] == "residual course"]
    tolerances = dict.fromkeys(row["tol"] for row in solves(rows))
    cases = list(dict.fromkeys(row["case"] for row in courses))
    figure, axes = pyplot.subplots(2, len(cases), figsize=(1 + 3.6 * len(cases), 6.6), squeeze=False, sharey=True)
    for column, case in zip(axes.T, cases, strict=True):
        own = [row for row in courses if row["case"] == case]
        column[0].set_title(f"{case}\nB={own[0]['batch']}, D={own[0]['dim']}", fontsize=10)
        for axis, key, label in zip(column, ("ms", "evaluations"), ("time (ms)", "evaluations of f"), strict=True):
            axis.set(xlabel=label, xscale="log" if key == "ms" else "linear", yscale="log", ylim=RANGE)
            axis.grid(alpha=0.25)
            for tol in tolerances:
                axis.axhline(tol, color=LEVELS, lw=0.8, ls=":")
            for row in own:
                axis.plot(row[key], [value or math.nan for value in row["residual"]], **_style(row["provider"]))
    for axis in axes[:, 0]:
        axis.set_ylabel("relative residual of the worst sample")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    columns = len(labels) if len(cases) > 2 else 2
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    figure.set_layout_engine("constrained")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150, metadata=stamp(rows))
    write_bytes(path.with_suffix(".png"), content.getvalue())
    pyplot.close(figure)


def _style(provider: str) -> dict[str, Any]:
    method = next(name for name in COLOURS if name in provider)
    return {"color": COLOURS[method], "ls": LINES[provider.split()[0]], "lw": 1.8, "label": provider}
