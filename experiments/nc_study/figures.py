"""Figures of the course of training: accuracy, neural collapse and the solver against epoch, over one or more seeds."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from .record import Curves, NetworkResult, SolverSummary
from .results import title
from .rundir import RunDirectory, write_atomically

matplotlib.use("Agg")  # no window, whatever the machine has

LABELS = {"explicit": "explicit", "deq": "DEQ"}
COLOURS = {"explicit": "#0072B2", "deq": "#D55E00"}
MARKERS = {"explicit": "o", "deq": "s"}
DASHES = {"overall": "-", "majority": "--", "minority": ":"}
GROUP_COLOURS = {"overall": "#000000", "majority": "#332288", "minority": "#CC6677"}
GROUP_MARKERS = {"overall": "o", "majority": "^", "minority": "v"}
DPI = 96
plt.rcParams.update({"figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.08})

Column = tuple[Sequence[Any], Sequence[float | None]]
"""Epochs, and a value for each."""

NetworkCurves = Mapping[str, Sequence[Curves]]
"""The curves of each seed, by network."""


def draw(run: RunDirectory) -> None:
    """Write figure.png from the run's result."""
    result = run.result
    curves = {model: [network.curves] for model, network in result.networks.items()}
    heading = f"{title(result)}, width {result.settings.width}, seed {result.settings.seed}"
    write_atomically(run.figure, png(study_figure({heading: curves})))


def png(figure: Figure) -> bytes:
    """A figure as a PNG of at most 128 colours, a third of the bytes and no difference that one sees: the same bytes
    for the same figure. It is closed afterwards."""
    content, small = io.BytesIO(), io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    picture = Image.open(content).convert("RGB")
    picture.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def study_figure(rows: Mapping[str, NetworkCurves]) -> Figure:
    """A row by its heading, of four panels each: test accuracy, NC1 (log scale), NC2, NC3; a colour for each network.

    With more than one seed a line is the mean of the seeds, and the band reaches from the least to the most."""
    figure, parts = _rows_of_panels(list(rows))
    for part, curves in zip(parts, rows.values(), strict=True):
        axes = part.subplots(1, 4)
        _accuracy(axes[0], curves)
        for axis, name in zip(axes[1:], ("nc1", "nc2", "nc3"), strict=True):
            for model, seeds in curves.items():
                style = {"color": COLOURS[model], "marker": MARKERS[model], "label": LABELS[model]}
                plot_seeds(axis, [(curve["epoch"], curve[name]) for curve in seeds], **style)
            axis.set_ylabel(name.upper())
        set_log_scale(axes[1])
        axes[1].legend(fontsize="small")
        for axis in axes:
            _finish_epochs(axis)
    return figure


def _rows_of_panels(headings: Sequence[str]) -> tuple[Figure, list[SubFigure]]:
    figure = plt.figure(figsize=(12.5, 3.2 * len(headings)), layout="constrained")
    parts = list(figure.subfigures(len(headings), 1, hspace=0.04, squeeze=False)[:, 0])
    for part, heading in zip(parts, headings, strict=True):
        part.suptitle(heading)
    return figure, parts


def _finish_epochs(axis: Axes) -> None:
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def _accuracy(axis: Axes, curves: NetworkCurves) -> None:
    for model, seeds in curves.items():
        for group, dash in DASHES.items():
            columns = [(curve["epoch"], curve[group]) for curve in seeds]
            style = {"linestyle": dash, "color": COLOURS[model], "label": f"{LABELS[model]}, {group}"}
            plot_seeds(axis, columns, marker=MARKERS[model] if group == "overall" else None, **style)
    axis.set_ylabel("test accuracy (%)")
    top = max(axis.get_ylim()[1], 1)
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= min(top, 100)])
    # Room for the legend above the lines, and for a line at 0.
    axis.set_ylim(-0.03 * top, 1.4 * top)
    axis.legend(fontsize="x-small", ncols=len(curves), loc="upper left")


