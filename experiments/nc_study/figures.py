"""Figures of finished runs: the course of training, and the features of single images."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from .record import CENTRED, Curves, RunResult

matplotlib.use("Agg")  # no window, on any machine

# Each arm's name in text, colour and marker.
ARMS = {
    "explicit": ("explicit", "#0072B2", "o"),
    "explicit-norm": ("explicit, normalised", "#56B4E9", "v"),
    "once": ("cell once", "#009E73", "^"),
    "deq-jfb": ("DEQ, JFB", "#D55E00", "s"),
    "deq-implicit": ("DEQ, implicit", "#CC79A7", "D"),
    "deq-phantom": ("DEQ, phantom", "#E69F00", "P"),
    "deq-unrolled": ("DEQ, unrolled", "#555555", "X"),
}
DASHES = {"overall": "-", "majority": "--", "minority": ":"}
PERPLEXITY = 30
DPI = 96
plt.rcParams.update({"figure.constrained_layout.w_pad": 0.1, "figure.constrained_layout.h_pad": 0.08})


def course(results: Sequence[RunResult]) -> bytes:
    """PNG of the training course of one setting's arms."""
    one = results[0]
    heading = f"{one.setting}, width {one.settings.width}, seed {one.settings.seed}"
    return png(study_figure({heading: {result.arm: [result.network.curves] for result in results}}))


def png(figure: Figure) -> bytes:
    """Make a PNG of at most 256 colours, with a third of the bytes and no visible difference. The same figure gives the
    same bytes. It is closed afterwards."""
    content, small = io.BytesIO(), io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    picture = Image.open(content).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def study_figure(rows: Mapping[str, Mapping[str, Sequence[Curves]]]) -> Figure:
    """Draw a row of four panels for each heading: test accuracy, NC1 (log scale), centred NC2 and NC3 against epoch,
    from the curves of each seed of each arm. With several seeds, a line is their mean and the band their range."""
    labels = ("NC1", "NC2 centred", "NC3 centred")
    size = (12.5, 2.9 * len(rows) + 0.4)
    figure, axes = plt.subplots(len(rows), 4, figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Line2D] = {}
    for (accuracy, *others), (text, curves) in zip(axes, rows.items(), strict=True):
        accuracy.set_title(" ")  # room for the heading, which is wider than the panel
        heading = accuracy.text(0, 1.05, text, transform=accuracy.transAxes, fontweight="bold")
        heading.set_in_layout(False)
        for number, (arm, seeds) in enumerate(curves.items()):
            for group, dash in DASHES.items():
                # Each arm marks other epochs, so that markers of like accuracies do not cover one another.
                line = _plot_seeds(accuracy, arm, seeds, group, linestyle=dash, markevery=(number, len(curves)))
                handles.setdefault(ARMS[arm][0], line)
            for axis, name, label in zip(others, ("nc1", *CENTRED), labels, strict=True):
                _plot_seeds(axis, arm, seeds, name)
                axis.set_ylabel(label)
        accuracy.set_ylabel("test accuracy (%)")
        others[0].set_yscale("log")
    for axis in axes.flat:
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    return figure


def _plot_seeds(axis: Axes, arm: str, seeds: Sequence[Curves], name: str, **style: Any) -> Line2D:
    """Draw the mean over the seeds against the epochs at which all have a value, and the band of their range."""
    values = np.array([curves[name] for curves in seeds], dtype=float)  # None becomes NaN
    shared = np.isfinite(values).all(0)
    epochs, values = np.array(seeds[0]["epoch"])[shared], values[:, shared]
    _, colour, marker = ARMS[arm]
    (line,) = axis.plot(epochs, values.mean(0), ms=4, color=colour, marker=marker, **style)
    axis.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.12, lw=0)
    return line


PAIRED = {
    "overall": "overall accuracy,\npoints",
    "minority": "minority accuracy,\npoints",
    "nc2_centered": "NC2 centred",
}
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


