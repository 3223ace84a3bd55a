"""Numbers printed by Sun & Shi (NeurIPS 2024, arXiv 2410.23391): Tables 1 to 4, the settings of each table and figure,
and every claim that the layer-peeled problems can judge."""

from __future__ import annotations

import csv
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from runs.options import flag_of, listed_or_all

from .config import BOTH, Experiment, Setting, preset_values
from .record import GROUPS, Accuracy, Spread

FOLDER = Path(__file__).parent
DATA_SETS = {"cifar": ("cifar10", "cifar100")}
"""Value of --dataset in addition to single data sets."""

Imbalance = tuple[int | None, int | None]
"""(K_A, R); the balanced case has neither."""


def entries(name: str) -> list[dict[str, str]]:
    """Rows of a table in this folder, by the names of its columns."""
    return list(csv.DictReader(FOLDER.joinpath(name).read_text(encoding="utf-8").splitlines()))


def _setting(row: dict[str, str]) -> Setting:
    return Setting(row["dataset"], *(int(row[name]) for name in ("majority", "ratio") if row[name]))


def _accuracy(row: dict[str, str], model: str) -> Accuracy:
    printed = {group: row[f"{model} {group}"].split("±") for group in GROUPS}
    return Accuracy(**{group: Spread(*map(float, numbers)) for group, numbers in printed.items() if numbers != [""]})


def _imbalances(column: str) -> dict[str, list[Imbalance]]:
    """Imbalances of each table, or of each figure without its letter, in the paper's order."""
    chosen: dict[str, list[Imbalance]] = {}
    for row in sorted((row for row in _ENTRIES if row[column]), key=lambda row: row[column]):
        setting = _setting(row)
        imbalances = chosen.setdefault(row[column][0], [])
        if (imbalance := (setting.majority, setting.ratio)) not in imbalances:
            imbalances.append(imbalance)
    return chosen


_ENTRIES = entries("paper.csv")
PAPER = {_setting(row): {model: _accuracy(row, model) for model in BOTH} for row in _ENTRIES}
"""Accuracy in percent by setting and network: mean and deviation over the last ten epochs."""

INCONSISTENT = frozenset((_setting(row), row["inconsistent"]) for row in _ENTRIES if row["inconsistent"])
"""Entries printed with an overall accuracy that is not the class mean of the other two."""

COURSES = {_setting(row): (f"Fig. {row['figure']}", row["course"]) for row in _ENTRIES if row["course"]}
"""The figure that shows a setting's course of training, and what is known of its ranges."""

TABLES, FIGURES = _imbalances("table"), _imbalances("figure")


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
    in_tables = [
        Setting(name, *imbalance) for table in _chosen("table", tables, TABLES) for name in named for imbalance in table
    ]
    in_figures = [Setting(named[0], *imbalance) for some in _chosen("figure", figures, FIGURES) for imbalance in some]
    return list(dict.fromkeys(in_tables + in_figures))


def _chosen(name: str, words: str | None, known: dict[str, list[Imbalance]]) -> list[list[Imbalance]]:
    return [known[number] for number in listed_or_all(name, words, known)] if words is not None else []


THEORY = {row["claim"]: (row["source"], row["text"]) for row in entries("theory.csv")}
"""Source and text of each claim about the optima of the layer-peeled problems (7), (9) and (10); `{name}` and `{scale}`
stand for the variant that is judged. The keys of Proposition 4.2 name the quantity in the record. Fang et al.: PNAS
2021."""
