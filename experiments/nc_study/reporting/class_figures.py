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

from ..config import CLASSES, Setting, StudyError
from ..figures import COLOURS, GROUP_COLOURS, GROUP_MARKERS, LABELS, class_groups, finish_classes
from ..record import SpectralRadius
from ..rundir import read_arrays
from .runs import majority_classes
from .tables import name_of

PERPLEXITY = 30
FEWEST_IMAGES = 10
# Paul Tol's "muted" scheme and grey: ten colours that people who see few colours tell apart.
CLASS_COLOURS = [f"#{one}" for one in ("332288", "88CCEE", "44AA99", "117733", "999933")]
CLASS_COLOURS += [f"#{one}" for one in ("DDCC77", "CC6677", "882255", "AA4499", "777777")]


class NoFeatures(StudyError):
    """Features that are missing or cannot be drawn."""


def features_figure(paths: Mapping[str, Path], setting: Setting, heading: str) -> Figure:
    """Draw a column for each network: t-SNE of its features, and the Gram matrix of the features at unit length."""
    features = {model: read_features(path, model) for model, path in paths.items()}
    figure, axes = plt.subplots(2, len(paths), figsize=(4.6 * len(paths), 8.2), layout="constrained", squeeze=False)
    figure.suptitle(heading)
    for (above, below), (model, (points, labels)) in zip(axes.T, features.items(), strict=True):
        for axis in (above, below):
            axis.set_title(LABELS[model], color=COLOURS[model])
        _embedding(above, points, labels, setting)
        picture = _gram(below, points, labels, setting)
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


def _embedding(axis: Axes, features: np.ndarray, labels: np.ndarray, setting: Setting) -> None:
    """Draw ten classes in a colour each; of a hundred only the group is told."""
    points, classes = embed(features), CLASSES[setting.dataset]
    for group, part in class_groups(classes, majority_classes(setting)).items():
        members = np.arange(classes)[part]
        for chosen in members[:, None] if classes == 10 else members[None]:
            colour, name = (CLASS_COLOURS[chosen[0]], chosen[0]) if classes == 10 else (GROUP_COLOURS[group], group)
            x, y = points[np.isin(labels, chosen)].T
            axis.scatter(x, y, s=22, color=colour, marker=GROUP_MARKERS[group], alpha=0.7, lw=0, label=name)
    axis.legend(fontsize="x-small", ncols=5, title="class", loc="upper center", bbox_to_anchor=(0.5, -0.07))
    axis.set(xlabel="t-SNE, first coordinate", ylabel="t-SNE, second coordinate", xticks=[], yticks=[])


def _gram(axis: Axes, features: np.ndarray, labels: np.ndarray, setting: Setting) -> AxesImage:
    classes, majority = CLASSES[setting.dataset], majority_classes(setting)
    colours = plt.get_cmap("RdBu_r", 33)  # few, so that the picture's file stays small
    picture = axis.imshow(gram(features), vmin=-1, vmax=1, cmap=colours, interpolation="none")
    starts = np.searchsorted(labels, np.arange(classes + 1)) - 0.5
    thin = starts[1:-1] if classes == 10 else starts[:0]
    for width, places in ((0.3, thin), (1.6, starts[majority:-1][:1])):
        for place in places:
            axis.axhline(place, color="black", lw=width)
            axis.axvline(place, color="black", lw=width)
    shown = np.arange(0, classes, classes // 10)
    centres = (starts[shown] + starts[shown + 1]) / 2
    axis.set_xticks(centres, shown)
    axis.set_yticks(centres, shown)
    axis.set(xlabel="image, by class", ylabel="image, by class")
    return picture


def confusion_figure(rows: Mapping[tuple[Setting, str], Sequence[Any]], heading: str) -> Figure:
    """Draw for each setting and network how many percent of a class's test images were taken for each class, from the
    counts (classes, classes) of each seed."""
    figure, axes = _grid(len(rows), columns=4, size=(3.4, 3.5), heading=heading)
    for axis, ((setting, model), counts) in zip(axes, rows.items(), strict=True):
        total = np.sum(counts, 0)
        picture = _confusion(axis, 100 * total / np.maximum(total.sum(1, keepdims=True), 1), majority_classes(setting))
        axis.set_title(f"{name_of(setting)}, {LABELS[model]}", color=COLOURS[model], size=10)
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
        axis.axhline(majority - 0.5, color="white", lw=1.6)
        axis.axvline(majority - 0.5, color="white", lw=1.6)
    ticks = np.arange(0, classes, classes // 10)
    axis.set(xlabel="class taken for", ylabel="true class", xticks=ticks, yticks=ticks)
    return picture


def radius_figure(rows: Mapping[Setting, Sequence[SpectralRadius]], heading: str) -> Figure:
    """Draw for each setting the spectral radius at each image's fixed point, by class, over all seeds."""
    figure, axes = _grid(len(rows), columns=2, size=(6, 3), heading=heading)
    for axis, (setting, radii) in zip(axes, rows.items(), strict=True):
        labels = np.concatenate([one.labels for one in radii])
        values = np.concatenate([one.values for one in radii])
        _radius(axis, labels, values, setting)
        axis.set_title(name_of(setting), size=10)
    axes[0].legend(fontsize="small", ncols=3, loc="upper left")
    return figure


def _radius(axis: Axes, labels: np.ndarray, values: np.ndarray, setting: Setting) -> None:
    classes = CLASSES[setting.dataset]
    jitter = np.random.default_rng(0).uniform(-0.18, 0.18, len(values)) if classes == 10 else np.zeros(len(values))
    for group, part in class_groups(classes, majority_classes(setting)).items():
        members = np.isin(labels, np.arange(classes)[part])
        style: dict[str, Any] = {"color": GROUP_COLOURS[group], "marker": GROUP_MARKERS[group], "label": group}
        axis.scatter(labels[members] + jitter[members], values[members], s=12, alpha=0.7, lw=0, **style)
    boxes = {label: values[labels == label] for label in range(classes) if (labels == label).sum() >= 5}
    if boxes and classes == 10:
        median = {"color": "black", "lw": 1.8}
        places, drawn = list(boxes), list(boxes.values())
        axis.boxplot(drawn, positions=places, widths=0.6, showfliers=False, medianprops=median, manage_ticks=False)
    axis.axhline(1, color="black", lw=1, ls="--", label="above 1: z ← f(z) diverges")
    axis.set_ylabel("spectral radius of ∂f/∂z at z*")
    axis.grid(alpha=0.3, axis="y")
    finish_classes(axis, classes)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high + 0.18 * (high - low))
