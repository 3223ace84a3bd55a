"""The frame of the experiments: units of work with a record each, done in several processes and resumed."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from matplotlib.figure import Figure
from nc_study.config import StudyError
from nc_study.record import Machine, to_json
from nc_study.results import provenance
from nc_study.rundir import write_atomically
from tqdm import tqdm

from .claims import Claim

FORMAT = 1  # rises when what a unit writes changes a name or a meaning
EXACT, DERIVED, RECONSTRUCTION = "exact", "derived", "reconstruction"
SOURCES = {
    EXACT: "as printed by the authors",
    DERIVED: "follows from what is printed, and is checked here numerically",
    RECONSTRUCTION: "a best guess where the paper's text was not to be had",
}

Row = dict[str, object]  # of a table: column -> value
Rows = list[Row]


class Unit(NamedTuple):
    """What is measured and recorded at once: a task of an experiment with one seed, for all networks."""

    task: str
    seed: int

    def __str__(self) -> str:
        return f"{self.task}-seed{self.seed}"


@dataclass(frozen=True)
class Record:
    """The file of a finished unit. `sizes` and `result` have the types that the experiment names."""

    format: int
    experiment: str
    unit: Unit
    sizes: Any
    result: Any
    machine: Machine
    versions: dict[str, str | None]
    commit: str | None
    finished: str


@dataclass(frozen=True)
class Table:
    """A table of a report; `source` is one of SOURCES and says what its task is."""

    title: str
    source: str
    rows: Rows
    text: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure of a report, in the file `name`.png; `source` as of a table."""

    name: str
    title: str
    source: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """What an experiment comes to."""

    text: str
    claims: list[Claim]
    tables: list[Table]
    pictures: list[Picture]


@dataclass(frozen=True)
class Experiment:
    """An experiment: its sizes by preset, its units, how one is measured, and what the results come to; `files` makes
    of a result what is to lie beside its record, by the ends of the names."""

    name: str
    title: str
    sizes: Mapping[str, Any]
    result: type
    units: Callable[[Any], list[Unit]]
    measure: Callable[[Any, Unit], Any]
    section: Callable[[Any, dict[Unit, Any]], Section]
    files: Callable[[Any], Mapping[str, bytes]] | None = None


def path_of(folder: Path, experiment: Experiment, unit: Unit) -> Path:
    """Return the place of a unit's record below the folder of its preset."""
    return folder / experiment.name / f"{unit}.json"


def load(path: Path, experiment: Experiment, sizes: Any) -> Record:
    """Read a unit's record; StudyError if it is damaged, or of other sizes or another version of this project."""
    try:
        content = msgspec.json.decode(path.read_bytes())
        if (content.get("format"), content.get("sizes")) != (FORMAT, msgspec.json.decode(to_json(sizes))):
            raise StudyError(f"{path} was measured with other sizes or by another version: take another --out")
        content["result"] = msgspec.convert(content["result"], experiment.result)
        return msgspec.convert(content, Record)
    except (OSError, ValueError, AttributeError) as error:
        raise StudyError(f"{path} cannot be read ({error}): remove it to measure the unit again") from error


def of_records(folder: Path, preset: str, experiment: Experiment) -> Experiment:
    """Make the experiment on the units whose records are below a folder, with their sizes; as it is where none is."""
    found = []
    for path in sorted((folder / experiment.name).glob("*-seed*.json")):
        try:
            content = msgspec.json.decode(path.read_bytes())
            found.append((Unit(*content["unit"]), content["sizes"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise StudyError(f"{path} cannot be read ({error}): remove it to measure the unit again") from error
    if not found:
        return experiment
    sizes = msgspec.convert(found[0][1], type(experiment.sizes[preset]))
    units, usual = [unit for unit, _ in found], experiment.units(sizes)
    return replace(experiment, sizes={preset: sizes}, units=lambda _: usual if {*units} <= {*usual} else units)


def measure(folder: Path, job: tuple[Experiment, str, Unit]) -> Unit:
    """Measure a unit and write its record; the unit."""
    experiment, preset, unit = job
    torch.set_num_threads(1)
    sizes = experiment.sizes[preset]
    result = experiment.measure(sizes, unit)
    record = Record(FORMAT, experiment.name, unit, sizes, result, **provenance(1, "cpu"))
    path = path_of(folder, experiment, unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, content in (experiment.files(result) if experiment.files else {}).items():
        write_atomically(path.with_name(f"{unit}-{name}"), content)
    write_atomically(path, to_json(record))
    return unit


def run(experiments: Iterable[Experiment], preset: str, folder: Path, jobs: int) -> None:
    """Measure the units that have no record yet, `jobs` at a time; those that have one must be readable."""
    waiting = []
    for experiment in experiments:
        sizes = experiment.sizes[preset]
        for unit in experiment.units(sizes):
            if (path := path_of(folder, experiment, unit)).exists():
                load(path, experiment, sizes)
            else:
                waiting.append((experiment, preset, unit))
    ignored = signal.SIGINT, signal.SIG_IGN  # an interrupt is the parent's
    pool = multiprocessing.get_context("spawn").Pool(jobs, signal.signal, ignored) if jobs > 1 and waiting else None
    with tqdm(total=len(waiting), desc="units", unit="unit") as bar, pool or nullcontext():
        for unit in (pool.imap_unordered if pool else map)(partial(measure, folder), waiting):
            bar.set_postfix_str(str(unit))
            bar.update()
