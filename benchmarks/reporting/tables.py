"""Rows of the record as tables: the providers of a case side by side, or a line for each row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import GAIN, Results, Row, combine
from .words import Form, digits, duration, error, gain, optional, scientific, size, table, whole

PROVIDERS = {
    "cpp": "deqfast `cpp`",
    "torch": "deqfast `torch`",
    "triton": "deqfast `triton`",
    "cuda": "deqfast `cuda`",
    "pinv": "pseudo-inverse",
    "explicit": "the cell once",
}
# Key of a row -> how it is headed and written. The order is that of the columns.
COLUMNS: dict[str, tuple[str, Form]] = {
    "threads": ("threads", whole),
    "solver_ms": ("solver, per iteration", duration),
    "ms": ("median", duration),
    "ms_min": ("least", duration),
    "rounds": ("rounds", whole),
    "in_place_ms": ("in place", duration),
    "f_ms": ("of it f", duration),
    "floor_ms": ("byte floor", duration),
    "floor_x": ("× floor", digits),
    "evaluations": ("evaluations", whole),
    "residual": ("residual", scientific),
    "error": ("error", error),
    "peak_bytes": ("memory", size),
    "launches": ("launches", whole),
    "host_waits": ("host waits", whole),
}
# What stands beside a time: how it is headed, key, form.
F_PART: list[tuple[str, str, Form]] = [("of it f", "f_ms", duration)]
FLOORS: dict[str, list[tuple[str, str, Form]]] = {
    "ms_min": [("byte floor", "floor_ms", duration), ("× floor", "floor_x", digits)],
    "solver_ms": [("byte floor", "floor_iteration_ms", duration), ("× floor", "floor_x", digits)],
}
COUNTS = ("evaluations", "residual", "error", "peak_bytes", "launches", "host_waits")


@dataclass(frozen=True)
class Case:
    """One problem by a number of threads: provider -> row, with lists of what several runs have measured."""

    name: str
    threads: int  # 0: not recorded
    rows: dict[str, Row]

    def get(self, provider: str, key: str) -> Any:
        return self.rows.get(provider, {}).get(key)


def threads_text(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def provider_text(name: str) -> str:
    return PROVIDERS.get(name, name)


def case_text(row: Row) -> str:
    """The name, and the shape where the name does not hold it."""
    named = re.search(r"\d+x\d+", row["case"]) or not {"batch", "dim"} <= row.keys()
    return row["case"] if named else f"{row['case']}, ({row['batch']}, {row['dim']})"


def cases_of(rows: Iterable[Row]) -> list[Case]:
    """In the order in which the names come first; of one name, by the number of threads.

    Rows of the same case, provider and number of threads are runs of the same, from whichever files.
    """
    names: dict[str, dict[int, dict[str, list[Row]]]] = {}
    for row in rows:
        of_name = names.setdefault(case_text(row), {}).setdefault(row.get("threads") or 0, {})
        of_name.setdefault(row["provider"], []).append(row)
    return [
        Case(name, threads, {provider: combine(runs) for provider, runs in of[threads].items()})
        for name, of in names.items()
        for threads in sorted(of)
    ]


def rows_of(cases: Iterable[Case]) -> list[Row]:
    return [row for case in cases for row in case.rows.values()]


def cell(row: Row | None, key: str, form: Form) -> str:
    """A number of a row, of several runs the median; "" where there is none."""
    return optional((row or {}).get(key), form)


def gain_cell(row: Row | None, key: str) -> str:
    return gain((row or {}).get(key))


def comparison(cases: Sequence[Case], key: str, ours: str) -> list[str]:
    """A line for each case: our time `key` beside its byte floor and the others', and the gains over these.

    Of a whole call of which f is a part, floor and gains are the solver's alone: f's time stands in their place.
    """
    others = list(dict.fromkeys(name for case in cases for name in case.rows if name != ours))
    part_is_f = key == "ms_min" and any(case.get(ours, "f_ms") for case in cases)
    beside = F_PART if part_is_f else FLOORS[key]
    gains = [] if part_is_f else gains_of(case.rows.get(ours, {}) for case in cases)
    header = ["case", "threads", provider_text(ours), *(title for title, _, _ in beside), *map(provider_text, others),
              *map(gain_text, gains)]  # fmt: skip
    return table(header, [
        [case.name, whole(case.threads), cell(case.rows.get(ours), key, duration),
         *(cell(case.rows.get(ours), name, form) for _, name, form in beside),
         *(cell(case.rows.get(name), key, duration) for name in others),
         *(gain_cell(case.rows.get(ours), name) for name in gains)]
        for case in cases
    ])  # fmt: skip


def gains_of(rows: Iterable[Row]) -> list[str]:
    """The columns of gains that any row has."""
    return list(dict.fromkeys(key for row in rows for key in row if key.startswith(GAIN)))


def gain_text(key: str) -> str:
    return GAIN + provider_text(key.removeprefix(GAIN))


def counts(cases: Sequence[Case], providers: Sequence[str]) -> list[str]:
    """A line for each case: what was counted of the `providers`, side by side in each cell."""
    header = ["case", "threads", *(COLUMNS[key][0] for key in COUNTS)]
    body = [[case.name, whole(case.threads), *(abreast(case, providers, key) for key in COUNTS)]
            for case in cases]  # fmt: skip
    return table(header, body)


def abreast(case: Case, providers: Sequence[str], key: str) -> str:
    parts = [cell(case.rows.get(name), key, COLUMNS[key][1]) for name in providers]
    return " / ".join(part or "–" for part in parts) if any(parts) else ""


def note(row: Row) -> str:
    """Why there is no time, or what else the row says."""
    if row.get("problem"):
        return f"wrong or broken, not timed: {row['problem']}"
    if row.get("skipped"):
        return f"not run: {row['skipped']}"
    marks = {True: "met", False: "missed", None: "not told"}
    judged = [f"{target['target']}: {marks[target['met']]}" for target in row.get("targets", [])]
    return "; ".join([*judged, row["note"]] if row.get("note") else judged)


def long_table(rows: Sequence[Row]) -> list[str]:
    """A line for each row, with everything measured."""
    gains = gains_of(rows)
    header = ["case", "provider", *(title for title, _ in COLUMNS.values()), *map(gain_text, gains), "remarks", "file"]
    body = [
        [case_text(row), provider_text(row["provider"]), *(cell(row, key, form) for key, (_, form) in COLUMNS.items()),
         *(gain_cell(row, key) for key in gains), note(row), row["file"]]
        for row in rows
    ]  # fmt: skip
    return table(header, body, text=("provider", "remarks", "file"))


def folded(summary: str, lines: list[str]) -> list[str]:
    """Long tables, shown on a click."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"]


def figure_by_producer(results: Results, name: str) -> Path | None:
    """Where the figure is that a script which measured has drawn."""
    paths = (results.folder / "figures" / name, results.folder / name)
    return next((path for path in paths if path.is_file()), None)


def image_by_producer(results: Results, name: str, text: str) -> list[str]:
    path = figure_by_producer(results, name)
    return [] if path is None else [f"![{text}](results/{path.relative_to(results.folder).as_posix()})", ""]
