"""The committed JSON: records of rows, training steps of the study, baselines of the gate."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = {"ratio": "floor_x", "waits": "host_waits"}  # columns of gpu.sh -> those of the record
PEER = "torchdeq"  # whose time a `gain` is told against where the row names no other
GAIN = "gain over "  # start of the columns of gains, which a peer's name completes
# What the runs of a case have each for themselves; gains too.
MEASURED = {
    "ms", "ms_min", "f_ms", "solver_ms", "floor_ms", "floor_x", "evaluations", "residual", "error", "allowed",
    "peak_bytes", "launches", "host_waits", "rounds", "copy_gb_per_s", "floor_iteration_ms", "file",
}  # fmt: skip


class ReportError(Exception):
    """What keeps the page from being written, for a person to read."""


@dataclass(frozen=True)
class File:
    """One file of results. rows: as ``completed``; raw: as recorded; runs: those of training_step.py."""

    path: Path
    machine: dict[str, Any]
    command: str | None = None
    date: str | None = None
    remark: str | None = None
    rows: list[Row] = field(default_factory=list)
    runs: list[Row] = field(default_factory=list)
    stages: list[Row] = field(default_factory=list)
    raw: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.name

    def repeats(self) -> list[list[Row]]:
        """The rows as they were recorded, those of one run of the suite together where a file has several."""
        found: list[list[Row]] = []
        seen: Counter[tuple[str, ...]] = Counter()
        for row in self.raw:
            key = (row["section"], row["case"], row["provider"], str(row.get("threads")))
            if seen[key] == len(found):
                found.append([])
            found[seen[key]].append(row)
            seen[key] += 1
        return found

    @property
    def gpu(self) -> str | None:
        return self.machine.get("gpu")


@dataclass(frozen=True)
class Results:
    """Everything that the page is made from."""

    folder: Path
    files: list[File]
    baselines: list[File]

    def rows(self, *sections: str) -> Iterator[Row]:
        """Rows of CPUs; `file` names the one that each is from."""
        for file in self.files:
            if file.gpu is None:
                yield from (row for row in file.rows if row["section"] in sections)

    def files_of(self, rows: Iterable[Row]) -> list[File]:
        """Where the rows are from."""
        names = {name for row in rows for name in each(row["file"])}
        return [file for file in self.files if file.name in names]

    def runs(self) -> list[tuple[File, Row]]:
        return [(file, run) for file in self.files for run in file.runs]

    @property
    def gpus(self) -> list[File]:
        return [file for file in self.files if file.gpu is not None]


def read(results: Path, baselines: Path) -> Results:
    """All JSON of the two folders, in the order of the names."""
    files, gates = ([read_file(path) for path in sorted(folder.glob("*.json"))] for folder in (results, baselines))
    return Results(results, files, gates)


def load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ReportError(f"{path}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ReportError(f"{path}: holds a {type(data).__name__}, an object is allowed")
    return data


def read_file(path: Path) -> File:
    data = load(path)
    if not isinstance(data.get("machine"), dict) or not {"rows", "runs"} & data.keys():
        raise ReportError(f"{path}: has the keys {', '.join(data)}; needed are machine, and rows or runs")
    if data.get("dry_run"):
        raise ReportError(f"{path}: a dry run is no result")
    given, runs = data.get("rows", []), data.get("runs", [])
    for index, row in enumerate(given):
        missing = [key for key in ("section", "case", "provider") if key not in row]
        if missing:
            raise ReportError(f"{path}: row {index} has no {', '.join(missing)}")
    machine = {**data["machine"]}
    if runs and "processor" not in machine:
        machine["processor"] = runs[0].get("processor")
    texts = {key: data.get(key) for key in ("command", "date", "remark")}
    rows = [{"threads": machine.get("threads"), "file": path.name, **completed(row)} for row in given]
    return File(path, machine, **texts, rows=rows, raw=given, runs=runs, stages=data.get("stages", []))


def completed(row: Row) -> Row:
    """With the byte floor of one iteration where the solver's time is told so, the number of rounds in their place, and
    each gain in a column of its own."""
    gains = row.get("gains") or ({row.get("peer", PEER): row["gain"]} if "gain" in row else {})
    more: Row = {f"{GAIN}{peer}": gain for peer, gain in gains.items()}
    if {"solver_ms", "floor_ms", "evaluations"} <= row.keys():
        more["floor_iteration_ms"] = row["floor_ms"] / row["evaluations"]
    if "rounds" in row:
        more["rounds"] = len(row["rounds"])
    return {NAMES.get(key, key): value for key, value in row.items() if key not in ("gain", "gains")} | more


def combine(group: list[Row]) -> Row:
    """One row for the runs of the same, with lists of what each of several has measured."""
    if len(group) == 1:
        return group[0]
    whole = {key: value for row in group for key, value in row.items()}
    listed = {key: [row[key] for row in group if row.get(key) is not None] for key in whole if measured(key)}
    return whole | listed


def measured(key: str) -> bool:
    return key in MEASURED or key.startswith(GAIN)


def each(value: Any) -> list[Any]:
    """What the runs have measured, be it one."""
    return value if isinstance(value, list) else [value]
