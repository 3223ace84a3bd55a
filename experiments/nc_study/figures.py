"""Figures of finished runs: the course of training, and the features of single images."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FixedLocator, MaxNLocator
from runs import style

from .record import CENTRED, Curves, RunResult

LABELS = {
    "explicit": "explicit",
    "explicit-norm": "explicit, normalised",
    "once": "cell once",
    "tied-1": "cell once from x",
    "tied-2": "cell 2 times",
    "tied-4": "cell 4 times",
    "tied-12": "cell 12 times",
    "untied-2": "2 cells",
    "deq-jfb": "DEQ, JFB",
    "deq-implicit": "DEQ, implicit",
    "deq-phantom": "DEQ, phantom",
    "deq-unrolled": "DEQ, unrolled",
}
DASHES = {"overall": "-", "majority": "--", "minority": ":"}
PERPLEXITY = 30


def course(results: Sequence[RunResult]) -> bytes:
    """PNG of the training course of one setting's arms."""
    first = results[0]
    heading = f"{first.setting}, width {first.settings.width}, seed {first.settings.seed}"
    return style.png(study_figure({heading: {result.arm: [result.network.curves] for result in results}}))


def study_figure(
    rows: Mapping[str, Mapping[str, Sequence[Curves]]],
    printed: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
) -> Figure:
    """Draw a row of five panels for each heading against epoch, from the curves of each seed of each arm.

    The panels are overall accuracy, accuracy of majority and minority, NC1 (log scale), centred NC2 and NC3. With
    several seeds, a line is their mean and the band their range. `printed`: the paper's accuracies by heading, arm and
    group.
    """
    figure, axes = style.panels(len(rows), 5, height=1.9, sharex=True)
    labels = dict(zip(("nc1", *CENTRED), ("NC1", "NC2 centred", "NC3 centred"), strict=True))
    for (overall, groups, *others), (text, curves) in zip(axes, rows.items(), strict=True):
        overall.set_title(" ")  # room for the heading, which is wider than the panel
        heading = overall.text(0, 1.05, text, transform=overall.transAxes, fontweight="bold")
        heading.set_in_layout(False)
        overall.set_ylabel("overall accuracy (%)")
        groups.set_ylabel("by size of class (%)")
        groups.set_visible(any(curve["minority"][-1] is not None for seeds in curves.values() for curve in seeds))
        for group, dash in DASHES.items():
            axis = overall if group == "overall" else groups
            for number, (arm, seeds) in enumerate(curves.items()):
                # Each arm marks other epochs, so that markers of like accuracies do not cover one another.
                label = LABELS[arm] if group == "overall" else None
                _plot_seeds(axis, arm, seeds, group, ls=dash, markevery=(number, len(curves)), label=label)
            for arm, values in (printed or {}).get(text, {}).items():
                if group in values:
                    axis.axhline(values[group], color=style.look(arm)["color"], lw=0.8, dashes=(1, 4))
        for axis, (name, label) in zip(others, labels.items(), strict=True):
            for arm, seeds in curves.items():
                _plot_seeds(axis, arm, seeds, name)
            axis.set_ylabel(label)
        if any((line.get_ydata() > 0).any() for line in others[0].lines):  # a logarithmic axis needs data
            others[0].set_yscale("log")
            style.decimal(others[0].yaxis)
    for axis in axes[-1]:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for group, dash in [*DASHES.items()][1:]:
        axes[-1, -1].plot([], color=style.GREY, ls=dash, label=f"{group} classes")
    if printed:
        axes[-1, -1].plot([], color=style.GREY, lw=0.8, dashes=(1, 4), label="the paper's accuracy")
    style.legend(figure, 3)
    return figure


def _plot_seeds(axis: Axes, arm: str, seeds: Sequence[Curves], name: str, **more: Any) -> None:
    """Draw the mean over the seeds against the epochs at which all have a value, and the band of their range."""
    values = np.array([curves[name] for curves in seeds], dtype=float)  # None becomes NaN
    shared = np.isfinite(values).all(0)
    style.band(axis, np.array(seeds[0]["epoch"])[shared], values[:, shared], **style.look(arm), **more)