def set_log_scale(axis: Axes) -> None:
    """A logarithmic y-axis whose ticks stay labelled where it spans less than two decades."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(NullFormatter())


def plot_seeds(axis: Axes, columns: Sequence[Column], **style: Any) -> None:
    """Mean over the seeds against epoch, and the band of their range; nothing where no epoch has a value of each."""
    epochs, values = over_seeds(columns)
    if not epochs:
        return
    every = max(1, len(epochs) // 12)
    axis.plot(epochs, values.mean(1), ms=4, markevery=every, **style)
    if values.shape[1] > 1:
        axis.fill_between(epochs, values.min(1), values.max(1), color=style["color"], alpha=0.15, lw=0)


def over_seeds(columns: Sequence[Column]) -> tuple[list[int], np.ndarray]:
    """The epochs at which every seed has a value, and the values (epochs, seeds)."""
    known = [
        {epoch: value for epoch, value in zip(epochs, values, strict=True) if value is not None}
        for epochs, values in columns
    ]
    shared = sorted(set.intersection(*map(set, known))) if known else []
    return shared, np.array([[seed[epoch] for seed in known] for epoch in shared])


def solver_figure(rows: Mapping[str, tuple[Sequence[NetworkResult], int]]) -> Figure:
    """A row by its heading, of the DEQ's results of each seed and the number of majority classes: evaluations, residual
    and converged share against epoch for all, majority and minority classes, and each class's last evaluations."""
    figure, parts = _rows_of_panels(list(rows))
    for part, (networks, majority) in zip(parts, rows.values(), strict=True):
        _solver_panels(part.subplots(1, 4), networks, majority)
    return figure


def _solver_panels(axes: Sequence[Axes], networks: Sequence[NetworkResult], majority: int) -> None:
    panels = {"iterations": "evaluations a sample", "residual": "relative residual", "converged": "converged (%)"}
    for axis, (name, label) in zip(axes, panels.items(), strict=False):
        for group, dash in DASHES.items():
            columns = [_solver_course(network.curves, name, group) for network in networks]
            shown = "all samples" if group == "overall" else f"{group} classes"
            style = {"color": GROUP_COLOURS[group], "marker": GROUP_MARKERS[group], "label": shown}
            plot_seeds(axis, columns, linestyle=dash, **style)
        axis.set_ylabel(label)
        _finish_epochs(axis)
    low, high = axes[1].get_ylim()
    if low > 0 and high > 3 * low:
        set_log_scale(axes[1])
    else:
        axes[1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    low = min(99, axes[2].get_ylim()[0])
    axes[2].set_ylim(low, 100 + 0.05 * (100 - low))
    axes[0].legend(fontsize="small")
    _evaluations_per_class(axes[3], [network.solver for network in networks if network.solver], majority)


def _solver_course(curves: Curves, name: str, group: str) -> Column:
    values = curves[name if group == "overall" else f"{name}_{group}"]
    scale = 100 if name == "converged" else 1
    return curves["epoch"], [None if value is None else scale * value for value in values]


def _evaluations_per_class(axis: Axes, final: Sequence[SolverSummary], majority: int) -> None:
    known = [[np.nan if value is None else value for value in one.per_class.iterations] for one in final]
    values = np.array(known, dtype=float)
    classes = values.shape[1]
    for group, part in class_groups(classes, majority).items():
        mean = values[:, part].mean(0)
        reach = np.abs(np.stack([values[:, part].min(0), values[:, part].max(0)]) - mean) if len(values) > 1 else None
        style: dict[str, Any] = {"color": GROUP_COLOURS[group], "ms": 4, "capsize": 2 if classes <= 10 else 0}
        label = f"{group} classes"
        axis.errorbar(np.arange(classes)[part], mean, reach, fmt=GROUP_MARKERS[group], label=label, **style)
    axis.set_ylabel("evaluations, last epoch")
    axis.grid(alpha=0.3, axis="y")
    finish_classes(axis, classes)


def class_groups(classes: int, majority: int) -> dict[str, slice]:
    """The classes of the majority and the minority; "overall" alone where they are balanced."""
    if majority >= classes:
        return {"overall": slice(0, classes)}
    return {"majority": slice(0, majority), "minority": slice(majority, classes)}


def finish_classes(axis: Axes, classes: int) -> None:
    """Name the x-axis after the classes; a tick for each of ten, for each tenth of a hundred."""
    axis.set_xlabel("class")
    axis.set_xticks(np.arange(0, classes, max(1, classes // 10)))
    axis.set_xlim(-0.6, classes - 0.4)
