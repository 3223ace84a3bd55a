"""Numbers printed by Sun & Shi (NeurIPS 2024, arXiv 2410.23391): Tables 1 to 4, the settings of each table and figure,
and every claim that the layer-peeled problems can judge."""

from __future__ import annotations

import csv
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from runs.options import StudyError, flag_of

from .config import BOTH, Experiment, Setting, preset_values
from .record import Accuracy, Spread

FOLDER = Path(__file__).parent
RATIOS = (10, 50, 100)
DATA_SETS = {"cifar": ("cifar10", "cifar100")}
"""Value of --dataset in addition to single data sets."""

# (K_A, R); the balanced case has neither.
Imbalance = tuple[int | None, int | None]
_BALANCED: Imbalance = (None, None)
TABLES: dict[str, tuple[Imbalance, ...]] = {
    "1": (_BALANCED,),
    **{table: tuple((majority, ratio) for ratio in RATIOS) for table, majority in (("2", 3), ("3", 5), ("4", 7))},
}
FIGURES: dict[str, tuple[Imbalance, ...]] = {
    "2": ((3, 10),),
    "3": (_BALANCED, (5, 100)),
    "4": ((3, 100),),
    "5": ((7, 100),),
}
COURSES: dict[Imbalance, tuple[str, str]] = {
    _BALANCED: ("Fig. 3a", "NC2 falls to 0.2"),
    (5, 100): ("Fig. 3b", "the axis of accuracy ends at 40 %"),
    (3, 100): ("Fig. 4", "the axis of accuracy ends at 28 %"),
    (7, 100): ("Fig. 5", "100 epochs"),
}
"""The figure that shows a setting's course of training on CIFAR-10, and what is known of its ranges."""


def _numbers() -> dict[Setting, dict[str, Accuracy]]:
    numbers = {}
    for row in csv.DictReader(FOLDER.joinpath("paper.csv").read_text().splitlines()):
        imbalance = [int(row[name]) for name in ("majority", "ratio") if row[name]]
        spreads = {name: _spread(text) for name, text in row.items() if "±" in text}
        networks = {
            model: Accuracy(
                **{name.split()[1]: spread for name, spread in spreads.items() if name.startswith(f"{model} ")}
            )
            for model in BOTH
        }
        numbers[Setting(row["dataset"], *imbalance)] = networks
    return numbers


def _spread(text: str) -> Spread:
    mean, std = text.split("±")
    return Spread(float(mean), float(std))


PAPER = _numbers()
"""Accuracy in percent by setting and network: mean and deviation over the last ten epochs."""

INCONSISTENT = frozenset(
    {
        (Setting("cifar10", 5, 10), "explicit"),
        (Setting("cifar10", 5, 100), "deq"),
        (Setting("cifar100", 7, 10), "deq"),
    }
)
"""Entries printed with an overall accuracy that is not the class mean of the other two."""


def on_cifar(setting: Setting) -> Setting:
    """Setting of the paper with the same imbalance and number of classes: shapes replace CIFAR."""
    return replace(setting, dataset="cifar10" if setting.classes == 10 else "cifar100")


def differences(experiment: Experiment, without: Collection[str] = ()) -> list[str]:
    """Differences of a run from the paper's experiment, except the options in `without`; empty if there are none."""
    departures = []
    if experiment.dataset.startswith("shapes"):
        departures.append(f"{experiment.dataset}, not CIFAR")
    wanted = {
        "imbalance": "step",
        "loss": "cross-entropy",
        "solver": "broyden",
        "tol": 1e-3,
        "max_iter": 20,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "scale": 1.0,
    }
    # The bounds are the paper's; it does not say how it kept them.
    wanted |= {name: 0.01 for name in ("e_w", "e_h") if getattr(experiment, name) is not None}
    for name, value in {**wanted, **preset_values("paper", experiment.classes)}.items():
        if name not in ("metrics_every", *without) and getattr(experiment, name) != value:
            departures.append(f"{flag_of(name)[2:]} {getattr(experiment, name)} instead of {value}")
    return departures


def settings_of(tables: str | None, figures: str | None, dataset: str) -> list[Setting]:
    """Settings of comma-separated numbers, or "all", of tables and figures, each once, in the paper's order.

    With dataset "cifar" the tables take both CIFAR sets and the figures, as in the paper, CIFAR-10.
    """
    named = DATA_SETS.get(dataset, (dataset,))
    chosen = _chosen("--table", tables, TABLES)
    settings = [Setting(name, *imbalance) for table in chosen for name in named for imbalance in TABLES[table]]
    for figure in _chosen("--figure", figures, FIGURES):
        settings += [Setting(named[0], *imbalance) for imbalance in FIGURES[figure]]
    return list(dict.fromkeys(settings))


def _chosen(flag: str, text: str | None, known: dict[str, tuple[Imbalance, ...]]) -> list[str]:
    if text is None:
        return []
    numbers = list(known) if text == "all" else text.split(",")
    for number in numbers:
        if number not in known:
            raise StudyError(f"{flag} {text}: all, or some of {', '.join(known)} with commas between")
    return numbers


THEORY: dict[str, tuple[str, str]] = {
    row["claim"]: (row["source"], row["text"])
    for row in csv.DictReader(FOLDER.joinpath("theory.csv").read_text().splitlines())
}
"""Source and text of each claim about the optima of the layer-peeled problems (7), (9) and (10); `{name}` and `{scale}`
stand for the variant that is judged. The keys of Proposition 4.2 name the quantity in the record. Fang et al.: PNAS
2021."""