ACCURACY = {"overall": "all classes", "minority": "small classes"}
RATIO = "NC1, ratio"  # drawn by its logarithm
COLLAPSE = {"nc1": RATIO, "nc2_centered": "NC2, centred", "nc3_centered": "NC3, centred"}
"""What `paired_figure` is drawn of, and its labels."""


@dataclass(frozen=True)
class Panel:
    """A panel of `paired_figure`: a setting's differences from the explicit network by arm and seed, their intervals by
    arm, the paper's difference, and the runs, by arm and seed, to be ringed."""

    title: str
    differences: Mapping[str, Mapping[int, float]]
    intervals: Mapping[str, tuple[float, float]]
    printed: float | None
    ringed: Collection[tuple[str, int]]


def paired_figure(columns: Mapping[str, Sequence[Panel]], heading: str) -> Figure:
    """Draw a row of panels for each setting, and for each label a column, which shares an axis. A panel has a line for
    each arm: a dot for each seed, the mean and its interval."""
    settings = {panel.title: list(panel.differences) for panels in columns.values() for panel in panels}
    lines = [len(arms) + 1 for arms in settings.values()]
    figure = style.page(0.38 * sum(lines) + 1.6, style.NARROW)
    axes = figure.subplots(len(lines), len(columns), sharex="col", squeeze=False, height_ratios=lines)
    figure.suptitle(heading, fontweight="bold")
    for column, (label, panels) in zip(axes.T, columns.items(), strict=True):
        by_title = {panel.title: panel for panel in panels}
        for axis, title in zip(column, settings, strict=True):
            axis.set_visible(title in by_title)
            if title in by_title:
                _pairs(axis, by_title[title])
        shared = column[-1].xaxis
        shared.set_label_text(label)
        shared.set_major_locator(MaxNLocator(3))
        if label == RATIO:
            wide = np.ptp(shared.get_view_interval()) > np.log(20)
            ratios = (0.01, 0.1, 1, 10, 100) if wide else (0.25, 0.5, 1, 2, 4)
            shared.set_major_locator(FixedLocator(np.log(ratios).tolist()))
            shared.set_major_formatter(lambda value, _: f"×{np.exp(value):g}")
    for (first, *others), (title, arms) in zip(axes, settings.items(), strict=True):
        first.set_title(" ")  # room for the setting, which is wider than the panel
        first.text(0, 1.03, title, transform=first.transAxes).set_in_layout(False)
        first.set_yticks(range(len(arms)), [LABELS[arm].replace(", ", ",\n") for arm in arms])
        for axis in others:
            axis.set_yticks([])
    grey, black = {"color": style.GREY}, {"color": style.BLACK}
    axes[-1, 0].plot([], **grey, marker="o", lw=0.6, label="a seed, joined")
    axes[-1, 0].plot([], **grey, marker="|", ms=8, lw=2, label="mean, 95 % interval")
    axes[-1, 0].plot([], **black, lw=0.8, label="the explicit network")
    if any(panel.printed is not None for panels in columns.values() for panel in panels):
        axes[-1, 0].plot([], **black, marker="x", ms=6, ls="", label="the paper's DEQ")
    style.legend(figure, 2)
    return figure


def _pairs(axis: Axes, panel: Panel) -> None:
    """Draw a panel, the first arm at the top."""
    arms = list(panel.differences)
    seeds = sorted({seed for by_seed in panel.differences.values() for seed in by_seed})
    place = {seed: 0.07 * (number - len(seeds) / 2) for number, seed in enumerate(seeds)}
    axis.axvline(0, color="black", lw=0.8)
    for seed in seeds:
        joined = [
            (panel.differences[arm][seed], y + place[seed])
            for y, arm in enumerate(arms)
            if seed in panel.differences[arm]
        ]
        axis.plot(*zip(*joined, strict=True), color=style.GREY, lw=0.6, alpha=0.5, zorder=1)
    for y, arm in enumerate(arms):
        look = style.look(arm)
        axis.axhline(y + 0.5, color=style.GREY, lw=0.6, alpha=0.3)  # between the arms
        for seed, value in panel.differences[arm].items():
            axis.scatter(value, y + place[seed], s=18, **look, zorder=2)
            if (arm, seed) in panel.ringed:
                axis.scatter(value, y + place[seed], s=110, facecolor="none", edgecolor="black", zorder=3)
        (low, high), mean = panel.intervals[arm], np.mean(list(panel.differences[arm].values()))
        whiskers = [[mean - low], [high - mean]]
        axis.errorbar(mean, y + 0.3, xerr=whiskers, **look | {"marker": "|"}, ms=8, capsize=2, lw=2)
        if arm == "deq-implicit" and panel.printed is not None:
            axis.scatter(panel.printed, y - 0.25, s=40, color="black", marker="x", zorder=3)
    axis.set_ylim(len(arms) - 0.5, -0.5)
    axis.grid(False, axis="y")


