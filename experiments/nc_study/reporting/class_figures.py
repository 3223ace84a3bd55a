"""Figures of a trained network, class by class: its features, its confusions, and the Jacobian at its fixed points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from ..config import StudyError
from ..figures import COLOURS, GROUP_COLOURS, GROUP_MARKERS, LABELS, class_groups, finish_classes
from ..record import SpectralRadius
from ..rundir import read_arrays

PERPLEXITY = 30
FEWEST_IMAGES = 10
GRAM_LEVELS = 33
LABEL_DISTANCE = 0.05
# Paul Tol's "muted" scheme and grey: ten colours that people who see few colours tell apart.
CLASS_COLOURS = (
    *("#332288", "#88CCEE", "#44AA99", "#117733", "#999933"),
    *("#DDCC77", "#CC6677", "#882255", "#AA4499", "#777777"),
)
GROUP_NAMES = {"overall": "all classes", "majority": "majority", "minority": "minority"}


class NoFeatures(StudyError):
    """Features that are missing or cannot be drawn."""


def features_figure(paths: Mapping[str, Path], majority: int, classes: int, heading: str) -> Figure:
    """Draw a column for each network: t-SNE of its features, and the Gram matrix of the features at unit length."""
    features = {model: read_features(path, model) for model, path in paths.items()}
    figure, axes = plt.subplots(2, len(paths), figsize=(4.6 * len(paths), 8.2), layout="constrained", squeeze=False)
    figure.suptitle(heading)
    for column, (model, (points, labels)) in zip(axes.T, features.items(), strict=True):
        for axis in column:
            axis.set_title(LABELS[model], color=COLOURS[model])
        _embedding(column[0], points, labels, majority, classes)
        picture = _gram(column[1], points, labels, majority, classes)
    figure.colorbar(picture, ax=axes[1], label="cosine of two features", shrink=0.8)
    return figure


def read_features(path: Path, model: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the features (N, D) and labels (N,) of a network, sorted by class, without the rows that are not finite.
    NoFeatures where they are missing, do not fit or are too few."""
    try:
        group = read_arrays(path).get(model, {})
    except StudyError as error:
        raise NoFeatures(str(error)) from error
    features, labels = group.get("features"), group.get("labels")
    if features is None or labels is None or features.ndim != 2 or labels.shape != features.shape[:1]:
        raise NoFeatures(f"{path} does not hold the features of the {LABELS[model]} network")
    kept = np.isfinite(features).all(1)
    if kept.sum() < FEWEST_IMAGES:
        raise NoFeatures(f"{path}: {kept.sum()} images with finite features, and a t-SNE takes {FEWEST_IMAGES}")
    order = np.argsort(labels[kept], kind="stable")
    return features[kept][order].astype(np.float32), labels[kept][order]


def gram(features: np.ndarray) -> np.ndarray:
    """Return the (N, N) cosines between the rows; 0 for a row of zeros."""
    length = np.linalg.norm(features, axis=1, keepdims=True)
    unit = np.divide(features, length, out=np.zeros_like(features), where=length > 0)
    return unit @ unit.T


def embed(features: np.ndarray) -> np.ndarray:
    """Return an (N, 2) t-SNE of the rows, the same every time; perplexity 30, or a third of the images if few."""
    from sklearn.manifold import TSNE  # late: it takes seconds, and a report without features does without

    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)


def spread_apart(places: Mapping[int, np.ndarray], points: np.ndarray) -> dict[int, np.ndarray]:
    """Push places of labels among points that would cover one another apart to a twentieth of the extent."""
    if not places:
        return {}
    extent = np.ptp(points, axis=0).clip(min=np.finfo(np.float32).tiny)
    moved = np.stack(list(places.values())) / extent
    for _ in range(50):
        for i in range(len(moved)):
            for j in range(i):
                apart = moved[i] - moved[j]
                distance = np.linalg.norm(apart)
                if distance < LABEL_DISTANCE:
                    step = (LABEL_DISTANCE - distance) / 2 * (apart / distance if distance else np.array([1.0, 0.0]))
                    moved[i] += step
                    moved[j] -= step
    return dict(zip(places, moved * extent, strict=True))


def _embedding(axis: Axes, features: np.ndarray, labels: np.ndarray, majority: int, classes: int) -> None:
    """Draw ten classes in a colour each, their number at the median; of a hundred only the group is told."""
    points = embed(features)
    each = classes <= len(CLASS_COLOURS)
    middles = {label: np.median(points[labels == label], 0) for label in np.unique(labels)} if each else {}
    places = spread_apart(middles, points)
    handles = []
    for group, part in class_groups(classes, majority).items():
        for label in range(classes)[part]:
            own = points[labels == label]
            colour = CLASS_COLOURS[label] if each else GROUP_COLOURS[group]
            axis.scatter(own[:, 0], own[:, 1], s=22, color=colour, marker=GROUP_MARKERS[group], alpha=0.7, lw=0)
            if each and len(own):
                box: dict[str, Any] = {
                    "boxstyle": "circle,pad=0.15",
                    "facecolor": "white",
                    "edgecolor": colour,
                    "alpha": 0.85,
                }
                x, y = places[label]
                axis.text(x, y, str(label), ha="center", va="center", fontweight="bold", bbox=box)
        colour = "#444444" if each else GROUP_COLOURS[group]
        handles.append(Line2D([], [], ls="", marker=GROUP_MARKERS[group], color=colour, label=GROUP_NAMES[group]))
    axis.legend(handles=handles, fontsize="small")
    axis.set(xlabel="t-SNE, first coordinate", ylabel="t-SNE, second coordinate", xticks=[], yticks=[])
    axis.margins(0.08)


