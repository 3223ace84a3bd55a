"""Figures of finished runs: the course of training, and the features of single images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
    """Make a PNG of at most 128 colours, with a third of the bytes and no visible difference. The same figure gives the
    same bytes. It is closed afterwards."""
    content, small = io.BytesIO(), io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI, metadata={"Software": None})
    plt.close(figure)
    picture = Image.open(content).convert("RGB")
    picture.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def study_figure(rows: Mapping[str, Mapping[str, Sequence[Curves]]]) -> Figure:
    """Draw a row of four panels for each heading: test accuracy, NC1 (log scale), centred NC2 and NC3 against epoch,
    from the curves of each seed of each arm. With several seeds, a line is their mean and the band their range."""
    labels = ("NC1", "NC2 centred", "NC3 centred")
    figure = plt.figure(figsize=(12.5, 3.4 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, hspace=0.04, squeeze=False)[:, 0]
    for part, (heading, curves) in zip(parts, rows.items(), strict=True):
        part.suptitle(heading)
        accuracy, *others = part.subplots(1, 4)
        for arm, seeds in curves.items():
            for group, dash in DASHES.items():
                label = ARMS[arm][0] if group == "overall" else None
                _plot_seeds(accuracy, arm, seeds, group, linestyle=dash, label=label)
            for axis, name, label in zip(others, ("nc1", *CENTRED), labels, strict=True):
                _plot_seeds(axis, arm, seeds, name)
                axis.set_ylabel(label)
        accuracy.set_ylabel("test accuracy (%)\n- - majority,  ··· minority")
        part.legend(
            *accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=len(curves), fontsize="small"
        )
        others[0].set_yscale("log")
        for axis in part.axes:
            axis.set_xlabel("epoch")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.3)
    return figure


@dataclass(frozen=True)
class Panel:
    """Panel of `comparison`. `series`: values by arm and seed; the first one has filled dots, a second one hollow dots.
    `intervals`: of the first series, by arm. `printed`: the paper's values, by arm. `references`: lines by name."""

    label: str
    series: Sequence[Mapping[str, Mapping[int, float]]]
    intervals: Mapping[str, tuple[float, float]]
    printed: Mapping[str, float]
    references: Mapping[str, float]


def comparison(rows: Mapping[str, Sequence[Panel]]) -> Figure:
    """Draw a row of panels for each heading, with the arms next to each other. A seed is a dot for each arm, joined by
    a line. A dash is the mean, with the interval next to it. The dashed line is the explicit network's mean."""
    figure = plt.figure(figsize=(13.5, 3.4 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, hspace=0.04, squeeze=False)[:, 0]
    for part, (heading, panels) in zip(parts, rows.items(), strict=True):
        part.suptitle(heading)
        for axis, panel in zip(np.atleast_1d(part.subplots(1, len(panels))), panels, strict=True):
            _compare(axis, panel)
    return figure


def _compare(axis: Axes, panel: Panel) -> None:
    arms = list(panel.series[0])
    for values, filled in zip(panel.series, (True, False), strict=False):
        for seed in sorted({seed for seeds in values.values() for seed in seeds}):
            joined = [(x, values[arm][seed]) for x, arm in enumerate(arms) if seed in values[arm]]
            axis.plot(*zip(*joined, strict=True), color="#888888", lw=0.6, alpha=0.6, zorder=1)
        for x, arm in enumerate(arms):
            _, colour, marker = ARMS[arm]
            dots = list(values[arm].values())
            face = colour if filled else "white"
            axis.scatter([x] * len(dots), dots, s=20, color=face, edgecolor=colour, marker=marker, zorder=2)
            if dots:
                axis.plot([x - 0.28, x - 0.1], [np.mean(dots)] * 2, color=colour, lw=2)
    if control := list(panel.series[0].get("explicit", {}).values()):
        axis.axhline(float(np.mean(control)), color=ARMS["explicit"][1], lw=0.8, ls="--")
    for x, arm in enumerate(arms):
        if arm in panel.intervals:
            axis.plot([x + 0.2] * 2, panel.intervals[arm], color=ARMS[arm][1], lw=2.5, solid_capstyle="butt")
        if arm in panel.printed:
            axis.scatter(x, panel.printed[arm], s=70, color="black", marker="x", zorder=3)
    for name, value in panel.references.items():
        axis.axhline(value, color="black", lw=0.8, ls=":")
        axis.text(len(arms) - 0.55, value, name, fontsize="x-small", ha="right", va="bottom")
    low, high = axis.get_ylim()  # if an interval exceeds the percentages, only what lies within them
    axis.set(ylabel=panel.label, xlim=(-0.5, len(arms) - 0.5), ylim=(max(low, -1), min(high, 101)))
    axis.set_xticks(range(len(arms)), [ARMS[arm][0].replace(", ", "\n") for arm in arms], fontsize="x-small")
    axis.grid(axis="y", alpha=0.3)


def _plot_seeds(axis: Axes, arm: str, seeds: Sequence[Curves], name: str, **style: Any) -> None:
    """Draw the mean over the seeds against the epochs at which all have a value, and the band of their range."""
    values = np.array([curves[name] for curves in seeds], dtype=float)  # None becomes NaN
    shared = np.isfinite(values).all(0)
    epochs, values = np.array(seeds[0]["epoch"])[shared], values[:, shared]
    _, colour, marker = ARMS[arm]
    style |= {"color": colour, "marker": marker, "markevery": max(1, len(epochs) // 12)}
    axis.plot(epochs, values.mean(0), ms=4, **style)
    axis.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)


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
