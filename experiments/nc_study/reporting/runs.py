"""Runs found under folders: the finished ones in groups that may be compared, the others with a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..config import MODELS, Experiment, Setting, StudyError, flag_of, preset_values
from ..paper import differences
from ..record import NetworkResult, RunResult
from ..rundir import RunDirectory

# What may differ between runs that are averaged or compared: the setting, the seed, and how it was computed.
NOT_OF_THE_EXPERIMENT = frozenset(
    ("study", "model", "majority", "ratio", "seed", "metrics_every", "kernel", "compile", "device")
)
USUAL = {spec.name: spec.default for spec in fields(Experiment) if spec.default is not MISSING}


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its result."""

    path: Path
    result: RunResult


@dataclass(frozen=True)
class Rejected:
    """A folder that gives no row to a table: "unfinished", "duplicate", ... and why or how far it got."""

    folder: Path
    state: str
    reason: str


@dataclass
class Group:
    """Runs of one experiment, by seed of each setting and network; `experiment` is that of one of them."""

    experiment: Experiment
    runs: dict[tuple[Setting, str], dict[int, Run]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The preset, the data, the solver, the gradient, and every option in which it departs from the preset."""
        one = self.experiment
        usual = {**USUAL, **preset_values(one.preset, one.classes), "precision": "fp32"}
        named = ("preset", "dataset", "solver", "adjoint")
        apart = [(name, value) for name, value in identity(one) if name not in named and value != usual.get(name)]
        parts = [f"{one.preset} preset on {one.dataset}", one.solver, one.adjoint]
        return ", ".join([*parts, *(f"{flag_of(name)[2:]} {value}" for name, value in apart)])

    @property
    def drawn(self) -> bool:
        """Whether the images are drawn, so that nothing can be compared with the paper."""
        return self.experiment.dataset.startswith("shapes")

    @property
    def differences(self) -> list[str]:
        """Ways in which these runs are not the paper's experiment."""
        return differences(self.experiment)

    @property
    def settings(self) -> list[Setting]:
        """Settings that were run: balanced first, then by K_A and R."""
        return sorted({setting for setting, _ in self.runs}, key=lambda one: (one.majority or 0, one.ratio or 0))

    @property
    def finished(self) -> list[Run]:
        """Each run once, by folder."""
        found = {run.path: run for seeds in self.runs.values() for run in seeds.values()}
        return [found[path] for path in sorted(found)]

    def networks(self, setting: Setting, model: str) -> dict[int, NetworkResult]:
        """Return what a network came to in a setting under each seed."""
        seeds = self.runs.get((setting, model), {})
        return {seed: seeds[seed].result.networks[model] for seed in sorted(seeds)}

    def pairs(self, setting: Setting) -> list[tuple[NetworkResult, NetworkResult]]:
        """Return what the explicit network and the DEQ came to under each seed that both have."""
        explicit, deq = (self.networks(setting, model) for model in MODELS)
        return [(explicit[seed], deq[seed]) for seed in explicit if seed in deq]


def identity(experiment: Experiment) -> tuple[tuple[str, Any], ...]:
    """Return all that two runs must share to be averaged."""
    return tuple((name, one) for name, one in asdict(experiment).items() if name not in NOT_OF_THE_EXPERIMENT)


@dataclass(frozen=True)
class Collection:
    """All that was found: groups in the paper's order, and what could not be used."""

    groups: list[Group]
    rejected: list[Rejected]


def collect(roots: Sequence[Path]) -> Collection:
    """Search folders and those below for runs; StudyError where a folder is missing or there are no runs."""
    for root in roots:
        if not root.is_dir():
            raise StudyError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
    finished: list[Run] = []
    rejected: list[Rejected] = []
    folders = {path.resolve(): path for root in roots for path in (root, *root.rglob("*/"))}
    for path in sorted(folders.values()):
        folder = RunDirectory(path)
        try:
            if folder.finished:
                finished.append(Run(path, folder.result))
            elif begun := folder.begun:
                done = (f"{model}: {len(folder.epochs(model))} of {begun.epochs} epochs" for model in begun.models)
                rejected.append(Rejected(path, "unfinished", ", ".join(done)))
        except StudyError as error:
            rejected.append(Rejected(path, "unreadable", str(error)))
    if not (finished or rejected):
        raise StudyError(f"no runs under {', '.join(map(str, roots))}")
    groups, duplicates = _group(finished)
    return Collection(groups, sorted(rejected + duplicates, key=lambda entry: entry.folder))


def _group(runs: list[Run]) -> tuple[list[Group], list[Rejected]]:
    """Sort runs by experiment; of two of a setting, network and seed the one finished last counts."""
    groups: dict[tuple[Any, ...], Group] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: run.result.finished, reverse=True):
        result = run.result
        group = groups.setdefault(identity(result.settings), Group(result.settings))
        for model in result.networks:
            seeds = group.runs.setdefault((result.setting, model), {})
            counted = seeds.setdefault(result.settings.seed, run)
            if counted is not run:
                where = f"{model} network of {result.setting}, seed {result.settings.seed}"
                duplicates.append(Rejected(run.path, "duplicate", f"{where}: {counted.path} counts in its place"))
    # Real data first, then what is nearest to the paper's experiment, then what has most runs.
    ordered = sorted(groups.values(), key=lambda one: (one.drawn, len(one.differences), -len(one.finished), one.name))
    return ordered, duplicates
