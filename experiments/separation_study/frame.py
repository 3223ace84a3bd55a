"""Frame of the experiments: units of work with a record each, done in several processes and resumed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from matplotlib.figure import Figure
from runs.files import Unreadable, check_same, read_record, reading, to_json, write_atomically
from runs.processes import Run
from runs.provenance import Recorded, provenance

from .claims import Claim

FORMAT = 1  # rises when what a unit writes changes a name or a meaning
REMEDY = "remove it to measure the unit again"
EXACT, DERIVED, RECONSTRUCTION = "exact", "derived", "reconstruction"
SOURCES = {
    EXACT: "as printed by the authors",
    DERIVED: "follows from what is printed, and is checked here numerically",
    RECONSTRUCTION: "a best guess, because the paper's text was not available",
}

R = TypeVar("R")
Row = dict[str, object]  # of a table: column -> value


class Unit(NamedTuple):
    """Unit of measurement: a task of an experiment with one seed, for all networks."""

    task: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}-seed{self.seed}"


@dataclass(frozen=True)
class Record(Recorded, Generic[R]):
    """File of a finished unit. The experiment names the types of `sizes` and `result`. Read from a file, `sizes` has
    the types of JSON."""

    format: int
    experiment: str
    unit: Unit
    sizes: Any
    result: R


@dataclass(frozen=True)
class Table:
    """Table of a report; `source` is one of SOURCES and describes its task."""

    title: str
    source: str
    rows: list[Row]
    text: str = ""


@dataclass(frozen=True)
class Picture:
    """Figure of a report, in the file `name`.png; `source` as in a table."""

    name: str
    title: str
    source: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """Section of a report: the outcome of an experiment. Each of the `notes` is an item of a list."""

    notes: Sequence[str]
    claims: list[Claim]
    tables: list[Table]
    pictures: list[Picture]


@dataclass(frozen=True)
class Experiment:
    """Experiment: its sizes by preset, its units, the measurement of a unit, and the section from all results. `files`
    makes further files from a result, by the ends of their names."""

    name: str
    title: str
    sizes: Mapping[str, Any]
    result: type
    units: Callable[[Any], list[Unit]]
    measure: Callable[[Any, Unit], Any]
    section: Callable[[Any, dict[Unit, Any]], Section]
    files: Callable[[Any], Mapping[str, bytes]] | None = None


def experiment(name: str, title: str, quick: Any, full: Any, long: Any = None, **given: Any) -> Experiment:
    """Make the experiment of a module of this package: its `Result`, `tasks` or `units`, `measure` and `section`. Only
    an experiment with sizes of preset `long` takes part in it."""
    module: Any = sys.modules[name]
    presets = {"quick": quick, "full": full} | ({"long": long} if long else {})
    units = getattr(module, "units", None) or partial(seeded, module.tasks)
    parts = (presets, module.Result, units, module.measure, module.section)
    return Experiment(name.rpartition(".")[2], title, *parts, **given)


def seeded(tasks: Callable[[Any], Sequence[str]], sizes: Any) -> list[Unit]:
    """Return a unit for each task and seed."""
    return [Unit(task, seed) for task in tasks(sizes) for seed in range(sizes.seeds)]


def notes(name: str, **values: object) -> list[str]:
    """Read the items of a section of notes.md, and fill in values."""
    text = Path(__file__).with_name("notes.md").read_text(encoding="utf-8")
    section = text.partition(f"# {name}\n")[2].partition("\n# ")[0]
    return [" ".join(item.split()) for item in re.split(r"(?m)^- ", section.format(**values)) if item.strip()]


class Job(Run):
    """Unit of an experiment with a preset; its record is below the preset's folder."""

    def __init__(self, folder: Path, experiment: Experiment, preset: str, unit: Unit) -> None:
        super().__init__(folder / experiment.name / f"{unit}.json")
        self.experiment, self.sizes, self.unit = experiment, experiment.sizes[preset], unit

    @property
    def record(self) -> Record:
        """Record of the unit. Raises StudyError if it has other sizes, Unreadable if it is damaged or of another
        version or unit."""
        kind: Any = Record[self.experiment.result]  # type: ignore[name-defined]  # known at run time only
        record = read_unit(self.path, kind)
        check_same(self.path, record.sizes, msgspec.json.decode(to_json(self.sizes)))
        return record

    def outcome(self) -> str:
        """Time of the measurement. Raises StudyError if the record cannot be read."""
        return f"measured, {self.record.finished}"

    def measure(self) -> None:
        """Measure the unit and write its record."""
        result = self.experiment.measure(self.sizes, self.unit)
        record = Record(FORMAT, self.experiment.name, self.unit, self.sizes, result, **provenance(1, "cpu"))
        for name, content in (self.experiment.files(result) if self.experiment.files else {}).items():
            write_atomically(self.path.with_name(f"{self.unit}-{name}"), content)
        write_atomically(self.path, to_json(record))


def read_unit(path: Path, kind: Any) -> Record:
    """Read the record of a unit. Raises Unreadable if it is damaged or of another version or unit."""
    record: Record = read_record(path, kind, REMEDY, FORMAT)
    with reading(path, REMEDY):
        if str(record.unit) != path.stem:
            raise ValueError(f"it is of {record.unit}")
    return record


def jobs_of(folder: Path, experiment: Experiment, preset: str) -> list[Job]:
    """Make a job of each unit of an experiment."""
    return [Job(folder, experiment, preset, unit) for unit in experiment.units(experiment.sizes[preset])]


def recorded(folder: Path, preset: str, experiment: Experiment) -> Experiment:
    """Make the experiment on the units with records below a folder, with their sizes; unchanged without records. One
    that cannot be read is named on stderr and left out."""
    records: dict[Unit, Any] = {}
    for path in sorted((folder / experiment.name).glob("*-seed*.json")):
        try:
            record = read_unit(path, Record)
            with reading(path, REMEDY):
                records[record.unit] = msgspec.convert(record.sizes, type(experiment.sizes[preset]))
        except Unreadable as error:
            print(f"left out: {error}", file=sys.stderr)
    if not records:
        return experiment
    sizes = next(iter(records.values()))
    usual = experiment.units(sizes)
    units = usual if records.keys() <= {*usual} else list(records)
    return replace(experiment, sizes={preset: sizes}, units=lambda _: units)
