"""The pictures of a group of runs: which figures its cells give, under which names, and what their captions say."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from .. import figures
from ..cells import FIGURES, Cell
from ..config import MODELS, StudyError
from ..rundir import Row, write_atomically
from . import class_figures
from .page import Block, Paragraph, Picture
from .runs import Group, Run

COURSE_FIGURES = ("3", "4", "5")
FEATURE_FIGURE = "2"


@dataclass(frozen=True)
class Plan:
    """A picture to be drawn: the name of its file without ending, its caption, and what draws it."""

    name: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Drawn:
    """The blocks that show pictures, and how many pictures there are."""

    blocks: list[Block]
    count: int


@dataclass(frozen=True)
class FigureFolder:
    """Where the figures of a report lie, and of which kinds they are: "png", and perhaps "svg"."""

    path: Path
    kinds: tuple[str, ...] = ("png", "svg")

    def add(self, name: str, caption: str, content: dict[str, bytes]) -> Picture:
        """Write a figure, given by kind; the block that shows it."""
        written = {kind: data for kind, data in content.items() if kind in self.kinds}
        for kind, data in written.items():
            write_atomically(self.path / f"{name}.{kind}", data)
        return Picture(f"{self.path.name}/{name}", caption, content["png"], "svg" in written)


def pictures_of(group: Group, folder: FigureFolder, first: bool) -> Drawn:
    """Draw every picture of a group into `folder`. Names of the first group have no prefix."""
    prefix = "" if first else f"{group_slug(group)}-"
    blocks: list[Block] = []
    plans = list(plan_pictures(group))
    for plan in tqdm(plans, desc="figures", unit="figure", leave=False, disable=None):
        try:
            drawn = figures.images(plan.draw(), *folder.kinds)
        except StudyError as error:
            blocks.append(Paragraph(f"{plan.caption} Not drawn: {error}."))
            continue
        blocks.append(folder.add(f"{prefix}{plan.name}", plan.caption, drawn))
    return Drawn(blocks, sum(isinstance(block, Picture) for block in blocks))


def group_slug(group: Group) -> str:
    """A group's part of file names: its experiment, and digits that stand for what departs from the preset."""
    settings = dict(group.identity)
    digest = hashlib.sha256(group.name.encode()).hexdigest()[:6]
    return "-".join([*(settings[name] for name in ("dataset", "preset", "solver", "adjoint")), digest])


def plan_pictures(group: Group) -> Iterator[Plan]:
    """The paper's figures as far as their cells were run, then every other cell and every other picture."""
    courses = {} if group.classes > 10 else {number: _cells(group, number) for number in COURSE_FIGURES}
    for number, cells in courses.items():
        if cells:
            yield _course(group, f"figure{number}", cells, number)
    shown = {cell for cells in courses.values() for cell in cells}
    for cell in group.cells:
        if cell not in shown:
            yield _course(group, f"{cell_slug(cell)}-course", [cell], None)
    for cell in group.cells:
        yield from _features(group, cell)
    for cell in group.cells:
        yield from _solver(group, cell)
        yield from _radius(group, cell)
        yield from _confusion(group, cell)


def cell_slug(cell: Cell) -> str:
    """A cell's part of file names."""
    return "balanced" if cell.majority is None else f"k{cell.majority}-r{cell.ratio}"


def _cells(group: Group, number: str) -> list[Cell]:
    """The cells of a figure of the paper that were run."""
    return [cell for split in FIGURES[number] if (cell := Cell(group.dataset, *split)) in group.cells]


def _heading(cell: Cell) -> str:
    return f"{cell.dataset}, {_split(cell)}"


def _split(cell: Cell) -> str:
    return "balanced" if cell.majority is None else f"({cell.majority}, {10 - cell.majority}), R = {cell.ratio}"


def _preset(group: Group) -> str:
    return f"{dict(group.identity)['preset']} preset"


def _caption(group: Group, cells: list[Cell], number: str | None, text: str) -> str:
    """Which figure of the paper it is like, of which cell and group, and what it shows."""
    where = " and ".join(map(_split, cells))
    like = f"Figure {number} of the paper: " if number else ""
    comparable = "; not comparable with the paper" if number and group.differences else ""
    return f"{like}{where}; {group.name}{comparable}. {text}"


def _seeds(runs: dict[int, Run]) -> str:
    return f"seed {min(runs)}" if len(runs) == 1 else f"mean of seeds {', '.join(map(str, runs))}, band: their range"


def _summaries(group: Group, cell: Cell, model: str) -> list[Row]:
    return [run.result["models"][model] for run in group.seeds(cell, model).values()]


def _course(group: Group, name: str, cells: list[Cell], number: str | None) -> Plan:
    missing = [cell for split in FIGURES.get(number or "", ()) if (cell := Cell(group.dataset, *split)) not in cells]
    text = "Test accuracy, and NC1 (logarithmic), NC2 and NC3 of the training images, against epoch; "
    text += "; ".join(_who(group, cell, len(cells) > 1) for cell in cells)
    if missing:
        text += f". Not run: {' and '.join(map(_split, missing))}"
    rows = {
        f"{_heading(cell)}; {_preset(group)}": {
            model: [summary["curves"] for summary in _summaries(group, cell, model)]
            for model in MODELS
            if group.seeds(cell, model)
        }
        for cell in cells
    }
    return Plan(name, _caption(group, cells, number, f"{text}."), partial(figures.study_figure, rows))


