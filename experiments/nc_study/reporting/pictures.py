"""The pictures of a group of runs: which figures its settings give, under which names, and what their captions say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from runs.files import read_arrays

from .. import figures
from ..config import ARMS, Setting
from ..paper import PAPER
from .runs import Group
from .verdicts import estimate

COMPARISON = (
    "After the last epoch, a dot for each seed, those of a seed joined. Dash: mean; dashed across: that of the "
    "explicit network. Bar: this mean plus the 95 % interval of the difference paired by seed; an arm differs from "
    "the explicit network, taken by itself, where its bar does not reach the dashed line; bars end at 0 and 100 %. "
    "×: the paper's value. "
    "Dotted: the simplex ETF (0), orthogonal class means (the least that features after a ReLU can have, not "
    "centred), and minority means of 0 beside a simplex of the majority."
)
COURSE = (
    "Test accuracy (dashed: majority, dotted: minority), and NC1 (logarithmic), centred NC2 and NC3 of the training "
    "images, against epoch. With more than one seed a line is their mean, and the band their range. The paper's Fig. "
    "3b is (5,5), Fig. 4 (3,7) and Fig. 5 (7,3), all at R = 100."
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
    """Draw what shows the result, the arms side by side in every setting with seeds of several; then the course, and
    single features."""
    several = [setting for setting in group.settings if sum(len(group.networks(setting, arm)) > 1 for arm in ARMS) > 1]
    rows = {_heading(group, setting): list(_panels(group, setting)) for setting in several or group.settings}
    yield Picture("comparison", "Arms side by side", COMPARISON, figures.comparison(rows))
    yield Picture("courses", "Course of training (the paper's Figs. 3b, 4 and 5)", COURSE, _course(group))
    for setting in group.settings:
        yield from _features(group, setting)


def _panels(group: Group, setting: Setting) -> Iterator[figures.Panel]:
    """Make the panels of a setting: accuracy of all classes and, if there are any, minority classes; NC2 and NC3."""
    arms = [arm for arm in ARMS if group.networks(setting, arm)]
    paper = {} if group.drawn else PAPER.get(setting, {})

    def values(name: str) -> dict[str, dict[int, float]]:
        found = {arm: {seed: one.quantity(name) for seed, one in group.networks(setting, arm).items()} for arm in arms}
        return {arm: {seed: one for seed, one in seeds.items() if one is not None} for arm, seeds in found.items()}

    def panel(label: str, names: tuple[str, ...], references: dict[str, float]) -> figures.Panel:
        series, intervals, printed = [values(name) for name in names], {}, {}
        for arm in arms:
            apart = group.differences(setting, arm, "explicit", names[0])
            if arm != "explicit" and len(apart) > 1:
                control = fmean(series[0]["explicit"].values())
                low, high = estimate([list(apart.values())]).interval
                intervals[arm] = (control + low, control + high)
            entry = getattr(paper.get("deq" if arm.startswith("deq") else arm), names[0], None)
            if entry:
                printed[arm] = entry.mean
        return figures.Panel(label, series, intervals, printed, references)

    for name in ("overall", "minority") if setting.majority else ("overall",):
        yield panel(f"{name} accuracy (%)", (name,), {})
    classes, lines = setting.classes, {"simplex ETF": 0.0}
    lines["orthogonal"] = to_simplex(classes, classes - 1)
    if setting.majority:
        lines["minority collapse"] = to_simplex(classes - 1, setting.majority_classes - 1)
    yield panel("NC2 centred (hollow: not centred)", ("nc2_centered", "nc2"), lines)
    yield panel("NC3 centred (hollow: not centred)", ("nc3_centered", "nc3"), {"self-dual": 0.0})


def to_simplex(larger: int, smaller: int) -> float:
    """Return NC2 where the Gram matrix of the class means and the simplex's are multiples of projections of these
    ranks, one within the other: K and K - 1 of orthogonal means, K - 1 and K_A - 1 of minority means of 0."""
    return math.sqrt(2 - 2 * math.sqrt(smaller / larger))


def _heading(group: Group, setting: Setting) -> str:
    return f"{setting}; {group.experiment.preset} preset"


def _course(group: Group) -> Figure:
    rows = {}
    for setting in group.settings:
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
    name, title = f"{setting.slug}-features", f"Features, {setting.imbalance}, as in figure 2 of the paper"
    features = {arm: read_features(path) for arm, path in left[seed].items()}
    figure = figures.features_figure(features, classes, setting.majority_classes, _heading(group, setting))
    yield Picture(name, title, FEATURES.format(seed=seed), figure)


def read_features(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read an arm's features (N, D) and labels (N,), sorted by class, without the rows that are not finite."""
    arrays = read_arrays(path)
    features, labels = arrays["features"], arrays["labels"]
    kept = np.isfinite(features).all(1)
    order = np.argsort(labels[kept], kind="stable")
    return features[kept][order].astype(np.float32), labels[kept][order]
