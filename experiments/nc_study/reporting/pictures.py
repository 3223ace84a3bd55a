"""The pictures of a group of runs: which figures its settings give, under which names, and what their captions say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from .. import figures
from ..config import MODELS, Setting
from ..paper import FIGURES
from ..rundir import write_atomically
from . import class_figures
from .runs import Group, Run
from .tables import name_of

COURSE_FIGURES = ("3", "4", "5")
FEATURE_FIGURE = "2"


@dataclass(frozen=True)
class Plan:
    """A picture to be drawn: the name of its file without ending, its title and caption, and what draws it."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Picture:
    """A picture in a document: title, caption, and its file relative to the document or why there is none."""

    title: str
    caption: str
    path: str = ""
    error: str = ""


def draw_all(group: Group, folder: Path, first: bool) -> list[Picture]:
    """Draw every picture of a group into `folder`. Names of the first group have no prefix."""
    prefix = "" if first else f"{group_slug(group)}-"
    drawn = []
    for plan in tqdm(list(plan_pictures(group)), desc="figures", unit="figure", leave=False, disable=None):
        path = folder / f"{prefix}{plan.name}.png"
        try:
            write_atomically(path, figures.png(plan.draw()))
        except class_figures.NoFeatures as error:
            drawn.append(Picture(plan.title, plan.caption, error=str(error)))
        else:
            drawn.append(Picture(plan.title, plan.caption, f"{folder.name}/{path.name}"))
    return drawn


def group_slug(group: Group) -> str:
    """Return a group's part of file names: its experiment, and digits for what departs from the preset."""
    known = dict(group.identity)
    digest = hashlib.sha256(group.name.encode()).hexdigest()[:6]
    return "-".join([*(known[name] for name in ("dataset", "preset", "solver", "adjoint")), digest])


def plan_pictures(group: Group) -> Iterator[Plan]:
    """Plan the paper's figures as far as their settings were run, then what shows all other settings together."""
    rest = group.settings
    for number in COURSE_FIGURES if group.classes == 10 else ():
        settings = _of_figure(group, number)
        if settings:
            yield _course(group, f"figure{number}", settings, number)
        rest = [setting for setting in rest if setting not in settings]
    if rest:
        yield _course(group, "courses", rest, None)
    for setting in group.settings:
        yield from _features(group, setting)
    solved = [one for one in group.settings if any(network.solver for network in group.networks(one, "deq"))]
    if solved:
        yield _solver(group, solved)
    analysed = [one for one in group.settings if any(one.spectral_radius for one in group.networks(one, "deq"))]
    if analysed:
        yield _radius(group, analysed)
    yield _confusion(group)


def _of_figure(group: Group, number: str) -> list[Setting]:
    """Return the settings of a figure of the paper that were run."""
    settings = [Setting(group.dataset, *imbalance) for imbalance in FIGURES[number]]
    return [setting for setting in settings if setting in group.settings]


def _heading(group: Group, setting: Setting) -> str:
    return f"{group.dataset}, {name_of(setting)}; {group.preset} preset"


def _title(group: Group, number: str | None, other: str) -> str:
    """Name the figure of the paper that a picture is like, else what the picture is of."""
    comparable = ", not comparable with it" if group.differences else ""
    return f"Figure {number} of the paper{comparable}" if number else other


def _course(group: Group, name: str, settings: list[Setting], number: str | None) -> Plan:
    text = "Test accuracy, and NC1 (logarithmic), NC2 and NC3 of the training images, against epoch; "
    text += "; ".join(f"{name_of(setting)}: {_who(group, setting)}" for setting in settings)
    wanted = [Setting(group.dataset, *imbalance) for imbalance in FIGURES.get(number or "", ())]
    if missing := [name_of(setting) for setting in wanted if setting not in settings]:
        text += f". Not run: {' and '.join(missing)}"
    rows = {
        _heading(group, setting): {
            model: [network.curves for network in networks]
            for model in MODELS
            if (networks := group.networks(setting, model))
        }
        for setting in settings
    }
    title = _title(group, number, "Course of training in the other settings")
    return Plan(name, title, f"{text}.", partial(figures.study_figure, rows))


