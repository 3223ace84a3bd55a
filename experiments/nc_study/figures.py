"""Figures of finished runs: the course of training, the solver, and how a network sees each class."""

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

from .record import Curves, NetworkResult
from .rundir import RunDirectory, write_atomically

matplotlib.use("Agg")  # no window, whatever the machine has

LABELS = {"explicit": "explicit", "deq": "DEQ"}
COLOURS = {"explicit": "#0072B2", "deq": "#D55E00"}
MARKERS = {"explicit": "o", "deq": "s"}
DASHES = {"overall": "-", "majority": "--", "minority": ":"}
GROUP_COLOURS = {"overall": "#000000", "majority": "#332288", "minority": "#CC6677"}
GROUP_MARKERS = {"overall": "o", "majority": "^", "minority": "v"}
# Paul Tol's "muted" scheme and grey: ten colours that people who see few colours tell apart.
CLASS_COLOURS = [f"#{one}" for one in ("332288", "88CCEE", "44AA99", "117733", "999933")]
CLASS_COLOURS += [f"#{one}" for one in ("DDCC77", "CC6677", "882255", "AA4499", "777777")]
PERPLEXITY = 30
DPI = 96
plt.rcParams.update({"figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.08})

Column = tuple[Sequence[Any], Sequence[float | None]]
"""Epochs, and a value for each."""


def draw(run: RunDirectory) -> None:
    """Write figure.png from the run's result."""
    result = run.result
    curves = {model: [network.curves] for model, network in result.networks.items()}
    heading = f"{result.setting}, width {result.settings.width}, seed {result.settings.seed}"
    write_atomically(run.figure, png(study_figure({heading: curves})))


def png(figure: Figure) -> bytes:
    """Make a PNG of at most 128 colours, a third of the bytes and no difference that one sees: the same bytes for the
    same figure. It is closed afterwards."""
    content, small = io.BytesIO(), io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    picture = Image.open(content).convert("RGB")
    picture.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def study_figure(rows: Mapping[str, Mapping[str, Sequence[Curves]]]) -> Figure:
    """Draw a row of four panels for each heading: test accuracy, NC1 (log scale), NC2, NC3 against epoch, from the
    curves of each seed of each network. With more than one seed a line is their mean, and the band their range."""
    figure, parts = _rows_of_panels(list(rows))
    for part, curves in zip(parts, rows.values(), strict=True):
        axes = part.subplots(1, 4)
        _accuracy(axes[0], curves)
        for axis, name in zip(axes[1:], ("nc1", "nc2", "nc3"), strict=True):
            for model, seeds in curves.items():
                style = {"color": COLOURS[model], "marker": MARKERS[model], "label": LABELS[model]}
                _plot_seeds(axis, [(curve["epoch"], curve[name]) for curve in seeds], **style)
            _finish_epochs(axis, name.upper())
        _set_log_scale(axes[1])
        axes[1].legend(fontsize="small")
    return figure


def _rows_of_panels(headings: Sequence[str]) -> tuple[Figure, list[SubFigure]]:
    figure = plt.figure(figsize=(12.5, 3.2 * len(headings)), layout="constrained")
    parts = list(figure.subfigures(len(headings), 1, hspace=0.04, squeeze=False)[:, 0])
    for part, heading in zip(parts, headings, strict=True):
        part.suptitle(heading)
    return figure, parts


def _finish_epochs(axis: Axes, label: str) -> None:
    axis.set(xlabel="epoch", ylabel=label)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def _accuracy(axis: Axes, curves: Mapping[str, Sequence[Curves]]) -> None:
    for model, seeds in curves.items():
        for group, dash in DASHES.items():
            columns = [(curve["epoch"], curve[group]) for curve in seeds]
            style = {"linestyle": dash, "color": COLOURS[model], "label": f"{LABELS[model]}, {group}"}
            _plot_seeds(axis, columns, marker=MARKERS[model] if group == "overall" else None, **style)
    top = max(axis.get_ylim()[1], 1)
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= min(top, 100)])
    # Room for the legend above the lines, and for a line at 0.
    axis.set_ylim(-0.03 * top, 1.4 * top)
    axis.legend(fontsize="x-small", ncols=len(curves), loc="upper left")
    _finish_epochs(axis, "test accuracy (%)")


