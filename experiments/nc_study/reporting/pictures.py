"""The pictures of a group of runs: which figures its settings give, under which names, and what their captions say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from .. import figures
from ..config import MODELS, Setting
from ..paper import FIGURES
from ..record import Curves
from ..rundir import write_atomically
from . import class_figures
from .runs import Group, Run, majority_classes
from .tables import name_of

COURSE_FIGURES = ("3", "4", "5")
FEATURE_FIGURE = "2"


@dataclass
class Picture:
    """A picture of a report: the name of its file without ending, title, caption and what draws it; then its file
    relative to the report, or why there is none."""

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    path: str = ""
    error: str = ""


def draw_all(group: Group, folder: Path, prefix: str) -> list[Picture]:
    """Draw every picture of a group into `folder`, under names that begin with the prefix."""
    planned = list(plan_pictures(group))
    for picture in tqdm(planned, desc="figures", unit="figure", leave=False, disable=None):
        file = f"{prefix}{picture.name}.png"
        try:
            write_atomically(folder / file, figures.png(picture.draw()))
            picture.path = f"{folder.name}/{file}"
        except class_figures.NoFeatures as error:
            picture.error = str(error)
    return planned


def plan_pictures(group: Group) -> Iterator[Picture]:
    """Plan the paper's figures as far as their settings were run, then what shows all other settings together."""
    rest = group.settings
    for number in COURSE_FIGURES:
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
    """Return the settings of a figure of the paper that were run; the paper's figures are of ten classes."""
    wanted = [Setting(group.dataset, *imbalance) for imbalance in FIGURES[number]]
    return [setting for setting in wanted if setting in group.settings and group.experiment.classes == 10]


def _heading(group: Group, setting: Setting) -> str:
    return f"{group.dataset}, {name_of(setting)}; {group.experiment.preset} preset"


def _title(group: Group, number: str | None, other: str) -> str:
    """Name the figure of the paper that a picture is like, else what the picture is of."""
    comparable = ", not comparable with it" if group.differences else ""
    return f"Figure {number} of the paper{comparable}" if number else other


def _course(group: Group, name: str, settings: list[Setting], number: str | None) -> Picture:
    text = "Test accuracy, and NC1 (logarithmic), NC2 and NC3 of the training images, against epoch; "
    text += "; ".join(f"{name_of(setting)}: {_who(group, setting)}" for setting in settings)
    wanted = [Setting(group.dataset, *imbalance) for imbalance in FIGURES.get(number or "", ())]
    if missing := [name_of(setting) for setting in wanted if setting not in settings]:
        text += f". Not run: {' and '.join(missing)}"
    rows = {_heading(group, setting): _curves(group, setting) for setting in settings}
    title = _title(group, number, "Course of training in the other settings")
    return Picture(name, title, f"{text}.", partial(figures.study_figure, rows))


def _curves(group: Group, setting: Setting) -> dict[str, list[Curves]]:
    found = {model: [network.curves for network in group.networks(setting, model)] for model in MODELS}
    return {model: curves for model, curves in found.items() if curves}


def _who(group: Group, setting: Setting) -> str:
    """Tell which seeds of which networks a row of panels shows."""
    seeds = {figures.LABELS[model]: _seeds(runs) for model in MODELS if (runs := group.seeds(setting, model))}
    alike = len(seeds) == 2 and len(set(seeds.values())) == 1
    return f"both networks {next(iter(seeds.values()))}" if alike else ", ".join(map(" ".join, seeds.items()))


def _seeds(runs: dict[int, Run]) -> str:
    return f"seed {min(runs)}" if len(runs) == 1 else f"mean of seeds {', '.join(map(str, runs))}, band: their range"


def _features(group: Group, setting: Setting) -> Iterator[Picture]:
    """Plan t-SNE and Gram matrix of the first seed of each network that left its features."""
    chosen: dict[str, Path] = {}
    seeds = []
    for model in MODELS:
        for seed, run in group.seeds(setting, model).items():
            if model not in chosen and (run.path / "features.npz").exists():
                chosen[model] = run.path / "features.npz"
                seeds.append(f"seed {seed}")
    if not chosen:
        return
    number = FEATURE_FIGURE if setting in _of_figure(group, FEATURE_FIGURE) else None
    split = "balanced" if setting.majority is None else f"k{setting.majority}-r{setting.ratio}"
    text = (
        f"Features of the first training images of every class, {name_of(setting)}, "
        f"{' and '.join(dict.fromkeys(seeds))}. Above: t-SNE (perplexity {class_figures.PERPLEXITY}, or a third of the "
        "images if they are few; PCA start, seed 0; ▲ majority, ▼ minority). Below: Gram matrix H Hᵀ of the features, "
        "each scaled to length 1 (cosines), sorted by class; thick lines part majority and minority."
    )
    draw = partial(class_figures.features_figure, chosen, setting, _heading(group, setting))
    title = _title(group, number, f"Features, {name_of(setting)}")
    yield Picture(f"figure{number}" if number else f"{split}-features", title, text, draw)


def _solver(group: Group, settings: list[Setting]) -> Picture:
    text = (
        "The solver on the training images: evaluations, relative residual and converged share against epoch, and the "
        "mean evaluations of each class in the last epoch; with more than one seed their mean, band: their range."
    )
    rows = {}
    for setting in settings:
        networks = [network for network in group.networks(setting, "deq") if network.solver]
        rows[_heading(group, setting)] = (networks, majority_classes(setting))
    return Picture("solver", "Solver of the DEQ", text, partial(figures.solver_figure, rows))


def _radius(group: Group, settings: list[Setting]) -> Picture:
    text = (
        "Spectral radius of the Jacobian ∂f/∂z of the last block at the fixed points of training images, by class, "
        "over all seeds, with quartiles where a class has five images or more."
    )
    rows = {
        setting: [one.spectral_radius for one in group.networks(setting, "deq") if one.spectral_radius]
        for setting in settings
    }
    heading = f"Jacobian at z*: {group.dataset}; {group.experiment.preset} preset"
    return Picture("radius", "Jacobian at the fixed points", text, partial(class_figures.radius_figure, rows, heading))


def _confusion(group: Group) -> Picture:
    text = "Confusions on the test images after the last epoch, in % of each true class, over all seeds."
    found = {(one, model): group.networks(one, model) for one in group.settings for model in MODELS}
    rows = {key: [network.confusion for network in networks] for key, networks in found.items() if networks}
    heading = f"Confusions: {group.dataset}; {group.experiment.preset} preset"
    return Picture("confusion", "Confusions", text, partial(class_figures.confusion_figure, rows, heading))