def _gram(axis: Axes, features: np.ndarray, labels: np.ndarray, majority: int, classes: int) -> AxesImage:
    picture = axis.imshow(
        gram(features), vmin=-1, vmax=1, cmap=plt.get_cmap("RdBu_r", GRAM_LEVELS), interpolation="none"
    )
    starts = np.searchsorted(labels, np.arange(classes + 1)) - 0.5
    if classes <= 10:
        for start in starts[1:-1]:
            axis.axhline(start, color="black", lw=0.3)
            axis.axvline(start, color="black", lw=0.3)
    if majority < classes:
        axis.axhline(starts[majority], color="black", lw=1.6)
        axis.axvline(starts[majority], color="black", lw=1.6)
    shown = np.arange(0, classes, max(1, classes // 10))
    centres = (starts[shown] + starts[shown + 1]) / 2
    axis.set_xticks(centres, [str(label) for label in shown])
    axis.set_yticks(centres, [str(label) for label in shown])
    axis.set(xlabel="image, by class", ylabel="image, by class")
    return picture


def confusion_figure(rows: Mapping[tuple[str, str], tuple[Sequence[Any], int]], heading: str) -> Figure:
    """Draw for each setting and network how many percent of a class's test images were taken for each class: counts
    (classes, classes) of each seed, and the number of majority classes."""
    figure, axes = _grid(len(rows), columns=4, size=(3.4, 3.5), heading=heading)
    for axis, ((setting, model), (counts, majority)) in zip(axes, rows.items(), strict=True):
        total = np.sum(counts, 0)
        picture = _confusion(axis, 100 * total / np.maximum(total.sum(1, keepdims=True), 1), majority)
        axis.set_title(f"{setting}, {LABELS[model]}", color=COLOURS[model], size=10)
    figure.colorbar(picture, ax=axes, label="share of the true class (%)", shrink=0.5)
    return figure


def _grid(count: int, columns: int, size: tuple[float, float], heading: str) -> tuple[Figure, list[Axes]]:
    """Make so many panels of a size in inches, row by row."""
    columns = min(columns, count)
    lines = -(-count // columns)
    figure = plt.figure(figsize=(size[0] * columns + 0.8, size[1] * lines + 0.4), layout="constrained")
    figure.suptitle(heading)
    return figure, [figure.add_subplot(lines, columns, number + 1) for number in range(count)]


def _confusion(axis: Axes, shares: np.ndarray, majority: int) -> AxesImage:
    classes = len(shares)
    picture = axis.imshow(shares, vmin=0, vmax=100, cmap="cividis", interpolation="none")
    if classes <= 10:
        for (row, column), share in np.ndenumerate(shares):
            colour = "black" if share > 55 else "white"
            axis.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=7, color=colour)
    if majority < classes:
        for line in (axis.axhline, axis.axvline):
            line(majority - 0.5, color="white", lw=1.6)
    ticks = np.arange(0, classes, max(1, classes // 10))
    axis.set(xlabel="class taken for", ylabel="true class", xticks=ticks, yticks=ticks)
    return picture


def radius_figure(rows: Mapping[str, tuple[Sequence[SpectralRadius], int]], classes: int, heading: str) -> Figure:
    """Draw for each setting the spectral radius at each image's fixed point, by class, over all seeds; with the number
    of majority classes."""
    figure, axes = _grid(len(rows), columns=2, size=(6, 3), heading=heading)
    for axis, (setting, (radii, majority)) in zip(axes, rows.items(), strict=True):
        labels = np.concatenate([one.labels for one in radii])
        values = np.concatenate([one.values for one in radii])
        _radius(axis, labels, values, class_groups(classes, majority), classes)
        axis.set_title(setting, size=10)
    axes[0].legend(fontsize="small", ncols=3, loc="upper left")
    return figure


def _radius(axis: Axes, labels: np.ndarray, values: np.ndarray, groups: Mapping[str, slice], classes: int) -> None:
    jitter = np.random.default_rng(0).uniform(-0.18, 0.18, len(values)) if classes <= 10 else np.zeros(len(values))
    for group, part in groups.items():
        members = np.isin(labels, np.arange(classes)[part])
        style: dict[str, Any] = {"color": GROUP_COLOURS[group], "marker": GROUP_MARKERS[group], "label": group}
        axis.scatter(labels[members] + jitter[members], values[members], s=12, alpha=0.7, lw=0, **style)
    boxes = {label: values[labels == label] for label in range(classes) if (labels == label).sum() >= 5}
    if boxes and classes <= 10:
        median = {"color": "black", "lw": 1.8}
        places, drawn = list(boxes), list(boxes.values())
        axis.boxplot(drawn, positions=places, widths=0.6, showfliers=False, medianprops=median, manage_ticks=False)
    axis.axhline(1, color="black", lw=1, ls="--", label="above 1: z ← f(z) diverges")
    axis.set_ylabel("spectral radius of ∂f/∂z at z*")
    axis.grid(alpha=0.3, axis="y")
    finish_classes(axis, classes)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.18 * (high - low))
