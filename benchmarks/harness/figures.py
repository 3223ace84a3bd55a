"""Figures of the measured numbers. Each takes rows that benchmarks/report.py has chosen, and makes a PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from runs import style

from .record import Row

METHODS = {"picard": "Picard", "fixed_point_iter": "Picard", "anderson": "Anderson", "broyden": "Broyden"}  # as shown
VARIANTS = ("gmres", "checkpoint")  # drawn hollow, in the colour of the adjoint that they vary
LOOKS = ((style.VERMILLION, "o"), (style.BLUE, "D"), (style.GREEN, "s"), (style.PURPLE, "^"))  # of machines
CURVES = {  # of ``state_sizes``
    "deqfast": {"color": style.VERMILLION, "marker": "o", "label": "deqfast"},
    "torchdeq": {"color": style.BLUE, "marker": "o", "label": "torchdeq"},
    "floor": {"color": style.BLACK, "ls": "--", "label": "bytes / copy rate; below it: data in a cache"},
}


def gradient_errors(rows: Sequence[Row], origin: str, names: Mapping[str, Mapping[str, str]], **entry: str) -> bytes:
    """Error of each adjoint's gradient against the time of a training step, a panel for each cell.

    names: titles of the cells' cases ("gradients"), and names of the adjoints ("adjoints").
    """
    figure = style.page(2.8 + 2.0 * len(names["gradients"]), style.NARROW)
    (axes,) = figure.subplots(len(names["gradients"]), 1, squeeze=False).T
    for axis, (case, title) in zip(axes, names["gradients"].items(), strict=True):
        axis.set_title(title)
        axis.set(xlabel="training step (ms)", ylabel="gradient's relative error", yscale="log", ylim=(1e-7, 3))
        by_name = {row["provider"]: row for row in rows if row["case"] == case}
        for adjoint, shown in names["adjoints"].items():
            row, name = by_name[adjoint], shown.strip("`")
            size = {"mfc": "none", "ms": 11} if adjoint in VARIANTS else {"ms": 7}  # around the adjoint that they vary
            axis.plot(row["ms_min"], row["error"], ls="", label=name, **style.look(name), **size)
        axis.set_xlim(0)
    style.legend(figure, 1, title=textwrap.fill(origin, 80), title_fontsize=7)
    return style.png(figure, **entry)


def ratios(lines: Sequence[Row], title: str, **entry: str) -> bytes:
    """A line for each case: the medians of its "values" by machine, how many times as fast as torchdeq, with whiskers
    over the runs."""
    figure = style.page(1.4 + 0.21 * len(lines), style.NARROW)
    figure.suptitle(title)
    axis = figure.subplots()
    colours = dict(zip(dict.fromkeys(name for line in lines for name in line["values"]), LOOKS, strict=False))
    for height, line in enumerate(lines):
        for name, (least, middle, largest) in line["values"].items():
            whisker = [[middle - least], [largest - middle]]
            colour, marker = colours[name]
            axis.errorbar(middle, height, xerr=whisker, color=colour, fmt=marker, ms=6, capsize=3, label=name)
    axis.axvline(1, color=style.BLACK, lw=1)
    axis.set_yticks(range(len(lines)), [line["name"] for line in lines])
    axis.set(ylim=(len(lines) - 0.4, -0.6), xscale="log")
    axis.set_xlabel("times as fast as torchdeq: right is better", loc="right")
    style.decimal(axis.xaxis, (1, 1.2, 1.5, 2, 3, 4, 5, 7, 9))
    axis.grid(axis="y", visible=False)
    if len(colours) > 1:
        handles, labels = axis.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend([*unique.values()], [*unique], loc="outside lower center")
    return style.png(figure, **entry)


def state_sizes(points: Sequence[Row], **entry: str) -> bytes:
    """Time per iteration without f against the elements of the state, a panel for each solver, with the byte floor."""
    titles = list(dict.fromkeys(point["solver"] for point in points))
    figure = style.page(3.2, style.NARROW)
    (axes,) = figure.subplots(1, len(titles), squeeze=False, sharey=True)
    for axis, title in zip(axes, titles, strict=True):
        own = sorted((point for point in points if point["solver"] == title), key=lambda point: point["elements"])
        sizes = [point["elements"] for point in own]
        for name, look in CURVES.items():
            axis.plot(sizes, [point[name] for point in own], **look)
        axis.set(title=title, xscale="log", yscale="log", xlabel="elements of the state")
    axes[0].set_ylabel("ms per iteration, without f")
    style.legend(figure, 2)
    return style.png(figure, **entry)


def problems_solved(rows: Sequence[Row], total: int, **entry: str) -> bytes:
    """Share of the problems that a solver has solved, against the evaluations that it was allowed."""
    figure = style.page(4.2, style.NARROW)
    axis = figure.subplots()
    most = max(row["most_evaluations"] for row in rows)
    for provider in dict.fromkeys(row["provider"] for row in rows):
        library, method, *options = provider.split()
        counts = sorted(row["evaluations"] for row in rows if row["provider"] == provider and row["reached"])
        steps = [100 * count / total for count in [*range(len(counts) + 1), len(counts)]]
        shown = " ".join([METHODS[method], *options])
        look = {"color": style.look(METHODS[method])["color"], "ls": "-" if library == "deqfast" else "--"}
        axis.step([0, *counts, most], steps, where="post", label=f"{shown}, {library}", **look)
    solved = f"% of {total} problems solved to {rows[0]['tol']:g}"
    axis.set(xlabel="evaluations allowed", ylabel=solved, xlim=(0, most), ylim=(0, 102))
    style.legend(figure, 1, handlelength=3)
    return style.png(figure, **entry)
