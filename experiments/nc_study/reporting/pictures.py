"""The pictures of a group of runs: which figures its settings give, and under which names and titles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure

from .. import figures
from ..config import ARMS, Setting
from ..paper import COURSES, PAPER
from ..record import GROUPS, Curves
from .runs import Group, Run
from .tables import broken
from .verdicts import DEQ, estimate

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Classes of CIFAR-10."""


@dataclass(frozen=True)
class Picture:
    """A picture of a report: the name of its file without ending, its title and the figure."""

    name: str
    title: str
    figure: Figure


def pictures(group: Group) -> Iterator[Picture]:
    """Draw the arms' differences from the explicit network, the courses of training, and single features."""
    paired = {
        "pairs": (figures.ACCURACY, "Accuracy", "minus the explicit network's, in points: right is better"),
        "collapse": (figures.COLLAPSE, "Collapse", "compared with the explicit network's: left is more"),
    }
    for name, (labels, title, heading) in paired.items():
        columns = {label: panels for key, label in labels.items() if (panels := list(_panels(group, key)))}
        if columns:
            figure = figures.paired_figure(columns, f"{title}\n{heading}")
            yield Picture(name, f"{title}, paired by seed", figure)
    title = (
        "Courses of training" if group.drawn else "Figs. 3a, 3b, 4 and 5: courses of training, as far as they were run"
    )
    yield Picture("courses", title, _course(group))
    for setting in group.settings:
        yield from _features(group, setting)


def _panels(group: Group, quantity: str) -> Iterator[figures.Panel]:
    """Make the panels of a quantity: the settings in which an arm and the explicit network share two seeds."""
    for setting in group.settings:
        differences = {arm: group.differences(setting, arm, "explicit", quantity) for arm in ARMS if arm != "explicit"}
        if differences := {arm: seeds for arm, seeds in differences.items() if len(seeds) > 1}:
            entry = {} if group.drawn else PAPER.get(setting, {})
            before, after = (getattr(entry.get(model), quantity, None) for model in ("explicit", "deq"))
            networks = {
                (arm, seed): network for arm in differences for seed, network in group.networks(setting, arm).items()
            }
            yield figures.Panel(
                title=_title(setting),
                differences=differences,
                intervals={arm: estimate([list(seeds.values())]).interval for arm, seeds in differences.items()},
                printed=after.mean - before.mean if before and after else None,
                ringed=[key for key, network in networks.items() if broken(network)],
            )


def _title(setting: Setting) -> str:
    """Name the imbalance, and explain it."""
    large = setting.majority_classes
    explained = f": {large} large, {setting.classes - large} small classes"
    return setting.imbalance + (explained if large < setting.classes else "")


def _course(group: Group) -> Figure:
    rows: dict[str, dict[str, list[Curves]]] = {}
    printed: dict[str, dict[str, dict[str, float]]] = {}
    for setting in group.settings:
        number, ends = COURSES.get(setting, ("No course in the paper", ""))
        networks = {arm: group.networks(setting, arm).values() for arm in ARMS}
        curves = {arm: [network.curves for network in by_seed] for arm, by_seed in networks.items() if by_seed}
        heading = f"{number}: {setting}" + (f" (in the paper {ends})" if ends else "")
        entry = {} if group.drawn else PAPER.get(setting, {})
        rows[heading] = curves
        for model, accuracies in entry.items():
            known = {name: shown.mean for name in GROUPS if (shown := getattr(accuracies, name))}
            printed.setdefault(heading, {})[DEQ if model == "deq" else model] = known
    return figures.study_figure(rows, printed)


def _features(group: Group, setting: Setting) -> Iterator[Picture]:
    """Draw cosines and t-SNE of the arms of the first seed that left its features."""
    left: dict[int, dict[str, Run]] = {}
    for arm in ARMS:
        for seed, run in group.runs.get((setting, arm), {}).items():
            if run.folder.features.exists():
                left.setdefault(seed, {})[arm] = run
    if left:
        features = {arm: run.features() for arm, run in left[min(left)].items()}
        names = NAMES if setting.dataset == "cifar10" else [f"tenth {number} of the classes" for number in range(1, 11)]
        place = f"{'Fig. 2' if setting.slug == 'k3-r10' else 'As Fig. 2'}: "
        which = f" of features, {setting.imbalance}, seed {min(left)}"
        cosines = figures.cosines_figure(features, setting.majority_classes, f"Cosines, sorted by class; {setting}")
        yield Picture(f"{setting.slug}-cosines", f"{place}cosines{which}", cosines)
        embeddings = figures.embeddings_figure(features, names, setting.majority_classes, f"t-SNE; {setting}")
        yield Picture(f"{setting.slug}-embeddings", f"{place}t-SNE{which}", embeddings)
