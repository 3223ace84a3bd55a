"""Runs found under folders: the finished ones in groups that may be compared, the others with a reason."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from ..cells import Cell
from ..config import MODELS, PRESETS, Settings, StudyError, completed, flag_of
from ..results import COLLAPSE, FORMAT, GROUPS, SOLVER_MEANS
from ..rundir import Row, RunDirectory, read_json

# What may differ between runs that are averaged or compared: the cell, the seed, and how and where it was computed. An
# earlier setting, amp, is told by the precision.
NOT_OF_THE_EXPERIMENT = frozenset(
    ("study", "model", "majority", "ratio", "seed", "metrics_every")
    + ("kernel", "compile", "device", "threads", "out", "data_root", "resume", "amp")
)
NAMES = {"broyden": "Broyden", "anderson": "Anderson", "picard": "Picard", "jfb": "JFB"}
PLAIN = "fp32"  # the precision that goes without saying, whatever `auto` came to on a machine
DEFAULTS = {spec.name: spec.default for spec in fields(Settings) if spec.default is not MISSING} | {"precision": PLAIN}

_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_SOLVER = {**{name: _NUMBER for name in SOLVER_MEANS}, "skipped": _NUMBER, "per_class": dict}
_SCHEMA: dict[str, Any] = {
    "data": str,
    "preset": str,
    "train_images_per_class": list,
    "majority_classes": int,
    "kernel": {"used": str},
    "models": dict,
    "differences_from_paper": list,
    "settings": {"dataset": str, "preset": str, "solver": str, "adjoint": str, "seed": int, "epochs": int},
    "machine": {"cpu": str, "threads": int},
    "versions": dict,
    "finished": str,
}
_MODEL_SCHEMA: dict[str, Any] = {
    "accuracy": {"overall": {"mean": _NUMBER, "std": _NUMBER}},
    "epochs_averaged": int,
    "confusion": list,
    "nc": {name: _MAYBE for name in COLLAPSE},
    "seconds": {"train": _NUMBER, "test": _NUMBER, "metrics": _NUMBER},
    "curves": {"epoch": list, "nc": {"epoch": list}},
}


@dataclass(frozen=True)
class Run:
    """A finished run: its folder and its result."""

    path: Path
    result: Row

    @property
    def settings(self) -> Row:
        """What decided its outcome."""
        return self.result["settings"]

    @property
    def seed(self) -> int:
        """Of weights, batches and augmentation."""
        return self.settings["seed"]

    @property
    def cell(self) -> Cell:
        """Data set and imbalance."""
        return Cell(self.result["data"], self.settings["majority"], self.settings["ratio"])

    @property
    def identity(self) -> tuple[tuple[str, Any], ...]:
        """All that two runs must share to be averaged; a setting that an older result does not name has its default."""
        known = {**DEFAULTS, **completed(self.settings), "dataset": self.result["data"]}
        return tuple(sorted((name, known[name]) for name in known if name not in NOT_OF_THE_EXPERIMENT))


@dataclass(frozen=True)
class Rejected:
    """A folder that gives no row to a table: "failed", "unfinished", "duplicate", ... and why or how far it got."""

    path: Path
    state: str
    reason: str


@dataclass
class Group:
    """Runs of one experiment, which differ in cell, network and seed alone."""

    identity: tuple[tuple[str, Any], ...]
    runs: dict[tuple[Cell, str, int], Run] = field(default_factory=dict)

    @cached_property
    def name(self) -> str:
        """The preset, the data, the solver, the gradient, and every setting in which it departs from the preset."""
        settings = dict(self.identity)
        usual = {**DEFAULTS, **PRESETS.get(settings["preset"], {}), "precision": PLAIN}
        parts = [f"{settings['preset']} preset on {settings['dataset']}"]
        parts += [NAMES.get(settings[name], settings[name]) for name in ("solver", "adjoint")]
        for name, value in settings.items():
            wanted = usual.get(name)
            wanted = wanted.get(self.classes) if isinstance(wanted, dict) else wanted
            if name not in ("preset", "dataset", "solver", "adjoint") and value != wanted:
                parts.append(f"{flag_of(name)[2:]} {'off' if value is None else value}")
        return ", ".join(parts)

    @property
    def dataset(self) -> str:
        """Name of the data."""
        return dict(self.identity)["dataset"]

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(next(iter(self.runs.values())).result["train_images_per_class"])

    @property
    def cells(self) -> list[Cell]:
        """What was run: balanced first, then by K_A and R."""
        return sorted({cell for cell, _, _ in self.runs}, key=lambda cell: (cell.majority or 0, cell.ratio or 0))

    @property
    def finished_runs(self) -> list[Run]:
        """Each run once."""
        return list({run.path: run for run in self.runs.values()}.values())

    @property
    def differences(self) -> list[str]:
        """In what these runs are not the paper's experiment."""
        return list(dict.fromkeys(text for run in self.finished_runs for text in run.result["differences_from_paper"]))

    def seeds(self, cell: Cell, model: str) -> dict[int, Run]:
        """The runs of a network in a cell, by seed."""
        found = {seed: run for (where, which, seed), run in self.runs.items() if (where, which) == (cell, model)}
        return dict(sorted(found.items()))

    def pairs(self, cell: Cell) -> dict[int, tuple[Row, Row]]:
        """What the explicit network and the DEQ came to under the same seed, by seed."""
        explicit, deq = (self.seeds(cell, model) for model in MODELS)
        return {
            seed: (explicit[seed].result["models"][MODELS[0]], deq[seed].result["models"][MODELS[1]])
            for seed in explicit
            if seed in deq
        }