def _who(group: Group, cell: Cell, named: bool) -> str:
    """Which seeds of which networks a row of panels shows."""
    seeds = {figures.LABELS[model]: _seeds(runs) for model in MODELS if (runs := group.seeds(cell, model))}
    alike = len(seeds) == 2 and len(set(seeds.values())) == 1
    told = f"both networks {next(iter(seeds.values()))}" if alike else ", ".join(map(" ".join, seeds.items()))
    return f"{_split(cell)}: {told}" if named else told


def _features(group: Group, cell: Cell) -> Iterator[Plan]:
    """t-SNE and Gram matrix of the first seed of each network that left its features."""
    runs = {model: _first_with_features(group, cell, model) for model in MODELS}
    chosen = {model: run for model, run in runs.items() if run}
    if not chosen:
        return
    number = FEATURE_FIGURE if group.classes == 10 and cell in _cells(group, FEATURE_FIGURE) else None
    name = f"figure{FEATURE_FIGURE}" if number else f"{cell_slug(cell)}-features"
    seeds = " and ".join(dict.fromkeys(f"seed {run.seed}" for run in chosen.values()))
    text = (
        f"Features of the first training images of every class, {seeds}. Above: t-SNE (perplexity "
        f"{class_figures.PERPLEXITY}, or a third of the images if they are few; PCA start, seed 0). Below: Gram matrix "
        "H Hᵀ of the features, each scaled to length 1 (cosines), sorted by class; thick lines part majority and "
        "minority."
    )
    draw = partial(_draw_features, group, chosen, cell)
    yield Plan(name, _caption(group, [cell], number, text), draw)


def _first_with_features(group: Group, cell: Cell, model: str) -> Run | None:
    return next((run for run in group.seeds(cell, model).values() if (run.path / "features.npz").exists()), None)


def _draw_features(group: Group, chosen: dict[str, Run], cell: Cell) -> Figure:
    arrays = {model: class_figures.read_features(run.path / "features.npz", model) for model, run in chosen.items()}
    majority = next(iter(chosen.values())).result["majority_classes"]
    return class_figures.features_figure(arrays, majority, group.classes, f"{_heading(cell)}; {_preset(group)}")


def _solver(group: Group, cell: Cell) -> Iterator[Plan]:
    runs = group.seeds(cell, "deq")
    summaries = [summary for summary in _summaries(group, cell, "deq") if summary.get("solver")]
    if not summaries:
        return
    text = (
        "The solver on the training images: evaluations, relative residual and converged share against epoch, and the "
        f"mean evaluations of each class in the last epoch; {_seeds(runs)}."
    )
    majority = next(iter(runs.values())).result["majority_classes"]
    curves, final = ([summary[name] for summary in summaries] for name in ("curves", "solver"))
    heading = f"Solver of the DEQ: {_heading(cell)}; {_preset(group)}"
    draw = partial(figures.solver_figure, curves, final, majority, heading)
    yield Plan(f"{cell_slug(cell)}-solver", _caption(group, [cell], None, text), draw)


def _radius(group: Group, cell: Cell) -> Iterator[Plan]:
    runs = group.seeds(cell, "deq")
    radii = [found for summary in _summaries(group, cell, "deq") if (found := summary.get("spectral_radius"))]
    if not radii:
        return
    text = (
        "Spectral radius of the Jacobian ∂f/∂z of the last block at the fixed points of training images, by class, "
        f"with quartiles where a class has five images or more; seeds {', '.join(map(str, runs))}."
    )
    majority = next(iter(runs.values())).result["majority_classes"]
    pairs = [(np.array(found["labels"]), np.array(found["values"])) for found in radii]
    heading = f"Jacobian at z*: {_heading(cell)}; {_preset(group)}"
    draw = partial(class_figures.radius_figure, pairs, majority, group.classes, heading)
    yield Plan(f"{cell_slug(cell)}-radius", _caption(group, [cell], None, text), draw)


def _confusion(group: Group, cell: Cell) -> Iterator[Plan]:
    counts = {
        model: [np.array(summary["confusion"]) for summary in _summaries(group, cell, model)]
        for model in MODELS
        if group.seeds(cell, model)
    }
    seeds = sorted({seed for model in MODELS for seed in group.seeds(cell, model)})
    listed = ", ".join(map(str, seeds))
    text = f"Confusions on the test images after the last epoch, in % of each true class; seeds {listed}."
    majority = next(run for (where, _, _), run in group.runs.items() if where == cell).result["majority_classes"]
    heading = f"Confusions: {_heading(cell)}; {_preset(group)}"
    draw = partial(class_figures.confusion_figure, counts, majority, heading)
    yield Plan(f"{cell_slug(cell)}-confusion", _caption(group, [cell], None, text), draw)
