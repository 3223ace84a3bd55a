"""The pictures of a group of runs: which figures its settings give, under which names, and what their captions say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .. import figures
from ..config import ARMS, Setting
from ..paper import FIGURES
from ..rundir import read_arrays
from .runs import Group

COURSE = (
    "Test accuracy (dashed: majority, dotted: minority), and NC1 (logarithmic), NC2 and NC3 of the training images, "
    "against epoch. With more than one seed a line is their mean, and the band their range."
)
FEATURES = (
    "Features of the first training images of every class, seed {seed}. Above: t-SNE (perplexity "
    f"{figures.PERPLEXITY}, or a third of the images if they are few; PCA start; ▲ majority, ▼ minority). Below: Gram "
    "matrix H Hᵀ of the features, each scaled to length 1 (cosines), sorted by class; lines part majority and minority."
)


@dataclass(frozen=True)
class Picture:
    """A picture of a report: the name of its file without ending, title, caption and figure."""

    name: str
    title: str
    caption: str
    figure: Figure


def pictures(group: Group) -> Iterator[Picture]:
    """Draw the paper's figures as far as their settings were run, then what shows all other settings together."""
    rest = group.settings
    for number in ("3", "4", "5"):
        if settings := [setting for setting in _of_figure(group, number) if setting in group.settings]:
            yield Picture(f"figure{number}", f"After figure {number} of the paper", COURSE, _course(group, settings))
        rest = [setting for setting in rest if setting not in settings]
    if rest:
        yield Picture("courses", "Course of training in the other settings", COURSE, _course(group, rest))
    for setting in group.settings:
        yield from _features(group, setting)


def _of_figure(group: Group, number: str) -> list[Setting]:
    """Return the settings of a figure of the paper, whose figures are of ten classes."""
    if group.experiment.classes != 10:
        return []
    return [Setting(group.experiment.dataset, *imbalance) for imbalance in FIGURES[number]]


def _heading(group: Group, setting: Setting) -> str:
    return f"{setting}; {group.experiment.preset} preset"


def _course(group: Group, settings: list[Setting]) -> Figure:
    rows = {}
    for setting in settings:
        networks = {arm: group.networks(setting, arm).values() for arm in ARMS}
        curves = {arm: [network.curves for network in found] for arm, found in networks.items() if found}
        rows[_heading(group, setting)] = curves
    return figures.study_figure(rows)


def _features(group: Group, setting: Setting) -> Iterator[Picture]:
    """Draw t-SNE and Gram matrix of the arms of the first seed that left its features."""
    left: dict[int, dict[str, Path]] = {}
    for arm in ARMS:
        for seed, run in group.runs.get((setting, arm), {}).items():
            if (path := run.path / "features.npz").exists():
                left.setdefault(seed, {})[arm] = path
    if not left:
        return
    seed, classes = min(left), group.experiment.classes
    name, title = f"{setting.slug}-features", f"Features, {setting.imbalance}"
    if setting in _of_figure(group, "2"):
        name, title = "figure2", "After figure 2 of the paper"
    features = {arm: read_features(path, arm) for arm, path in left[seed].items()}
    figure = figures.features_figure(features, classes, setting.majority_classes, _heading(group, setting))
    yield Picture(name, title, FEATURES.format(seed=seed), figure)


def read_features(path: Path, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """Read an arm's features (N, D) and labels (N,), sorted by class, without the rows that are not finite. Runs of
    two networks named them after these."""
    arrays = read_arrays(path)
    prefix = "" if "features" in arrays else f"{arm.partition('-')[0]}/"
    features, labels = arrays[f"{prefix}features"], arrays[f"{prefix}labels"]
    kept = np.isfinite(features).all(1)
    order = np.argsort(labels[kept], kind="stable")
    return features[kept][order].astype(np.float32), labels[kept][order]