@dataclass(frozen=True)
class Collection:
    """All that was found: groups in the paper's order, what could not be used, and results of the theory."""

    groups: list[Group]
    rejected: list[Rejected]
    theory: list[tuple[Path, Row]]


def collect(folders: Iterable[Path]) -> Collection:
    """Search folders and those below for runs; no such folder, or none that holds a run, is an error."""
    finished: list[Run] = []
    rejected: list[Rejected] = []
    theory: list[tuple[Path, Row]] = []
    for path in _folders(list(folders)):
        if (path / "layer_peeled.json").exists():
            _add_theory(path / "layer_peeled.json", theory, rejected)
        try:
            found = _read_run(path)
        except StudyError as error:
            found = Rejected(path, "unreadable", str(error))
        if isinstance(found, Run):
            finished.append(found)
        elif found:
            rejected.append(found)
    groups, duplicates = _group(finished)
    return Collection(groups, sorted(rejected + duplicates, key=lambda entry: str(entry.path)), theory)


def _folders(roots: list[Path]) -> Iterator[Path]:
    """Every folder under the roots, once, in the order of their names."""
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


def _read_run(path: Path) -> Run | Rejected | None:
    """What a folder holds; None if it is not the folder of a run."""
    if (path / "result.json").exists():
        return _finished(path, read_json(path / "result.json"))
    if (path / "failed.json").exists():
        failure = read_json(path / "failed.json")
        return Rejected(path, "failed", str(failure.get("error") if isinstance(failure, dict) else failure))
    if (path / "settings.json").exists():
        return Rejected(path, "unfinished", _progress(path))
    return None


def _finished(path: Path, result: Any) -> Run | Rejected:
    """A result of this format, whose every part that the report takes is there."""
    version = result.get("format", 0) if isinstance(result, dict) else None
    if not isinstance(version, int):
        return Rejected(path, "unreadable", f"{path / 'result.json'} is not the result of a run")
    if version != FORMAT:
        age = "an older" if version < FORMAT else "a newer"
        return Rejected(path, f"written by {age} version", f"format {version or 1} of result.json, not {FORMAT}")
    try:
        _conforms(result, _SCHEMA, "")
        _conforms(result["settings"], {"majority": (int, type(None)), "ratio": (int, type(None))}, "settings")
        if not result["models"] or not set(result["models"]) <= set(MODELS):
            raise ValueError(f"models: {', '.join(result['models']) or 'none'}")
        for model, summary in result["models"].items():
            _check_model(summary, f"models.{model}", len(result["train_images_per_class"]))
    except ValueError as error:
        return Rejected(path, "unreadable", f"{path / 'result.json'}: {error}")
    return Run(path, result)