def _who(group: Group, setting: Setting) -> str:
    """Tell which seeds of which networks a row of panels shows."""
    seeds = {figures.LABELS[model]: _seeds(runs) for model in MODELS if (runs := group.seeds(setting, model))}
    alike = len(seeds) == 2 and len(set(seeds.values())) == 1
    return f"both networks {next(iter(seeds.values()))}" if alike else ", ".join(map(" ".join, seeds.items()))


def _seeds(runs: dict[int, Run]) -> str:
    return f"seed {min(runs)}" if len(runs) == 1 else f"mean of seeds {', '.join(map(str, runs))}, band: their range"


def _features(group: Group, setting: Setting) -> Iterator[Plan]:
    """Plan t-SNE and Gram matrix of the first seed of each network that left its features."""
    runs = {model: _first_with_features(group, setting, model) for model in MODELS}
    chosen = {model: run for model, run in runs.items() if run}
    if not chosen:
        return
    number = FEATURE_FIGURE if group.classes == 10 and setting in _of_figure(group, FEATURE_FIGURE) else None
    split = "balanced" if setting.majority is None else f"k{setting.majority}-r{setting.ratio}"
    title = _title(group, number, f"Features, {name_of(setting)}")
    seeds = " and ".join(dict.fromkeys(f"seed {run.seed}" for run in chosen.values()))
    text = (
        f"Features of the first training images of every class, {name_of(setting)}, {seeds}. Above: t-SNE (perplexity "
        f"{class_figures.PERPLEXITY}, or a third of the images if they are few; PCA start, seed 0). Below: Gram matrix "
        "H Hᵀ of the features, each scaled to length 1 (cosines), sorted by class; thick lines part majority and "
        "minority."
    )
    paths = {model: run.path / "features.npz" for model, run in chosen.items()}
    majority, heading = group.majority(setting), _heading(group, setting)
    draw = partial(class_figures.features_figure, paths, majority, group.classes, heading)
    yield Plan(f"figure{number}" if number else f"{split}-features", title, text, draw)


def _first_with_features(group: Group, setting: Setting, model: str) -> Run | None:
    return next((run for run in group.seeds(setting, model).values() if (run.path / "features.npz").exists()), None)


def _solver(group: Group, settings: list[Setting]) -> Plan:
    text = (
        "The solver on the training images: evaluations, relative residual and converged share against epoch, and the "
        "mean evaluations of each class in the last epoch; with more than one seed their mean, band: their range."
    )
    rows = {
        _heading(group, setting): (
            [network for network in group.networks(setting, "deq") if network.solver],
            group.majority(setting),
        )
        for setting in settings
    }
    return Plan("solver", "Solver of the DEQ", text, partial(figures.solver_figure, rows))


def _radius(group: Group, settings: list[Setting]) -> Plan:
    text = (
        "Spectral radius of the Jacobian ∂f/∂z of the last block at the fixed points of training images, by class, "
        "over all seeds, with quartiles where a class has five images or more."
    )
    rows = {}
    for setting in settings:
        radii = [one.spectral_radius for one in group.networks(setting, "deq") if one.spectral_radius]
        rows[name_of(setting)] = (radii, group.majority(setting))
    heading = f"Jacobian at z*: {group.dataset}; {group.preset} preset"
    draw = partial(class_figures.radius_figure, rows, group.classes, heading)
    return Plan("radius", "Jacobian at the fixed points", text, draw)


def _confusion(group: Group) -> Plan:
    text = "Confusions on the test images after the last epoch, in % of each true class, over all seeds."
    rows = {}
    for setting in group.settings:
        for model in MODELS:
            counts = [network.confusion for network in group.networks(setting, model)]
            if counts:
                rows[name_of(setting), model] = (counts, group.majority(setting))
    heading = f"Confusions: {group.dataset}; {group.preset} preset"
    draw = partial(class_figures.confusion_figure, rows, heading)
    return Plan("confusion", "Confusions", text, draw)
