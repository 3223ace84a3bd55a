"""Runs found under folders: the finished ones in groups that may be compared, the others with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..config import CLASSES, MODELS, PRESETS, Experiment, Setting, StudyError, flag_of
from ..paper import differences
from ..record import NetworkResult, OtherFormat, RunResult, read_record
from ..rundir import RunDirectory

# What may differ between runs that are averaged or compared: the setting, the seed, and how it was computed.
NOT_OF_THE_EXPERIMENT = frozenset(
    ("study", "model", "majority", "ratio", "seed", "metrics_every", "kernel", "compile", "device")
)
NAMES = {"broyden": "Broyden", "anderson": "Anderson", "picard": "Picard", "jfb": "JFB"}
PLAIN = "fp32"  # the precision that goes without saying, whatever `auto` came to on a machine
DEFAULTS = {spec.name: spec.default for spec in fields(Experiment) if spec.default is not MISSING}


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its result."""

    path: Path
    result: RunResult

    @property
    def seed(self) -> int:
        """Seed of weights, batches and augmentation."""
        return self.result.settings.seed


@dataclass(frozen=True)
class Rejected:
    """A folder that gives no row to a table: "failed", "unfinished", "duplicate", ... and why or how far it got."""

    folder: Path
    state: str
    reason: str


@dataclass
class Group:
    """Runs of one experiment, which differ in setting, network and seed alone; `experiment` is that of one of them."""

    experiment: Experiment
    runs: dict[tuple[Setting, str, int], Run] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """The preset, the data, the solver, the gradient, and every option in which it departs from the preset."""
        one = self.experiment
        usual = {**DEFAULTS, **PRESETS.get(one.preset, {}), "precision": PLAIN}
        parts = [
            f"{one.preset} preset on {one.dataset}",
            *(NAMES.get(name, name) for name in (one.solver, one.adjoint)),
        ]
        for name, value in identity(one):
            wanted = usual.get(name)
            wanted = wanted.get(one.classes) if isinstance(wanted, dict) else wanted
            if name not in ("preset", "dataset", "solver", "adjoint") and value != wanted:
                parts.append(f"{flag_of(name)[2:]} {'off' if value is None else value}")
        return ", ".join(parts)

    @property
    def dataset(self) -> str:
        """Name of the data."""
        return self.experiment.dataset

    @property
    def drawn(self) -> bool:
        """Whether the images are drawn, so that nothing can be compared with the paper."""
        return self.dataset.startswith("shapes")

    @property
    def differences(self) -> list[str]:
        """Ways in which these runs are not the paper's experiment."""
        return differences(self.experiment)

    @property
    def settings(self) -> list[Setting]:
        """Settings that were run: balanced first, then by K_A and R."""
        return sorted({setting for setting, _, _ in self.runs}, key=lambda one: (one.majority or 0, one.ratio or 0))

    @property
    def finished(self) -> list[Run]:
        """Each run once, by folder."""
        return sorted({str(run.path): run for run in self.runs.values()}.values(), key=lambda run: str(run.path))

    def seeds(self, setting: Setting, model: str) -> dict[int, Run]:
        """Return the runs of a network in a setting, by seed."""
        found = {seed: run for (where, which, seed), run in self.runs.items() if (where, which) == (setting, model)}
        return dict(sorted(found.items()))

    def networks(self, setting: Setting, model: str) -> list[NetworkResult]:
        """Return what a network came to in a setting under each seed."""
        return [run.result.networks[model] for run in self.seeds(setting, model).values()]

    def pairs(self, setting: Setting) -> dict[int, tuple[NetworkResult, ...]]:
        """Return what the explicit network and the DEQ came to under the same seed, by seed."""
        runs = {model: self.seeds(setting, model) for model in MODELS}
        shared = sorted(set.intersection(*map(set, runs.values())))
        return {seed: tuple(runs[model][seed].result.networks[model] for model in MODELS) for seed in shared}


def identity(experiment: Experiment) -> tuple[tuple[str, Any], ...]:
    """Return all that two runs must share to be averaged."""
    return tuple(sorted((name, one) for name, one in asdict(experiment).items() if name not in NOT_OF_THE_EXPERIMENT))


def majority_classes(setting: Setting) -> int:
    """Count the classes of the majority, all of them where they are balanced."""
    classes = CLASSES[setting.dataset]
    return classes if setting.majority is None else setting.majority * classes // 10


@dataclass(frozen=True)
class TheoryVerdict:
    """What the numerical optima of one layer-peeled problem say to a claim."""

    claim: str
    source: str
    verdict: str


@dataclass(frozen=True)
class Theory:
    """What the report reads of a layer_peeled.json."""

    claims: tuple[TheoryVerdict, ...]


@dataclass(frozen=True)
class Collection:
    """All that was found: groups in the paper's order, what could not be used, and results of the theory by file."""

    groups: list[Group]
    rejected: list[Rejected]
    theory: dict[Path, Theory]


def collect(roots: Sequence[Path]) -> Collection:
    """Search folders and those below for runs and theory; StudyError for a folder that cannot be listed, and where
    there is nothing."""
    finished: list[Run] = []
    rejected: list[Rejected] = []
    theory: dict[Path, Theory] = {}
    for path in {path.resolve(): path for root in roots for path in _folders(root)}.values():
        folder = RunDirectory(path)
        try:
            if (path / "layer_peeled.json").exists():
                theory[path / "layer_peeled.json"] = read_record(Theory, path / "layer_peeled.json")
            if folder.finished:
                finished.append(Run(path, folder.result))
            elif failure := folder.failure:
                rejected.append(Rejected(path, "failed", failure.error))
            elif begun := folder.begun:
                done = (f"{model}: {len(folder.epochs(model))} of {begun.epochs} epochs" for model in begun.models)
                rejected.append(Rejected(path, "unfinished", ", ".join(done)))
        except StudyError as error:
            state = "written by another version" if isinstance(error, OtherFormat) else "unreadable"
            rejected.append(Rejected(path, state, str(error)))
    if not (finished or rejected or theory):
        raise StudyError(f"no runs under {', '.join(map(str, roots))}")
    groups, duplicates = _group(finished)
    return Collection(groups, sorted(rejected + duplicates, key=lambda entry: str(entry.folder)), theory)


def _folders(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        raise StudyError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
    for name, below, _ in os.walk(root, onerror=_cannot_list):
        below.sort()
        yield Path(name)


def _cannot_list(error: OSError) -> None:
    raise StudyError(f"{error.filename}: cannot be listed ({error.strerror})") from error


def _group(runs: list[Run]) -> tuple[list[Group], list[Rejected]]:
    """Sort runs by experiment; of two of a setting, network and seed the one finished last counts."""
    groups: dict[tuple[Any, ...], Group] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: run.result.finished, reverse=True):
        group = groups.setdefault(identity(run.result.settings), Group(run.result.settings))
        for model in run.result.networks:
            counted = group.runs.setdefault((run.result.setting, model, run.seed), run)
            if counted is not run:
                where = f"{model} network of {run.result.setting}, seed {run.seed}"
                duplicates.append(Rejected(run.path, "duplicate", f"{where}: {counted.path} counts in its place"))
    # Real data first, then what is nearest to the paper's experiment, then what has most runs.
    order = sorted(groups.values(), key=lambda one: (one.drawn, len(one.differences), -len(one.runs), one.name))
    return order, duplicates