def _check_model(summary: Any, where: str, classes: int) -> None:
    _conforms(summary, _MODEL_SCHEMA, where)
    curves = summary["curves"]
    epochs, measured = len(curves["epoch"]), len(curves["nc"]["epoch"])
    _columns(curves, ("epoch", *GROUPS), epochs, f"{where}.curves")
    _columns(curves["nc"], ("epoch", *COLLAPSE), measured, f"{where}.curves.nc")
    if len(summary["confusion"]) != classes:
        raise ValueError(f"{where}.confusion: not {classes} rows")
    _columns(dict(enumerate(summary["confusion"])), range(classes), classes, f"{where}.confusion")
    for group in GROUPS[1:]:
        if summary["accuracy"].get(group) is not None:
            _conforms(summary["accuracy"][group], {"mean": _NUMBER, "std": _NUMBER}, f"{where}.accuracy.{group}")
    if summary.get("solver") is not None:
        _conforms(summary["solver"], _SOLVER, f"{where}.solver")
        _columns(summary["solver"]["per_class"], ("iterations",), classes, f"{where}.solver.per_class")
        course = curves.get("solver")
        _columns(course, SOLVER_MEANS, epochs, f"{where}.curves.solver")
        for group in GROUPS[1:]:
            _columns(course.get(group), SOLVER_MEANS, epochs, f"{where}.curves.solver.{group}")
    if summary.get("spectral_radius") is not None:
        labels = summary["spectral_radius"].get("labels") if isinstance(summary["spectral_radius"], dict) else None
        _columns(summary["spectral_radius"], ("labels", "values"), len(labels or ()), f"{where}.spectral_radius")


def _columns(value: Any, names: Iterable[Any], length: int, where: str) -> None:
    """ValueError unless `value` holds, under each name, that many numbers (None where there is none)."""
    for name in names:
        column = value.get(name) if isinstance(value, dict) else None
        if not isinstance(column, list) or not length or len(column) != length or not all(map(_is_number, column)):
            raise ValueError(f"{where}.{name}: not {length or 'any'} numbers")


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, _NUMBER) and math.isfinite(value))


def _conforms(value: Any, schema: Any, where: str) -> None:
    """ValueError that names the first part that is missing or of another type."""
    if not isinstance(schema, dict):
        if not isinstance(value, schema) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{where} is {'missing' if value is None else repr(value)[:40]}")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the whole'} is {'missing' if value is None else repr(value)[:40]}")
    for name, part in schema.items():
        _conforms(value.get(name), part, f"{where}.{name}".lstrip("."))


def _progress(path: Path) -> str:
    """How many epochs of how many a run without result has behind it."""
    settings = read_json(path / "settings.json")
    if not isinstance(settings, dict) or not isinstance(settings.get("epochs"), int):
        raise StudyError(f"{path / 'settings.json'} does not hold the settings of a run")
    models = MODELS if settings.get("model") == "both" else (settings.get("model"),)
    run = RunDirectory(path)
    return ", ".join(f"{model}: {len(run.rows(str(model)))} of {settings['epochs']} epochs" for model in models)


def _add_theory(path: Path, theory: list[tuple[Path, Row]], rejected: list[Rejected]) -> None:
    wanted = {name: str for name in ("claim", "source", "verdict", "text")}
    try:
        content = read_json(path)
        _conforms(content, {"claims": list}, "")
        for number, claim in enumerate(content["claims"]):
            _conforms(claim, wanted, f"claims[{number}]")
        theory.append((path, content))
    except (StudyError, ValueError) as error:
        rejected.append(Rejected(path, "unreadable", f"{path}: {error}"))


def _group(runs: list[Run]) -> tuple[list[Group], list[Rejected]]:
    """Runs by experiment. Of two of one cell, network and seed the one finished last counts, the other is named."""
    groups: dict[tuple[tuple[str, Any], ...], Group] = {}
    duplicates = []
    for run in sorted(runs, key=lambda run: run.result["finished"], reverse=True):
        group = groups.setdefault(run.identity, Group(run.identity))
        for model in run.result["models"]:
            counted = group.runs.setdefault((run.cell, model, run.seed), run)
            if counted is not run:
                where = f"{model} network of {run.cell}, seed {run.seed}"
                duplicates.append(Rejected(run.path, "duplicate", f"{where}: {counted.path} counts in its place"))
    return sorted(groups.values(), key=_nearness), duplicates


def _nearness(group: Group) -> tuple[Any, ...]:
    """Real data first, then what is nearest to the paper's setting, then what has most runs."""
    return (group.dataset.startswith("shapes"), len(group.differences), -len(group.runs), group.name)
