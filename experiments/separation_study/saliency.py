"""Experiment 7: breadth of Grad-CAM's maps (Selvaraju et al., 2017) of the networks of the CIFAR study.

The paper and its authors' reply to the reviewers say that a DEQ's maps are broader than an explicit network's.

The control gives the last block and the classifier random weights (Adebayo et al., 2018). Maps that survive this show
nothing of what was learnt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from nc_study.config import ARMS, RUNNABLE, Settings, arm_options, settings_from
from nc_study.data import find_source, load
from nc_study.networks import ResNet18, build, choose_kernel
from nc_study.reporting.runs import collect
from nc_study.reporting.tables import over_seeds
from nc_study.rundir import RunDirectory
from nc_study.training import Trainer
from runs import style
from runs.options import StudyError
from scipy import stats
from torch import Tensor
from tqdm import tqdm

from .claims import Comparison, compare, comparison
from .frame import RECONSTRUCTION, Experiment, Picture, Row, Section, Table, Unit, experiment, notes

DRAWN_ARMS = ("explicit", "tied-1", "deq-implicit")
CONTROLS = tuple(arm for arm in ARMS if not arm.startswith("deq"))  # what a DEQ is compared with
OTHER_SEED = 10**6  # added to a run's seed for random weights
SURVIVES = 0.5  # mean rank correlation with the maps of random weights, above which maps show nothing
RANDOM = ", random"  # suffix of the names of measurements under random weights
EXAMPLES = 6  # images that are shown
KERNEL = choose_kernel("auto", "cpu")[0]

Runs = Mapping[Unit, tuple[Path, ...]]
"""The folders of a unit's finished runs."""


@dataclass(frozen=True)
class Sizes:
    """Test images, a description of the networks, and the training of those that are trained here."""

    images: int
    seeds: int
    epochs: int
    per_class: int
    networks: str = "small ones, trained here on drawn shapes"


@dataclass(frozen=True)
class Arm:
    """Network: the measurements of `measure_arm` by name, None if all maps are empty; and its maps of the first
    images."""

    name: str
    values: dict[str, float | None]
    maps: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Result:
    """Arms of one seed on the same images; `shown` has the bytes of the first images, (32, 32, 3) each."""

    images: int
    shown: tuple[bytes, ...]
    arms: tuple[Arm, ...]


def half_mass(maps: np.ndarray) -> np.ndarray:
    """Return the least number of positions, (N,), that together hold half of each map (N, P)."""
    held = np.sort(maps)[:, ::-1].cumsum(1)
    return (held < held[:, -1:] / 2).sum(1) + 1


def spread(maps: Tensor, suffix: str = "") -> dict[str, float | None]:
    """Measure maps (N, H, W): the share of empty ones and, over the others, two means. These are the entropy in bits of
    maps divided by their sums, and the number of positions that hold half of a map."""
    flat = maps.flatten(1).double().numpy()
    full = flat[flat.max(1) > 0]
    means: dict[str, float | None] = {"entropy": None, "half": None}
    if len(full):
        means = {"entropy": float(stats.entropy(full, axis=1, base=2).mean()), "half": float(half_mass(full).mean())}
    return {f"{name}{suffix}": value for name, value in {**means, "empty": 1 - len(full) / len(flat)}.items()}


