"""Runs found under folders: the finished ones in groups that may be compared, the others with a reason."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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

Identity = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its result."""

    path: Path
    result: RunResult

    @property
    def seed(self) -> int:
        """Seed of weights, batches and augmentation."""
        return self.result.settings.seed

    @property
    def identity(self) -> Identity:
        """All that two runs must share to be averaged."""
        known = asdict(self.result.settings)
        return tuple(sorted((name, value) for name, value in known.items() if name not in NOT_OF_THE_EXPERIMENT))


@dataclass(frozen=True)
class Rejected:
    """A folder that gives no row to a table: "failed", "unfinished", "duplicate", ... and why or how far it got."""

    path: Path
    state: str
    reason: str


@dataclass
class Group:
    """Runs of one experiment, which differ in setting, network and seed alone."""

    identity: Identity
    runs: dict[tuple[Setting, str, int], Run] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """The preset, the data, the solver, the gradient, and every option in which it departs from the preset."""
        known = dict(self.identity)
        usual = {**DEFAULTS, **PRESETS.get(known["preset"], {}), "precision": PLAIN}
        parts = [f"{known['preset']} preset on {self.dataset}"]
        parts += [NAMES.get(known[name], known[name]) for name in ("solver", "adjoint")]
        for name, value in known.items():
            wanted = usual.get(name)
            wanted = wanted.get(self.classes) if isinstance(wanted, dict) else wanted
            if name not in ("preset", "dataset", "solver", "adjoint") and value != wanted:
                parts.append(f"{flag_of(name)[2:]} {'off' if value is None else value}")
        return ", ".join(parts)

    @property
    def preset(self) -> str:
        """Preset that filled in what was not given."""
        return str(dict(self.identity)["preset"])

    @property
    def dataset(self) -> str:
        """Name of the data."""
        return str(dict(self.identity)["dataset"])

    @property
    def classes(self) -> int:
        """Number of classes."""
        return CLASSES[self.dataset]

    @property
    def drawn(self) -> bool:
        """Whether the images are drawn, so that nothing can be compared with the paper."""
        return self.dataset.startswith("shapes")

    @property
    def settings(self) -> list[Setting]:
        """Settings that were run: balanced first, then by K_A and R."""
        return sorted({setting for setting, _, _ in self.runs}, key=lambda one: (one.majority or 0, one.ratio or 0))

    @property
    def finished(self) -> list[Run]:
        """Each run once, by folder."""
        return [run for _, run in sorted({str(run.path): run for run in self.runs.values()}.items())]

    @property
    def differences(self) -> list[str]:
        """Ways in which these runs are not the paper's experiment."""
        return list(dict.fromkeys(text for run in self.finished for text in differences(run.result.settings)))

    def majority(self, setting: Setting) -> int:
        """Count the classes of the majority, all of them where they are balanced."""
        return self.classes if setting.majority is None else setting.majority * self.classes // 10

    def seeds(self, setting: Setting, model: str) -> dict[int, Run]:
        """Return the runs of a network in a setting, by seed."""
        found = {seed: run for (where, which, seed), run in self.runs.items() if (where, which) == (setting, model)}
        return dict(sorted(found.items()))

    def networks(self, setting: Setting, model: str) -> list[NetworkResult]:
        """Return what a network came to in a setting under each seed."""
        return [run.result.networks[model] for run in self.seeds(setting, model).values()]

    def pairs(self, setting: Setting) -> dict[int, tuple[NetworkResult, NetworkResult]]:
        """Return what the explicit network and the DEQ came to under the same seed, by seed."""
        explicit, deq = (self.seeds(setting, model) for model in MODELS)
        return {
            seed: (run.result.networks[MODELS[0]], deq[seed].result.networks[MODELS[1]])
            for seed, run in explicit.items()
            if seed in deq
        }


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


def collect(folders: Iterable[Path]) -> Collection:
    """Search folders and those below for runs and theory; StudyError for a folder that cannot be listed."""
    finished: list[Run] = []
    rejected: list[Rejected] = []
    theory: dict[Path, Theory] = {}
    for path in _folders(folders):
        try:
            if (path / "layer_peeled.json").exists():
                theory[path / "layer_peeled.json"] = read_record(Theory, path / "layer_peeled.json")
            found = _read_run(RunDirectory(path))
        except StudyError as error:
            state = "written by another version" if isinstance(error, OtherFormat) else "unreadable"
            found = Rejected(path, state, str(error))
        if isinstance(found, Run):
            finished.append(found)
        elif found:
            rejected.append(found)
    groups, duplicates = _group(finished)
    return Collection(groups, sorted(rejected + duplicates, key=lambda entry: str(entry.path)), theory)


def _folders(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield every folder under the roots, once, in the order of their names."""
    seen = set()
    for root in roots:
        if not root.is_dir():
            raise StudyError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
        for name, below, _ in os.walk(root, onerror=_cannot_list):
            below.sort()
            path = Path(name)
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def _cannot_list(error: OSError) -> None:
    raise StudyError(f"{error.filename}: cannot be listed ({error.strerror})") from error


def _read_run(folder: RunDirectory) -> Run | Rejected | None:
    """Read what a folder holds; None if it is not the folder of a run."""
    if folder.finished:
        return Run(folder.path, folder.result)
    if failure := folder.failure:
        return Rejected(folder.path, "failed", failure.error)
    if begun := folder.begun:
        done = (f"{model}: {len(folder.epochs(model))} of {begun.epochs} epochs" for model in begun.models)
        return Rejected(folder.path, "unfinished", ", ".join(done))
    return None


def _group(runs: list[Run]) -> tuple[list[Group], list[Rejected]]:
    """Sort runs by experiment; of two of a setting, network and seed the one finished last counts."""
    groups: dict[Identity, Group] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: run.result.finished, reverse=True):
        group = groups.setdefault(run.identity, Group(run.identity))
        for model in run.result.networks:
            counted = group.runs.setdefault((run.result.setting, model, run.seed), run)
            if counted is not run:
                where = f"{model} network of {run.result.setting}, seed {run.seed}"
                duplicates.append(Rejected(run.path, "duplicate", f"{where}: {counted.path} counts in its place"))
    return sorted(groups.values(), key=_nearness), duplicates


def _nearness(group: Group) -> tuple[Any, ...]:
    """Order real data first, then what is nearest to the paper's experiment, then what has most runs."""
    return (group.drawn, len(group.differences), -len(group.runs), group.name)