def cosines_figure(features: Mapping[str, tuple[np.ndarray, np.ndarray]], majority: int, heading: str) -> Figure:
    """Draw a column for each network's features (N, D) and their labels (N,), sorted by class: cosines of all pairs.

    Above of the features themselves, below of features less the mean of the class means. `majority`: how many of the
    first classes are the majority.
    """
    figure = style.page(3.5, max(style.NARROW, 1.15 * len(features)))
    axes = figure.subplots(2, len(features), squeeze=False)
    figure.suptitle(heading, fontweight="bold")
    for column, (arm, (points, labels)) in zip(axes.T, features.items(), strict=True):
        column[0].set_title(LABELS[arm].replace(", ", ",\n"))
        border = np.searchsorted(labels, majority) - 0.5
        centre = np.mean([points[labels == label].mean(0) for label in np.unique(labels)], axis=0)
        for axis, shifted in zip(column, (points, points - centre), strict=True):
            picture = _gram(axis, shifted, border)
    axes[0, 0].set_ylabel("as the paper\nprints them")
    axes[1, 0].set_ylabel("class means\ncentred")
    figure.colorbar(picture, ax=axes, location="bottom", aspect=40, label="cosine of two images' features")
    return figure


def embeddings_figure(
    features: Mapping[str, tuple[np.ndarray, np.ndarray]], names: Sequence[str], majority: int, heading: str
) -> Figure:
    """Draw a t-SNE of each network's features (N, D) with labels (N,). `names`: of the classes, or of their tenths;
    `majority`: how many of the first classes are the majority."""
    rows = -(-len(features) // 2)
    figure = style.page(2.3 * rows + 1.1, style.NARROW)
    axes = figure.subplots(rows, 2, squeeze=False).flat
    shapes = "▲ large classes, ▼ small classes" if majority < len(set(next(iter(features.values()))[1])) else ""
    figure.suptitle(f"{heading}\n{shapes}".rstrip(), fontweight="bold")
    for (arm, (points, labels)), axis in zip(features.items(), axes, strict=False):
        axis.set_title(LABELS[arm])
        classes = int(labels.max()) + 1
        _embedding(axis, points, labels * 10 // classes, majority * 10 // classes, names)
    for axis in axes:  # the last one of an odd number
        axis.set_axis_off()
    style.legend(figure, 4, handletextpad=0, markerscale=1.6)
    return figure


def _gram(axis: Axes, points: np.ndarray, border: float) -> AxesImage:
    """Draw the cosines of all pairs of features, with lines between majority and minority."""
    length = np.linalg.norm(points, axis=1, keepdims=True)
    unit = points / np.where(length > 0, length, 1)
    # Few colours, so that the file stays small.
    picture = axis.imshow(unit @ unit.T, vmin=-1, vmax=1, cmap=plt.get_cmap("RdBu_r", 33), interpolation="none")
    axis.axhline(border, color="black", lw=1)
    axis.axvline(border, color="black", lw=1)
    style.bare(axis)
    axis.set(xticks=[], yticks=[])
    return picture


def _embedding(axis: Axes, features: np.ndarray, tenths: np.ndarray, majority: int, names: Sequence[str]) -> None:
    """Draw a reproducible t-SNE, with a colour for each tenth of the classes."""
    from sklearn.manifold import TSNE  # late: it takes seconds, and figures of a run's course do not need it

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    for tenth, colour in enumerate(style.CLASSES):
        x, y = points[tenths == tenth].T
        marker = "^" if tenth < majority else "v"
        axis.scatter(x, y, s=10, color=colour, marker=marker, alpha=0.7, lw=0, label=names[tenth])
    axis.set(xticks=[], yticks=[])
    style.bare(axis)