def paired_figure(rows: Mapping[str, Sequence[Panel]]) -> Figure:
    """Draw a row of panels for each label, which share an axis: a dot for each seed, the mean and its interval."""
    rows = {label: panels for label, panels in rows.items() if panels}
    columns = max(map(len, rows.values()))
    size = (3.6 * columns + 1, 2.7 * len(rows) + 0.4)
    figure, axes = plt.subplots(
        len(rows), columns, figsize=size, layout="constrained", squeeze=False, sharey="row", sharex="col"
    )
    for line, (label, panels) in zip(axes, rows.items(), strict=True):
        line[0].set_ylabel(label)
        for axis, panel in zip(line, panels, strict=False):
            _pairs(axis, panel)
        for axis in line[len(panels) :]:
            axis.set_visible(False)
    for axis, panel in zip(axes[0], next(iter(rows.values())), strict=False):
        axis.set_title(f"{panel.title}, less explicit")
    return figure


def _pairs(axis: Axes, panel: Panel) -> None:
    arms = list(panel.differences)
    seeds = sorted({seed for found in panel.differences.values() for seed in found})
    place = {seed: 0.07 * (number - len(seeds) / 2) for number, seed in enumerate(seeds)}
    axis.axhline(0, color="black", lw=0.8)
    for seed in seeds:
        joined = [
            (x + place[seed], panel.differences[arm][seed])
            for x, arm in enumerate(arms)
            if seed in panel.differences[arm]
        ]
        axis.plot(*zip(*joined, strict=True), color="#888888", lw=0.6, alpha=0.5, zorder=1)
    for x, arm in enumerate(arms):
        _, colour, marker = ARMS[arm]
        for seed, value in panel.differences[arm].items():
            axis.scatter(x + place[seed], value, s=18, color=colour, marker=marker, zorder=2)
            if (arm, seed) in panel.ringed:
                axis.scatter(x + place[seed], value, s=110, facecolor="none", edgecolor="black", zorder=3)
        (low, high), mean = panel.intervals[arm], np.mean(list(panel.differences[arm].values()))
        axis.errorbar(x + 0.3, mean, [[mean - low], [high - mean]], color=colour, marker="_", ms=10, capsize=3, lw=2)
        if arm == "deq-implicit" and panel.printed is not None:
            axis.scatter(x - 0.38, panel.printed, s=40, color="black", marker="x", zorder=3)
    axis.set(xlim=(-0.5, len(arms) - 0.45))
    axis.set_xticks(range(len(arms)), [ARMS[arm][0].replace(", ", "\n") for arm in arms], fontsize="small")
    axis.grid(axis="y", alpha=0.3)


def features_figure(
    features: Mapping[str, tuple[np.ndarray, np.ndarray]], classes: int, majority: int, heading: str
) -> Figure:
    """Draw a column for each network's features (N, D) and their labels (N,), sorted by class: a t-SNE, and the Gram
    matrix of the features at unit length. `majority`: how many of the first classes are the majority."""
    size = (4.6 * len(features), 8.2)
    figure, axes = plt.subplots(2, len(features), figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(heading)
    for (above, below), (arm, (points, labels)) in zip(axes.T, features.items(), strict=True):
        for axis in (above, below):
            axis.set_title(ARMS[arm][0], color=ARMS[arm][1])
        _embedding(above, points, labels * 10 // classes, majority * 10 // classes)
        length = np.linalg.norm(points, axis=1, keepdims=True)
        unit = points / np.where(length > 0, length, 1)
        # Few colours, so that the file stays small.
        picture = below.imshow(unit @ unit.T, vmin=-1, vmax=1, cmap=plt.get_cmap("RdBu_r", 33), interpolation="none")
        border = np.searchsorted(labels, majority) - 0.5
        below.axhline(border, color="black", lw=1.6)
        below.axvline(border, color="black", lw=1.6)
        below.set(xlabel="image, by class", ylabel="image, by class")
    figure.colorbar(picture, ax=axes[1], label="cosine of two features", shrink=0.8)
    return figure


def _embedding(axis: Axes, features: np.ndarray, tenths: np.ndarray, majority: int) -> None:
    """Draw a reproducible t-SNE, with a colour for each tenth of the classes."""
    from sklearn.manifold import TSNE  # late: it takes seconds, and figures of a run's course do not need it

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    points = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    for tenth in range(10):
        x, y = points[tenths == tenth].T
        marker = "^" if tenth < majority else "v"
        axis.scatter(x, y, s=22, color=f"C{tenth}", marker=marker, alpha=0.7, lw=0, label=tenth)
    axis.legend(fontsize="x-small", ncols=5, title="tenth of the classes", loc="upper center", bbox_to_anchor=(0.5, 0))
    axis.set(xticks=[], yticks=[])