@torch.no_grad()
def explain(network: ResNet18, images: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return Grad-CAM's maps (N, H, W) of the last block's output for normalised images (N, 3, 32, 32), and the classes
    (N,) that they explain: the predicted ones, unless given.

    A map is relu(Σ_k a_k A_k) of feature maps A_k, with a_k the mean over positions of the logit's gradient. Logits are
    linear in the means over positions, so a_k is the class's weight over the number of positions.
    """
    features = network.eval().last(network.trunk(network.stem(images)))
    if classes is None:
        classes = network.classifier(features.mean((2, 3))).argmax(1)
    maps = torch.einsum("nchw,nc->nhw", features, network.classifier.weight[classes]).relu()
    return maps / features[0, 0].numel(), classes


def randomised(network: ResNet18, settings: Settings) -> ResNet18:
    """Copy the network, with random weights in the last block and the classifier: the initial ones of another seed."""
    other = build(replace(settings, seed=settings.seed + OTHER_SEED))
    other.stem.load_state_dict(network.stem.state_dict())
    other.trunk.load_state_dict(network.trunk.state_dict())
    return other


def measure_arm(network: ResNet18, settings: Settings, images: Tensor, labels: Tensor) -> Arm:
    """Measure a network's maps, and those under random weights of the same classes."""
    maps, classes = explain(network, images)
    control, _ = explain(randomised(network, settings), images, classes)
    pairs = zip(maps.flatten(1), control.flatten(1), strict=True)
    ranks = [stats.spearmanr(*pair).statistic for pair in pairs if all(part.max() > part.min() for part in pair)]
    values = {"accuracy": float((classes == labels).double().mean()), **spread(maps), **spread(control, RANDOM)}
    values["rank correlation"] = float(np.mean(ranks)) if ranks else None
    return Arm(settings.arm, values, tuple(map(tuple, maps[:EXAMPLES].flatten(1).tolist())))


def load_run(path: Path, root: Path) -> tuple[ResNet18, Settings]:
    """Load the network of a finished run, to be evaluated here in float32."""
    run = RunDirectory(path)
    here = {"device": "cpu", "kernel": KERNEL, "precision": "fp32", "compile": False}
    settings = Settings(**asdict(run.result.settings) | here, data_root=str(root), threads=1)
    network = build(settings)
    run.load_weights(network)
    return network, settings


def train_small(arm: str, sizes: Sizes, seed: int) -> tuple[ResNet18, Settings]:
    """Train a small network on drawn shapes with the study's own code, at the rate of its quick preset."""
    fixed = {"preset": "quick", "dataset": "shapes", "width": 8, "device": "cpu", "precision": "fp32", "threads": 1}
    given = {"seed": seed, "epochs": sizes.epochs, "n_majority": sizes.per_class, "test_images": sizes.images}
    settings = settings_from("cifar_balanced", **arm_options(arm), **fixed, **given, kernel=KERNEL)
    trainer = Trainer(settings, load(find_source("shapes", Path()), settings, torch.device("cpu")))
    for epoch in range(1, sizes.epochs + 1):
        trainer.train_epoch(epoch, tqdm(disable=True))
    return trainer.network, settings


def measure(sizes: Sizes, unit: Unit, runs: Runs | None = None, root: Path = Path()) -> Result:
    """Measure the networks in the unit's folders, or if there are no runs small ones, on the same images."""
    if runs:
        networks = [load_run(path, root) for path in runs[unit]]
    else:
        networks = [train_small(arm, sizes, unit.seed) for arm in DRAWN_ARMS]
    settings = networks[0][1]
    data = load(find_source(settings.dataset, root), settings, torch.device("cpu"))
    images, labels = data.test_images[: sizes.images], data.test_labels[: sizes.images]
    arms = [measure_arm(network, own, data.normalise(images), labels) for network, own in networks]
    shown = tuple(image.permute(1, 2, 0).numpy().tobytes() for image in images[:EXAMPLES])
    return Result(len(images), shown, tuple(arms))


def units(sizes: Sizes, runs: Runs | None = None) -> list[Unit]:
    """Return the units of the runs, or if there are none one for each seed."""
    return list(runs or ()) or [Unit("shapes-balanced", seed) for seed in range(sizes.seeds)]


def section(sizes: Sizes, results: dict[Unit, Result]) -> Section:
    """Judge by the entropy whether a DEQ's maps are broader than those of the other arms."""
    tasks: dict[str, dict[str, dict[int, Arm]]] = {}
    for unit, result in results.items():
        for arm in result.arms:
            tasks.setdefault(unit.task, {}).setdefault(arm.name, {})[unit.seed] = arm
    compared = [
        _broader(arm, arms[control], task=task, arm=name, control=control)
        for task, arms in tasks.items()
        for name, arm in arms.items()
        for control in CONTROLS
        if name.startswith("deq") and control in arms
    ]
    rows = [_row(task, list(arm.values())) for task, arms in tasks.items() for arm in arms.values()]
    images = ", ".join(sorted({str(result.images) for result in results.values()}))
    note = "Means and standard deviations over seeds. Empty maps have no entropy. They are counted and left out."
    tables = [Table("Breadth of Grad-CAM's maps", RECONSTRUCTION, rows, note)]
    items = notes("saliency", networks=sizes.networks, images=images, survives=SURVIVES)
    return Section(items, compare(compared), tables, [_picture(*next(iter(results.items())))])


def _broader(deq: dict[int, Arm], others: dict[int, Arm], **names: str) -> Comparison:
    def differences(name: str) -> list[float]:
        pairs = [(deq[seed].values[name], others[seed].values[name]) for seed in deq if seed in others]
        return [own - other for own, other in pairs if own is not None and other is not None]

    survives = np.mean([arm.values["rank correlation"] or 0 for arm in deq.values()]) > SURVIVES
    held = differences("half")
    accuracy = float(np.mean([arm.values["accuracy"] for arm in (*deq.values(), *others.values())]))
    shown = {
        "half": np.mean(held) if held else math.nan,
        "random": "; the DEQ's maps correlate with those of random weights" if survives else "",
        "accuracy": accuracy,
        "positions": len(next(iter(deq.values())).maps[0]),
    }
    return comparison("saliency", [differences("entropy")], not survives, greater=True, **names, **shown)


def _row(task: str, seeds: list[Arm]) -> Row:
    known = {name: [arm.values[name] for arm in seeds if arm.values[name] is not None] for name in seeds[0].values}
    row: Row = {"task": task, "arm": seeds[0].name, "seeds": len(seeds)}
    return row | {name: over_seeds(values) for name, values in known.items()}


def _picture(unit: Unit, result: Result) -> Picture:
    figure, axes = style.panels(len(result.arms) + 1, len(result.shown), height=style.WIDTH / len(result.shown))
    for column, picture in zip(axes.T, result.shown, strict=True):
        column[0].imshow(np.frombuffer(picture, np.uint8).reshape(32, 32, 3))
    axes[0, 0].set_ylabel("image")
    for row, arm in zip(axes[1:], result.arms, strict=True):
        row[0].set_ylabel(arm.name)
        for axis, part in zip(row, arm.maps, strict=True):
            side = math.isqrt(len(part))
            axis.imshow(np.reshape(part, (side, side)), cmap="magma", vmin=0)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        style.bare(axis)
    caption = f"The first test images, and each arm's maps, in units of their largest; {unit}."
    return Picture("saliency", "Grad-CAM's maps", RECONSTRUCTION, caption, figure)


SALIENCY = experiment(__name__, "Saliency", quick=Sizes(100, 2, 2, 40), full=Sizes(500, 5, 10, 100))


def finished(folder: Path, root: Path) -> Experiment:
    """Make the experiment on the finished runs below a folder, whose CIFAR files are under root; StudyError if there
    are none. Of several experiments it takes the one that the study's report has first."""
    groups = [group for group in collect([folder]).groups if group.experiment.evaluate == "test"]
    if not groups:
        raise StudyError(f"--runs {folder}: there must be a finished run of study.py or cifar_lt.py in it")
    arms: dict[Unit, dict[str, Path]] = {}
    for (setting, arm), seeds in groups[0].runs.items():
        for seed, run in seeds.items():
            arms.setdefault(Unit(f"{setting.dataset}-{setting.slug}", seed), {})[arm] = run.path
    find_source(groups[0].experiment.dataset, root)  # an error now rather than in a unit
    runs = {unit: tuple(paths[arm] for arm in RUNNABLE if arm in paths) for unit, paths in sorted(arms.items())}
    networks = f"runs of {groups[0].name}"
    return replace(
        SALIENCY,
        sizes={preset: replace(sizes, networks=networks) for preset, sizes in SALIENCY.sizes.items()},
        units=partial(units, runs=runs),
        measure=partial(measure, runs=runs, root=root),
    )
