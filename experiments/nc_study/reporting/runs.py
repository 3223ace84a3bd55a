"""Runs found under folders: the finished ones in groups that may be compared, the others with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs.files import read_arrays, reading
from runs.options import StudyError, flag_of

from deqfast.metrics import ClassGeometry, class_geometry

from .. import moments, paper, protocol
from ..config import Experiment, Setting
from ..record import NetworkResult, RunResult
from ..rundir import RunDirectory

# What may differ between runs that are averaged or compared: the setting, the seed, and how it was computed.
NOT_OF_THE_EXPERIMENT = frozenset(
    ("study", "model", "cells", "adjoint", "majority", "ratio", "seed", "metrics_every", "kernel", "compile")
)

REMEDY = "remove it to have the report without it"


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its result, and what else it has saved."""

    path: Path
    result: RunResult

    @property
    def folder(self) -> RunDirectory:
        """The folder with the names of its files."""
        return RunDirectory(self.path)

    @cached_property
    def geometry(self) -> ClassGeometry | None:
        """Geometry after the last epoch of imbalanced classes; None if class means were not saved. Raises Unreadable
        if they are damaged."""
        setting, path = self.result.setting, self.folder.moments
        if not setting.majority or not path.exists():
            return None
        saved = moments.read(path)
        with reading(path, REMEDY):
            last = {name: torch.from_numpy(saved[name][-1]) for name in ("means", "counts", "weight", "traces")}
            if {len(part) for part in last.values()} != {setting.classes}:
                raise ValueError(f"its arrays must be of {setting.classes} classes")
            geometry = class_geometry(
                last["means"], last["counts"], last["weight"], last["traces"], setting.majority_classes
            )
        return geometry

    def features(self) -> tuple[np.ndarray, np.ndarray]:
        """Read features (N, D) and labels (N,), sorted by class, without the rows that are not finite. Raises
        Unreadable if they are damaged."""
        path = self.folder.features
        arrays = read_arrays(path, ("features", "labels"), REMEDY)
        with reading(path, REMEDY):
            features, labels = arrays["features"], arrays["labels"]
            kept = np.isfinite(features).all(1)
            order = np.argsort(labels[kept], kind="stable")
            features, labels = features[kept][order].astype(np.float32), labels[kept][order]
            if (
                labels.ndim != 1
                or min(features.shape) < 2
                or not {*labels.tolist()} <= {*range(self.result.setting.classes)}
            ):
                raise ValueError("it must have two finite features of two images or more, and their classes")
        return features, labels

    def check(self) -> None:
        """Raise Unreadable if a file that reports read is damaged."""
        _ = self.geometry
        if self.folder.features.exists():
            self.features()


@dataclass(frozen=True)
class Rejected:
    """A folder that gives no row to a table: "unfinished", "duplicate", ... and why or how far it got."""

    folder: Path
    state: str
    reason: str


@dataclass
class Group:
    """Runs of one experiment, by seed of each setting and arm; `experiment`: of one of them. `tuned`: they are of the
    protocol's first list, and each has what the trials chose for its arm. `own`: they are of the amendment of
    2026-11-28, and each has the rate that the trials chose for its arm."""

    experiment: Experiment
    tuned: bool
    own: bool = False
    runs: dict[tuple[Setting, str], dict[int, Run]] = field(default_factory=dict)

    @property
    def recipe_b(self) -> bool:
        """Whether they are the runs on which the protocol's verdicts rest."""
        return not self.own and protocol.has_recipe_b(self.experiment) and self.experiment.device == "cuda"

    @property
    def is_of_parts(self) -> bool:
        """Whether parts of the amendment of 2026-11-28 are judged by them."""
        return self.own and self.experiment.weight_decay == protocol.DECAY

    @property
    def first_recipe(self) -> bool:
        """Whether they are of the first list, without the check of the precision."""
        return self.tuned and self.experiment.precision == "bf16"

    @property
    def recipe(self) -> str:
        """Rate / decay / gain, every other option that is not the preset's, and the device."""
        experiment = self.experiment
        rate = "each arm's own" if self.own else f"{experiment.lr:g}"
        values = "tuned arm by arm" if self.tuned else f"{rate} / {experiment.weight_decay:g} / {experiment.scale:g}"
        hidden = {*NOT_OF_THE_EXPERIMENT, *protocol.TUNED, "solver"}
        apart = [(flag_of(name)[2:], value) for name, value in experiment.departures.items() if name not in hidden]
        options = [
            str(value) if name == "precision" else name if value is True else f"{name} {value}" for name, value in apart
        ]
        return ", ".join([values, *options, {"cuda": "GPU", "cpu": "CPU"}[experiment.device]])

    @property
    def name(self) -> str:
        """The preset, the data, the solver and the recipe."""
        experiment = self.experiment
        return f"{experiment.preset} preset on {experiment.dataset}, {experiment.solver}, {self.recipe}"

    @property
    def drawn(self) -> bool:
        """Whether the images are drawn, so that nothing can be compared with the paper."""
        return self.experiment.dataset.startswith("shapes")

    @property
    def not_the_papers(self) -> list[str]:
        """Ways in which these runs are not the paper's experiment."""
        if self.own:
            return [*paper.differences(self.experiment, ("lr",)), "rates chosen by trials"]
        if not self.tuned:
            return paper.differences(self.experiment)
        return [*paper.differences(self.experiment, protocol.TUNED), "rate, weight decay and gain chosen by trials"]

    @property
    def settings(self) -> list[Setting]:
        """Settings that were run: balanced first, then by K_A and R."""
        return sorted(
            {setting for setting, _ in self.runs}, key=lambda setting: (setting.majority or 0, setting.ratio or 0)
        )

    @property
    def finished(self) -> list[Run]:
        """Each run once, by folder."""
        by_path = {run.path: run for seeds in self.runs.values() for run in seeds.values()}
        return [by_path[path] for path in sorted(by_path)]

    def networks(self, setting: Setting, arm: str) -> dict[int, NetworkResult]:
        """Return what an arm came to in a setting under each seed."""
        seeds = self.runs.get((setting, arm), {})
        return {seed: seeds[seed].result.network for seed in sorted(seeds)}

    def differences(self, setting: Setting, arm: str, control: str, quantity: str) -> dict[int, float]:
        """Return `apart` of the arm and its control in a setting."""
        return apart(self.networks(setting, arm), self.networks(setting, control), quantity)