def _set_log_scale(axis: Axes) -> None:
    """Make the y-axis logarithmic, with ticks that stay labelled where it spans less than two decades."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 100 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(NullFormatter())


def _plot_seeds(axis: Axes, columns: Sequence[Column], **style: Any) -> None:
    """Draw the mean over the seeds against the epochs at which all have a value, and the band of their range."""
    known = [
        {epoch: value for epoch, value in zip(epochs, values, strict=True) if value is not None}
        for epochs, values in columns
    ]
    shared = sorted(set.intersection(*map(set, known)))
    if not shared:
        return
    values = np.array([[seed[epoch] for seed in known] for epoch in shared])
    axis.plot(shared, values.mean(1), ms=4, markevery=max(1, len(shared) // 12), **style)
    if len(known) > 1:
        axis.fill_between(shared, values.min(1), values.max(1), color=style["color"], alpha=0.15, lw=0)


def solver_figure(rows: Mapping[str, tuple[Sequence[NetworkResult], int]]) -> Figure:
    """Draw a row of four panels for each heading, from the DEQ of each seed and the number of majority classes:
    evaluations, residual and converged share against epoch for all, majority and minority classes, and the spectral
    radius of the Jacobian at the fixed points of single images, by class."""
    figure, parts = _rows_of_panels(list(rows))
    for part, (networks, majority) in zip(parts, rows.values(), strict=True):
        axes = part.subplots(1, 4)
        panels = {"iterations": "evaluations a sample", "residual": "relative residual", "converged": "converged"}
        for axis, (name, label) in zip(axes, panels.items(), strict=False):
            for group, dash in DASHES.items():
                key = name if group == "overall" else f"{name}_{group}"
                columns = [(network.curves["epoch"], network.curves[key]) for network in networks]
                style = {"color": GROUP_COLOURS[group], "marker": GROUP_MARKERS[group], "label": group}
                _plot_seeds(axis, columns, linestyle=dash, **style)
            _finish_epochs(axis, label)
        axes[0].legend(fontsize="small")
        axes[1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes[2].set_ylim(top=1.003)
        axes[2].yaxis.set_major_formatter("{x:.1%}")
        _radius(axes[3], networks, majority)
    return figure


def _radius(axis: Axes, networks: Sequence[NetworkResult], majority: int) -> None:
    found = [network.spectral_radius for network in networks if network.spectral_radius]
    classes = len(networks[0].confusion)
    for group, members in _groups(classes, majority).items():
        pairs = [pair for one in found for pair in zip(one.labels, one.values, strict=True) if pair[0] in members]
        x, y = np.array(pairs).reshape(-1, 2).T
        axis.scatter(x, y, s=12, color=GROUP_COLOURS[group], marker=GROUP_MARKERS[group], alpha=0.5, lw=0)
    axis.axhline(1, color="black", lw=1, ls="--")  # above it z <- f(z) diverges
    axis.set(xlabel="class", ylabel="spectral radius of ∂f/∂z at z*", xticks=_ticks(classes))
    axis.grid(alpha=0.3, axis="y")


def _groups(classes: int, majority: int) -> dict[str, range]:
    """Return the classes of the majority and the minority; "overall" alone where they are balanced."""
    if majority == classes:
        return {"overall": range(classes)}
    return {"majority": range(majority), "minority": range(majority, classes)}


def _ticks(classes: int) -> np.ndarray:
    return np.arange(0, classes, classes // 10)


def features_figure(
    features: Mapping[str, tuple[np.ndarray, np.ndarray]], classes: int, majority: int, heading: str
) -> Figure:
    """Draw a column for each network's features (N, D) and their labels (N,), sorted by class: a t-SNE, and the Gram
    matrix of the features at unit length."""
    count = len(features)
    figure, axes = plt.subplots(2, count, figsize=(4.6 * count, 8.2), layout="constrained", squeeze=False)
    figure.suptitle(heading)
    for (above, below), (model, (points, labels)) in zip(axes.T, features.items(), strict=True):
        for axis in (above, below):
            axis.set_title(LABELS[model], color=COLOURS[model])
        _embedding(above, points, labels, _groups(classes, majority))
        length = np.linalg.norm(points, axis=1, keepdims=True)
        unit = points / np.where(length > 0, length, 1)
        # Few colours, so that the picture's file stays small.
        picture = below.imshow(unit @ unit.T, vmin=-1, vmax=1, cmap=plt.get_cmap("RdBu_r", 33), interpolation="none")
        starts = np.searchsorted(labels, np.arange(classes + 1)) - 0.5
        _part_classes(below, starts[majority])
        centres = (starts[_ticks(classes)] + starts[_ticks(classes) + 1]) / 2
        below.set_xticks(centres, _ticks(classes))
        below.set_yticks(centres, _ticks(classes))
        below.set(xlabel="image, by class", ylabel="image, by class")
    figure.colorbar(picture, ax=axes[1], label="cosine of two features", shrink=0.8)
    return figure


def _embedding(axis: Axes, features: np.ndarray, labels: np.ndarray, groups: Mapping[str, Sequence[int]]) -> None:
    """Draw the same t-SNE every time; ten classes in a colour each, of a hundred only the group is told."""
    from sklearn.manifold import TSNE  # late: it takes seconds, and a figure of a run's course does without

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    for group, members in groups.items():
        shown: dict[Any, tuple[Sequence[int], str]] = {group: (members, GROUP_COLOURS[group])}
        if sum(map(len, groups.values())) == 10:
            shown = {label: ([label], CLASS_COLOURS[label]) for label in members}
        for name, (chosen, colour) in shown.items():
            x, y = points[np.isin(labels, list(chosen))].T
            axis.scatter(x, y, s=22, color=colour, marker=GROUP_MARKERS[group], alpha=0.7, lw=0, label=name)
    axis.legend(fontsize="x-small", ncols=5, title="class", loc="upper center", bbox_to_anchor=(0.5, -0.07))
    axis.set(xlabel="t-SNE, first coordinate", ylabel="t-SNE, second coordinate", xticks=[], yticks=[])


def _part_classes(axis: Axes, place: float, colour: str = "black") -> None:
    """Draw the border between majority and minority in a matrix; at its edge where classes are balanced."""
    axis.axhline(place, color=colour, lw=1.6)
    axis.axvline(place, color=colour, lw=1.6)


def confusion_figure(panels: Mapping[str, Sequence[Sequence[Sequence[int]]]], majority: Sequence[int]) -> Figure:
    """Draw for each title how many percent of a class's test images were taken for each class, from the counts
    (classes, classes) of each seed; `majority`: the number of majority classes of each panel."""
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    size = (3.1 * columns + 0.8, 3.2 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (name, counts), border in zip(axes.flat, panels.items(), majority, strict=False):
        total = np.sum(counts, 0)
        shares = 100 * total / np.maximum(total.sum(1, keepdims=True), 1)
        picture = axis.imshow(shares, vmin=0, vmax=100, cmap=plt.get_cmap("cividis", 33), interpolation="none")
        _part_classes(axis, border - 0.5, "white")
        ticks = _ticks(len(shares))
        axis.set(xlabel="class taken for", ylabel="true class", xticks=ticks, yticks=ticks)
        axis.set_title(name, size=10)
    figure.colorbar(picture, ax=axes, label="share of the true class (%)", shrink=0.6)
    return figure