def apart(after: Mapping[int, NetworkResult], before: Mapping[int, NetworkResult], quantity: str) -> dict[int, float]:
    """Return a quantity of the first less the second, of NC1 the logarithm of their ratio, under each seed that has
    both, if it is defined."""
    by_seed = {}
    for seed in before.keys() & after.keys():
        old, new = before[seed].quantity(quantity), after[seed].quantity(quantity)
        if old is None or new is None:
            continue
        if quantity != "nc1":
            by_seed[seed] = new - old
        elif old > 0 and new > 0:
            by_seed[seed] = math.log(new / old)
    return by_seed


def identity(run: Run, tuned: bool, own: bool = False) -> tuple[Any, ...]:
    """Return all that two runs must share to be averaged or compared; on a GPU also the card and torch's version.

    Runs of the first list have rate, weight decay and scale of their own, those of the last amendment the rate.
    """
    free = {*NOT_OF_THE_EXPERIMENT, *(protocol.TUNED if tuned else ("lr",) if own else ())}
    machine = (run.result.machine.gpu, run.result.versions["torch"]) if run.result.settings.device == "cuda" else ()
    return (
        tuned,
        own,
        machine,
        *((name, value) for name, value in asdict(run.result.settings).items() if name not in free),
    )


def gpu_less_cpu(groups: Sequence[Group]) -> list[tuple[str, float]]:
    """Return arm, and overall accuracy on a GPU less the one on a CPU in points, of each experiment that both ran."""
    by_settings: dict[tuple[Any, ...], dict[str, NetworkResult]] = {}
    for run in (run for group in groups for run in group.finished):
        settings = run.result.settings
        same = tuple(item for item in asdict(settings).items() if item[0] not in ("device", "kernel", "compile"))
        by_settings.setdefault((settings.arm, same), {})[settings.device] = run.result.network
    pairs = (
        (arm, apart({0: networks["cuda"]}, {0: networks["cpu"]}, "overall"))
        for (arm, _), networks in by_settings.items()
        if len(networks) == 2
    )
    return [(arm, difference[0]) for arm, difference in pairs if difference]


@dataclass(frozen=True)
class Collection:
    """All that was found: groups in the paper's order, and what could not be used."""

    groups: list[Group]
    rejected: list[Rejected]


def collect(roots: Sequence[Path]) -> Collection:
    """Search folders and those below for runs."""
    finished: list[Run] = []
    rejected: list[Rejected] = []
    folders = {path.resolve(): path for root in roots for path in (root, *root.rglob("*/"))}
    for path in sorted(folders.values()):
        folder = RunDirectory(path)
        try:
            if folder.finished:
                run = Run(path, folder.result)
                run.check()
                finished.append(run)
            elif begun := folder.begun:
                rejected.append(Rejected(path, "unfinished", f"{len(folder.epochs)} of {begun.epochs} epochs"))
        except StudyError as error:
            rejected.append(Rejected(path, "unreadable", str(error)))
    groups: dict[tuple[Any, ...], Group] = {}
    rejected += _sort(finished, groups)
    # The protocol's first, then real data, then what is nearest to the paper's experiment or has most runs.
    ordered = sorted(
        groups.values(),
        key=lambda group: (
            *(not group.recipe_b, not group.first_recipe, group.drawn),
            *(len(group.not_the_papers), -len(group.finished), group.name),
        ),
    )
    return Collection(ordered, sorted(rejected, key=lambda entry: entry.folder))


def _sort(runs: list[Run], groups: dict[tuple[Any, ...], Group]) -> Iterator[Rejected]:
    """Put runs into their groups; of two of a setting, arm and seed the one finished last counts."""
    chosen: dict[str, dict[str, float]] = {}
    with suppress(StudyError):  # a report needs no trials
        chosen = protocol.tuned()
    rates = protocol.rates()
    for run in sorted(runs, key=lambda run: run.result.finished, reverse=True):
        result, tuned = run.result, protocol.has_first_recipe(run.result.settings, chosen)
        own = protocol.has_own_rate(result.settings, rates)
        group = groups.setdefault(identity(run, tuned, own), Group(result.settings, tuned, own))
        seeds = group.runs.setdefault((result.setting, result.arm), {})
        counted = seeds.setdefault(result.settings.seed, run)
        if counted is not run:
            where = f"{result.arm} of {result.setting}, seed {result.settings.seed}"
            yield Rejected(run.path, "duplicate", f"{where}: {counted.path} counts in its place")
