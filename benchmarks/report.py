"""Write what was measured: RESULTS.md, its figures and the blocks of numbers in README.md and the documentation.

    python benchmarks/report.py            write tables and figures from the records under benchmarks/results
    python benchmarks/report.py --check    write nothing; status 1 where a table, a figure or a quoted number is outdated
    python benchmarks/report.py --facts    list the numbers that a sentence may quote

Sentences are written by people. A number in one of them is followed by an invisible comment with the number's key, as in
`18.6 to 22.4×<!-- solve.broyden.gain -->`; --check compares it with the records. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.files import write_bytes, write_text
from harness.targets import GPU_TARGETS, STUDY_TARGETS, TARGETS, UNITS, Target

Row = dict[str, Any]
Form = Callable[[float], str]
ROOT = Path(__file__).resolve().parent.parent
OURS, PEER, EAGER, PLAIN, PINV = "cpp", "torchdeq", "eager", "torch", "pinv"
SOLVERS = {
    "picard-128x8192": ("picard", "Picard"),
    "anderson-m6-128x8192": ("anderson", "Anderson, m = 6"),
    "anderson-m6-bf16-128x8192": ("anderson-bf16", "Anderson, m = 6, bf16 history"),
    "broyden-n20-128x8192": ("broyden", "Broyden, n = 20"),
}
METHODS = {  # deqfast's solver as it is by default -> the same method of torchdeq
    "deqfast picard": "torchdeq fixed_point_iter",
    "deqfast anderson m=6": "torchdeq anderson m=6",
    "deqfast broyden n=20": "torchdeq broyden",
}
SYNTHETIC = re.compile(r", b [\d.e-]+$")  # how the problems of the suite are named: by the scale of their injection
FACT = re.compile(r"<!-- ([\w-]+(?:\.[\w-]+)+) -->")
BEGIN, END = "<!-- numbers -->", "<!-- end of numbers -->"


class ReportError(Exception):
    """What keeps the report from being written, for a person to read."""


# Numbers as text


def digits(value: float) -> str:
    """Three significant digits; an exponent below 1e-4 and from 1e6 on."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(float(f"{value:.2e}"))))
    if not -4 <= exponent < 6:
        return scientific(value)
    return f"{round(value, 2 - exponent):.{max(0, 2 - exponent)}f}"


def scientific(value: float) -> str:
    """Two significant digits: 1.8e-2. A relative error of 0 is one that float64 cannot tell."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "below 2.2e-16"


def in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit that leaves a number from 1 on; units: (size, name), ascending."""
    rounded = float(f"{value:.2e}")  # 999.9 µs is 1.00 ms
    size, name = next((unit for unit in reversed(units) if abs(rounded) >= unit[0]), units[0])
    return f"{digits(value / size)} {name}".rstrip()


def duration(ms: float) -> str:
    return in_units(ms, [(1e-6, "ns"), (1e-3, "µs"), (1, "ms"), (1e3, "s")])


def days(seconds: float) -> str:
    return in_units(seconds, [(1, "s"), (60, "min"), (3600, "h"), (86400, "days")])


def count(value: float) -> str:
    return in_units(value, [(1, ""), (1e6, "million"), (1e9, "billion")])


def times(value: float) -> str:
    return f"{digits(value)}×"


def percent(share: float) -> str:
    return f"{digits(100 * share)} %"


def span(values: Sequence[float], form: Form = times) -> str:
    """The least and the largest: "18.6 to 22.4×"; one of them where they are the same as text; "" of none."""
    if not values:
        return ""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low.removesuffix('×')} to {high}"


def median(values: Sequence[float], form: Form) -> str:
    return form(statistics.median(values)) if values else ""


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Markdown, without the columns that are empty throughout; the first column to the left, the others right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in body]
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    rule = ["---" if index == 0 else "---:" for index in range(len(header))]
    return ["| " + " | ".join(row[index] for index in used) + " |" for row in [[*header], rule, *rows]]


# The records


@dataclass(frozen=True)
class Record:
    """One file of rows, with what was recorded of the machine and of how it was measured."""

    path: Path
    machine: dict[str, Any]
    command: str | None
    date: str | None
    remark: str | None
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ReportError(f"{path}: no JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("machine"), dict) or "rows" not in data:
            raise ReportError(f"{path}: a record is an object with the keys machine and rows")
        if data.get("dry_run"):
            raise ReportError(f"{path}: a dry run is no result")
        for index, row in enumerate(data["rows"]):
            if missing := {"section", "case", "provider"} - row.keys():
                raise ReportError(f"{path}: row {index} has no {', '.join(sorted(missing))}")
        texts = {key: data.get(key) for key in ("command", "date", "remark")}
        return cls(path, data["machine"], rows=data["rows"], **texts)

    @property
    def threads(self) -> int:
        return self.machine.get("threads") or 0

    @property
    def where(self) -> str:
        """ "AMD EPYC, 2 cores, 2 threads"."""
        names = [self.machine.get("gpu"), self.machine.get("processor")]
        counts = [f"{self.machine[key]} {key}" for key in ("cores", "threads") if self.machine.get(key)]
        return ", ".join([name for name in names if name] + counts).replace("1 threads", "1 thread")

    @property
    def versions(self) -> str:
        names = {"deqfast": "deqfast", "torch": "torch", "triton": "triton", "python": "Python"}
        return ", ".join(f"{text} {self.machine[name]}" for name, text in names.items() if self.machine.get(name))

    @property
    def when(self) -> str:
        """ "e6f2888, 2026-11-21"; whether the checkout differed from the commit."""
        sha, plus, _ = str(self.machine.get("commit", "commit not recorded")).partition("+")
        return f"{sha[:7] if len(sha) == 40 else sha}{' with changes' if plus else ''}, {(self.date or 'no date')[:10]}"


@dataclass(frozen=True)
class Case:
    """What the runs with one number of threads have measured of a case: provider -> a row of each record."""

    name: str
    threads: int
    runs: dict[str, list[Row]]

    def values(self, provider: str, column: str) -> list[float]:
        return [row[column] for row in self.runs.get(provider, []) if row.get(column) is not None]

    def gains(self, peer: str, provider: str = OURS) -> list[float]:
        return [row["gains"][peer] for row in self.runs.get(provider, []) if peer in row.get("gains", {})]


@dataclass(frozen=True)
class Results:
    """Everything that the report is made from."""

    records: list[Record]

    @classmethod
    def read(cls, folder: Path) -> Results:
        return cls([Record.read(path) for path in sorted(folder.glob("*.json"))])

    @property
    def gpus(self) -> list[Record]:
        return [record for record in self.records if record.machine.get("gpu")]

    def of(self, section: str) -> list[Record]:
        """The records of CPUs that hold rows of a section; a record that is missing is an error."""
        found = [one for one in self.records if one not in self.gpus and any(r["section"] == section for r in one.rows)]
        if not found:
            raise ReportError(f"no record under benchmarks/results has rows of section {section!r}: measure it first")
        return found

    def rows(self, section: str) -> list[Row]:
        return [row for record in self.of(section) for row in record.rows if row["section"] == section]

    def all_cases(self, section: str) -> list[Case]:
        found: dict[tuple[str, int], Case] = {}
        for record in self.of(section):
            for row in record.rows:
                if row["section"] == section:
                    key = (row["case"], row.get("threads") or record.threads)
                    found.setdefault(key, Case(*key, {})).runs.setdefault(row["provider"], []).append(row)
        return list(found.values())

    def cases(self, section: str) -> list[Case]:
        """By the largest number of threads that a case was measured with."""
        best: dict[str, Case] = {}
        for case in self.all_cases(section):
            best[case.name] = max(best.get(case.name, case), case, key=lambda one: one.threads)
        return list(best.values())

    def case(self, section: str, name: str) -> Case:
        for case in self.cases(section):
            if case.name == name:
                return case
        raise ReportError(f"no record under benchmarks/results has the case {name!r} of section {section!r}")


# Targets

MET, MISSED, NO_GPU = "met", "missed", "not measured: no GPU"


@dataclass(frozen=True)
class Verdict:
    what: str
    bound: str
    measured: str
    state: str


def target_values(results: Results, target: Target) -> list[float]:
    """What each record of those with the most threads has measured."""
    found = [(record.threads, target.value(record.rows)) for record in results.records if record not in results.gpus]
    told = [(threads, value) for threads, value in found if value is not None]
    return [value for threads, value in told if threads == max(threads for threads, _ in told)]


def judged(results: Results, target: Target) -> Verdict:
    """All runs have to meet a target."""
    values = target_values(results, target)
    missed = sum(not target.met(value) for value in values)
    forms: dict[str, Form] = {"ms": duration, "error": scientific, "nc_share": percent}
    form = forms.get(target.column, times)
    bound = f"{'≥' if target.at_least else '≤'} {form(target.bound)}"
    measured = span(values, form)
    if missed and any(form(value) == form(target.bound) for value in values):
        measured = f"{min(values):.6g} to {max(values):.6g}"  # misses by less than three digits tell
    state = f"{MISSED} in {missed} of {len(values)} runs" if missed else MET if values else "not measured"
    return Verdict(f"{target.case}: {target.words}", bound, measured, state)


def verdicts(results: Results) -> list[Verdict]:
    """Of the suite and of the study's training step on CPUs; of GPUs as their rows say, by name where there are none."""
    found = [judged(results, target) for target in (*TARGETS, *STUDY_TARGETS)]
    told = [(record, row, target) for record in results.gpus for row in record.rows for target in row.get("targets", [])]
    states = {True: MET, False: MISSED, None: "not measured"}
    found += [
        Verdict(f"{record.machine['gpu']}, {row['case']}", target["target"], "", states[target["met"]])
        for record, row, target in told
    ]
    if not told:
        state = "not measured" if results.gpus else NO_GPU
        units = UNITS | {"us": " µs", "x": "×", "share": " %"}
        found += [Verdict(one.what, one.words("≥ ", "≤ ", units), "", state) for one in GPU_TARGETS.values()]
    return found


# Time to a residual


def race(results: Results, tol: float) -> dict[str, Row]:
    """Of each solver over the suite of problems to a tolerance: how many it missed, and its gain.

    gain: geometric mean of the time of torchdeq's same method over this one's, of the `gains` problems that both solve;
    evaluations: median, where the tolerance was missed the most there may be.
    """
    rows = [row for row in results.rows("residual") if row["tol"] == tol and SYNTHETIC.search(row["case"])]
    found = {}
    for name in dict.fromkeys(row["provider"] for row in rows):
        own = [row for row in rows if row["provider"] == name]
        gains = [row["gain"] for row in own if row["reached"] and "gain" in row]
        found[name] = {
            "missed": sum(not row["reached"] for row in own),
            "problems": len(own),
            "evaluations": statistics.median(
                row["evaluations" if row["reached"] else "most_evaluations"] for row in own
            ),
            "gain": statistics.geometric_mean(gains) if gains else None,
            "gains": len(gains),
        }
    return found


def tolerances(results: Results) -> list[float]:
    """The loosest first."""
    return sorted({row["tol"] for row in results.rows("residual")}, reverse=True)


def race_table(results: Results) -> list[str]:
    """A line for each solver: the suite of problems, and its time on each trained cell to the tightest tolerance."""
    races = {tol: race(results, tol) for tol in tolerances(results)}
    tight = min(races)
    trained = [r for r in results.rows("residual") if r["tol"] == tight and not SYNTHETIC.search(r["case"])]
    cells = list(dict.fromkeys(row["case"] for row in trained))
    reached = {(row["case"], row["provider"]): row for row in trained}
    header = ["solver"]
    for tol in races:
        header += [f"missed, {tol:g}", f"evaluations, {tol:g}", f"gain, {tol:g}"]
    body = []
    for name in dict.fromkeys([*races[tight], *(row["provider"] for row in trained)]):
        line = [name]
        for of_tol in races.values():
            one = of_tol.get(name)
            line += [f"{one['missed']} of {one['problems']}", f"{one['evaluations']:g}"] if one else ["", ""]
            line.append(f"{times(one['gain'])} of {one['gains']}" if one and one["gain"] else "")
        for cell in cells:
            row = reached.get((cell, name))
            line.append("" if row is None else duration(row["ms"]) if row["reached"] else "missed")
        body.append(line)
    return table([*header, *cells], body)


# Tables of the suite

Column = tuple[str, Callable[[Case], str]]


def timing(title: str, provider: str, column: str) -> Column:
    return title, lambda case: median(case.values(provider, column), duration)


def share(column: str, provider: str, peer: str) -> Callable[[Case], str]:
    """Of the peer's value."""

    def text(case: Case) -> str:
        own, theirs = case.values(provider, column), case.values(peer, column)
        return times(statistics.median(own) / statistics.median(theirs)) if own and theirs else ""

    return text


def gain(peer: str) -> Callable[[Case], str]:
    """The median of the runs' own gains, and of several the least and the largest."""

    def text(case: Case) -> str:
        values = case.gains(peer)
        ends = span(values)
        return f"{median(values, times)} ({ends})" if " to " in ends else ends

    return text


SOLVE_COLUMNS: list[Column] = [
    timing("deqfast", OURS, "solver_ms"),
    timing("torchdeq", PEER, "solver_ms"),
    ("gain over torchdeq", gain(PEER)),
    ("memory of torchdeq's", share("peak_bytes", OURS, PEER)),
]
MORE_SOLVE_COLUMNS: list[Column] = [
    ("of its byte floor", lambda case: median(case.values(OURS, "floor_x"), times)),
    timing("`torch` kernel", PLAIN, "solver_ms"),
    timing("eager", EAGER, "solver_ms"),
    ("residual, deqfast / torchdeq", lambda case: " / ".join(
        median(case.values(name, "residual"), scientific) for name in (OURS, PEER))),
]  # fmt: skip
CALL_COLUMNS: list[Column] = [
    timing("deqfast", OURS, "ms_min"),
    ("of its byte floor", lambda case: median(case.values(OURS, "floor_x"), times)),
    timing("`torch` kernel", PLAIN, "ms_min"),
    timing("torchdeq", PEER, "ms_min"),
    timing("eager", EAGER, "ms_min"),
    timing("the cell once", "explicit", "ms_min"),
    timing("pseudo-inverse", PINV, "ms_min"),
    ("gain over torchdeq", gain(PEER)),
    ("gain over the pseudo-inverse", gain(PINV)),
    ("relative error", lambda case: median(case.values(OURS, "error"), scientific)),
]


def case_table(cases: Iterable[Case], columns: Sequence[Column], names: Mapping[str, str] | None = None) -> list[str]:
    header = ["", *(title for title, _ in columns)]
    return table(header, [[(names or {}).get(case.name, case.name), *(text(case) for _, text in columns)] for case in cases])


def headline(results: Results) -> list[Case]:
    """The four solvers at (128, 8192)."""
    return [results.case("solves", name) for name in SOLVERS]


def headline_table(results: Results, columns: Sequence[Column]) -> list[str]:
    return case_table(headline(results), columns, {name: text for name, (_, text) in SOLVERS.items()})


def origin(records: Sequence[Record]) -> str:
    """Where the numbers of a table come from, as a sentence."""
    of_most = [record for record in records if record.threads == max(one.threads for one in records)]
    made = "; ".join(dict.fromkeys(f"{one.where}, {one.versions}, kernel `{OURS}`" for one in of_most))
    return f"{made}; torchdeq 0.1.0. Commit {', '.join(dict.fromkeys(one.when for one in of_most))}."


def scaling_table(results: Results) -> list[str]:
    """A line for each curve: time per iteration at its ends, and how it and the memory grow."""
    body = []
    rows = results.rows("scaling")
    for series, name in dict.fromkeys((row["series"], row["case"]) for row in rows):
        own, theirs = (
            [row for row in rows if (row["series"], row["case"], row["provider"]) == (series, name, provider)
             and "solver_ms" in row] for provider in (OURS, PEER)
        )  # fmt: skip
        axis = own[0]["axis"]
        first, last = own[0], own[-1]
        gains = [row["gain"] for row in own if "gain" in row]
        body.append(
            [series, name, f"{first[axis]} to {last[axis]}", f"{duration(first['solver_ms'])} to "
             f"{duration(last['solver_ms'])}", slope(own, axis, "solver_ms"), slope(theirs, axis, "solver_ms"),
             slope(own, axis, "peak_bytes"), slope(theirs, axis, "peak_bytes"), span(gains)]
        )  # fmt: skip
    header = ["changed", "solver", "from, to", "deqfast", "time ~ x^", "torchdeq's", "memory ~ x^", "torchdeq's",
              "gain over torchdeq"]  # fmt: skip
    return table(header, body)


def slope(rows: Sequence[Row], axis: str, column: str) -> str:
    """The exponent a of column ~ axis^a, fitted over the larger half of the points, where fixed costs have faded."""
    points = [(math.log(row[axis]), math.log(row[column])) for row in rows if row.get(column, 0) > 0]
    points = points[len(points) // 2 - (len(points) < 4) :] if len(points) > 1 else []
    return f"{statistics.linear_regression(*zip(*points, strict=True)).slope:.2f}" if points else ""


def model_table(results: Results) -> list[str]:
    """A line for each size, gradient and solver of the model; torchdeq's and deqfast's images per second."""
    rows = results.rows("internet scale (model)")
    grouped: dict[tuple[str, str, str], dict[tuple[str, int], Row]] = {}
    for row in rows:
        key = (row["size"], row["adjoint"], row["solver"].split()[0])
        grouped.setdefault(key, {})[row["provider"], row["gpus"]] = row
    gpus = list(dict.fromkeys(row["gpus"] for row in rows))
    header = ["model of", *(f"images/s, {one} GPU{'s' * (one > 1)}: torchdeq → deqfast" for one in gpus), "gain",
              f"all images, {gpus[-1]} GPUs"]  # fmt: skip
    body = []
    for key, of in grouped.items():
        rates = [" → ".join(f"{of[name, one]['images_per_second']:,.0f}" for name in (PEER, "deqfast")) for one in gpus]
        ours = of["deqfast", gpus[-1]]
        body.append([", ".join(key), *rates, times(of["deqfast", gpus[0]]["gain"]), days(ours["internet_s"])])
    return table(header, body)


def step_table(results: Results) -> list[str]:
    body = []
    for case in results.cases("training step"):
        (explicit,), (deq,) = case.runs["explicit"], case.runs["deq"]
        body.append(
            [case.name, f"{case.threads}", duration(explicit["ms"]), duration(deq["ms"]), f"{deq['evaluations']:.1f}",
             times(deq["times_explicit"]), times(deq["flop_ratio"]), times(deq["over_flop"]),
             percent(explicit["nc_share"]), *(f"{digits(row['paper_hours'])} h" for row in (explicit, deq))]
        )  # fmt: skip
    header = ["networks", "threads", "explicit step", "DEQ step", "evaluations", "time, DEQ / explicit", "operations",
              "time over operations", "NC1-NC4 of an epoch", "paper's trainings, explicit", "DEQ"]  # fmt: skip
    return table(header, body)


# The page, the blocks and the facts

SECTIONS = {
    "ops": ("Single ops", "One call; the fp32 reference in float64 is met before it is timed."),
    "training": (
        "Training steps of one layer",
        "Forward and backward. The cell's normalisations are fused in deqfast; torchdeq, eager and the cell once call "
        "plain torch modules, so a ratio is that of whole layers.",
    ),
    "fc": (
        "A fully connected cell in one call",
        "The whole solve of z = tanh(W z + c) by `deqfast.fc_fixed_point`, f included, beside loops that call f.",
    ),
    "nc": (
        "Neural collapse",
        "NC1 to NC4 (nc) or NC1 alone (nc1) of N features in D dimensions (N × D), beside the D × D pseudo-inverse.",
    ),
}
FIGURES = {
    "time_to_residual.png": "Residual against time: deqfast and torchdeq on two trained cells",
    "gain_over_torchdeq.png": "Bars: how many times as fast as torchdeq each solver is, targets marked",
}


def page(results: Results) -> str:
    """The text of RESULTS.md."""
    found = verdicts(results)
    lines = [
        "# Benchmark results",
        "",
        "Written by `python benchmarks/report.py` from the records in [results](results), which hold more: each row's "
        "median, least, quartiles and number of rounds (to six digits), bytes, launches and host waits. Here: the least of the "
        "rounds, by the largest number of threads; of several runs the median, behind a gain the least and the "
        "largest. deqfast means its kernel `cpp`; a byte floor is what the algorithm must move at the copy rate of the "
        "same run (a time below it is one of data that stayed in a cache).",
        *heading("Targets", f"{counts_text(found)} All runs of the most threads have to meet a target."),
        *table(["target", "bound", "measured", ""], [[v.what, v.bound, v.measured, v.state] for v in found]),
        *heading("Solver time per iteration", "Of 20 iterations, f subtracted; torchdeq's history is fp32 throughout. "
                 "deqfast keeps a history's memory for the next solve, torchdeq allocates and zeroes its own."),
        f"![{FIGURES['gain_over_torchdeq.png']}](results/gain_over_torchdeq.png)",
        "",
        *case_table(results.cases("solves"), [*SOLVE_COLUMNS, *MORE_SOLVE_COLUMNS]),
    ]  # fmt: skip
    for section, (title, words) in SECTIONS.items():
        lines += [*heading(title, words), *case_table(results.cases(section), CALL_COLUMNS)]
    lines += [
        *heading("Time to a residual", "Each solver until the worst sample's relative residual in float64 is within "
                 "the tolerance, f included, at most 60 evaluations: problems missed and geometric mean of the gain "
                 "over torchdeq's same method (of how many problems) over the suite of 24 synthetic problems, then "
                 f"the time on cells that were trained, to {min(tolerances(results)):g}. `torch …` is deqfast with "
                 "`kernel=\"torch\"`. torchdeq's Anderson ships with an absolute ridge, `lam=1e-4`."),
        f"![{FIGURES['time_to_residual.png']}](results/time_to_residual.png)",
        "",
        *race_table(results),
        *heading("A training step of the study", "Both networks in turns, medians of whole steps; the paper's 40 "
                 "trainings are extrapolated from them."),
        *step_table(results),
        *heading("How cost grows", "One variable at a time around (32, 8192) and 20 iterations, f subtracted; the "
                 "exponent is fitted over the larger half of the sizes."),
        *scaling_table(results),
        *heading("A model of many GPUs", "**A model, not a measurement**: training of MDEQ on H200 GPUs, every "
                 "operation at the longer of its bytes at the copy rate and its arithmetic at a share of a product's "
                 "rate (`benchmarks/internet_scale.py`; every input and its source is in the record)."),
        *model_table(results),
        *heading("On a GPU", gpu_text(results)),
        *[line for record in results.gpus for line in gpu_table(record)],
        *heading("What was measured, and where", "To measure a record again, type its command."),
        *table(["record", "machine", "versions", "commit, date"],
               [[f"[{one.path.name}](results/{one.path.name})", one.where, one.versions, one.when]
                for one in results.records]),
        "",
        *(f"- `{one.path.name}`: {'; '.join(filter(None, [f'`{one.command}`', one.remark]))}" for one in results.records),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def heading(title: str, words: str) -> list[str]:
    return ["", f"## {title}", "", words, ""]


def counts_text(found: Sequence[Verdict]) -> str:
    """ "Of 35 targets 15 are met, 2 missed, 18 not measured: no GPU."."""
    kinds = Counter(MISSED if one.state.startswith(MISSED) else one.state for one in found)
    return f"Of {len(found)} targets: {', '.join(f'{number} {state}' for state, number in kinds.items())}."


def gpu_text(results: Results) -> str:
    if results.gpus:
        return "Medians by kernel; those of solves per iteration, f subtracted."
    return "Not yet run on a GPU: no GPU time is reported. `bash benchmarks/gpu.sh` measures the targets above."


def gpu_table(record: Record) -> list[str]:
    rows = [row for row in record.rows if "ms" in row]
    header = ["case", "kernel", "time", "of its byte floor", "gain over torchdeq"]
    body = [
        [f"{row['section']} {row['case']}", row["provider"], duration(row.get("solver_ms", row["ms"])),
         median([row["floor_x"]] if "floor_x" in row else [], times), span([g for p, g in row.get("gains", {}).items() if p == PEER])]
        for row in rows
    ]  # fmt: skip
    return [f"### {record.where}, {record.path.name}", "", *table(header, body), ""]


def blocks(results: Results) -> dict[str, list[str]]:
    """What stands between the markers of each text."""
    words = "Solver time per iteration at (128, 8192) fp32, f subtracted; the gain is the median of the runs (least to largest)."
    made = origin(results.of("solves"))
    return {
        "README.md": [*headline_table(results, SOLVE_COLUMNS), "", f"{words} {made}"],
        "docs/pages/performance.md": [
            *headline_table(results, [*SOLVE_COLUMNS, *MORE_SOLVE_COLUMNS]), "", f"{words} {made}", "",
            "To a residual on 24 problems (missed, median evaluations, gain over torchdeq's same method of how many "
            "problems) and the time on cells that were trained:", "",
            *race_table(results), "", origin(results.of("residual")),
        ],
    }  # fmt: skip


def facts(results: Results) -> dict[str, str]:
    """The numbers that sentences may quote, by key."""
    states = Counter(MISSED if one.state.startswith(MISSED) else one.state for one in verdicts(results))
    found = {"targets.met": states[MET], "targets.missed": states[MISSED], "targets.all": states.total()}
    texts = {key: str(number) for key, number in found.items()}
    for case in headline(results):
        key = f"solve.{SOLVERS[case.name][0]}"
        texts |= {
            f"{key}.gain": span(case.gains(PEER)),
            f"{key}.gain-median": median(case.gains(PEER), times),
            f"{key}.gain-over-eager": span(case.gains(EAGER)),
            f"{key}.ms": median(case.values(OURS, "solver_ms"), duration),
            f"{key}.torchdeq-ms": median(case.values(PEER, "solver_ms"), duration),
            f"{key}.floor": median(case.values(OURS, "floor_x"), times),
            f"{key}.memory": share("peak_bytes", OURS, PEER)(case),
        }
    for tol in tolerances(results):
        lines = race(results, tol)
        for ours, theirs in METHODS.items():
            key = f"residual.{ours.split()[1]}.{tol:.0e}".replace("e-0", "e-")
            texts |= {
                f"{key}.gain": times(lines[ours]["gain"]),
                f"{key}.missed": str(lines[ours]["missed"]),
                f"{key}.torchdeq-missed": str(lines[theirs]["missed"]),
            }
    texts |= call_facts(results)
    for case in results.cases("training step"):
        (explicit,), (deq,) = case.runs["explicit"], case.runs["deq"]
        key = f"step.{deq['width']}x{deq['batch']}"
        texts |= {
            f"{key}.times-explicit": times(deq["times_explicit"]),
            f"{key}.over-flop": times(deq["over_flop"]),
            f"{key}.nc-share": percent(explicit["nc_share"]),
        }
    gains = [row["gain"] for row in results.rows("internet scale (model)") if "gain" in row]
    return texts | {"internet.gain": span(gains), "machine.cpu": results.of("solves")[0].where.split(", ")[0]}


def call_facts(results: Results) -> dict[str, str]:
    """Of single calls: the fully connected cell, neural collapse, and in how many cases `cpp` is faster than `torch`."""
    calls = {
        "fc": ("fc", "fc-solve-128x256-fp32", PEER),
        "nc1": ("nc", "nc1-2000x8192-K100-fp64", PINV),
        "nc": ("nc", "nc-2000x8192-K100-fp64", PINV),
    }
    texts = {}
    for key, (section, name, peer) in calls.items():
        case = results.case(section, name)
        texts |= {
            f"{key}.ms": median(case.values(OURS, "ms_min"), duration),
            f"{key}.peer-ms": median(case.values(peer, "ms_min"), duration),
            f"{key}.gain": span(case.gains(peer)),
        }
    compared = [
        statistics.median(ours) < statistics.median(plain)
        for section in ("solves", *SECTIONS)
        for case in results.cases(section)
        if (ours := case.values(OURS, "ms_min")) and (plain := case.values(PLAIN, "ms_min"))
    ]
    return texts | {"cpp.faster": str(sum(compared)), "cpp.cases": str(len(compared))}


# Figures, in Okabe and Ito's palette

COLOURS = {"picard": "#009E73", "fixed_point_iter": "#009E73", "anderson": "#0072B2", "broyden": "#D55E00"}
NAMES = {"picard": "Picard", "fixed_point_iter": "Picard", "anderson": "Anderson", "broyden": "Broyden"}
SHOWN = ("fully connected tanh, digits", "residual block, cifar10")


def figure_data(results: Results) -> dict[str, Any]:
    """What each figure shows; a digest of it is kept in the PNG."""
    courses = [row for row in results.rows("residual course") if row["case"] in SHOWN]
    bars = [
        {"name": SOLVERS[case.name][1], "threads": case.threads, "gains": case.gains(PEER), "target": target.bound}
        for case in results.all_cases("solves")
        for target in TARGETS
        if case.name in SOLVERS and (target.case, target.column) == (case.name, "gain")
    ]
    return {"time_to_residual.png": courses, "gain_over_torchdeq.png": bars}


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def draw_courses(pyplot: Any, courses: list[Row]) -> Any:
    """The best residual so far of the worst sample against time, a panel for each problem."""
    cases = list(dict.fromkeys(row["case"] for row in courses))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(9.6, 3.9), sharey=True, squeeze=False)
    for axis, case in zip(axes[0], cases, strict=True):
        own = [row for row in courses if row["case"] == case]
        axis.set_title(f"{case}: {own[0]['batch']} samples of {own[0]['dim']:,}", fontsize=10)
        axis.set(xlabel="time, f included (ms)", xscale="log", yscale="log", ylim=(3e-8, 3))
        axis.grid(alpha=0.25)
        for row in own:
            library, method = row["provider"].split()[:2]
            style = "-" if library == "deqfast" else "--"
            values = [value or math.nan for value in row["residual"]]
            axis.plot(row["ms"], values, style, color=COLOURS[method], lw=2, label=f"{NAMES[method]}, {library}")
    axes[0][0].set_ylabel("relative residual, worst sample")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def draw_gains(pyplot: Any, bars: list[Row]) -> Any:
    """The median gain of each solver by number of threads, its range over the runs and its target."""
    figure, axis = pyplot.subplots(figsize=(7.5, 3.2))
    names, counts = (list(dict.fromkeys(bar[key] for bar in bars)) for key in ("name", "threads"))
    height = 0.8 / len(counts)
    for index, (threads, colour) in enumerate(zip(sorted(counts), ("#56B4E9", "#0072B2", "#000000"), strict=False)):
        own = [bar for bar in bars if bar["threads"] == threads]
        places = [names.index(bar["name"]) - 0.4 + (index + 0.5) * height for bar in own]
        medians = [statistics.median(bar["gains"]) for bar in own]
        drawn = axis.barh(places, medians, 0.9 * height, color=colour, label=f"{threads} thread{'s' * (threads > 1)}")
        axis.bar_label(drawn, [times(value) for value in medians], padding=4, fontsize=8)
    targets = {names.index(bar["name"]): bar["target"] for bar in bars}
    low, high = ([place + shift for place in targets] for shift in (-0.43, 0.43))
    axis.vlines(list(targets.values()), low, high, color="#D55E00", lw=2, label="target on two cores")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("times as fast as torchdeq 0.1.0 per iteration, f subtracted, (128, 8192) fp32")
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(x=0.1)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def draw(name: str, data: Any) -> bytes:
    """A PNG of few colours, with the digest of what it shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    with pyplot.rc_context({"figure.constrained_layout.use": True}):
        figure = (draw_courses if name == "time_to_residual.png" else draw_gains)(pyplot, data)
        content, small, information = io.BytesIO(), io.BytesIO(), PngInfo()
        figure.savefig(content, dpi=150)
    pyplot.close(figure)
    information.add_text("deqfast data", digest(data))
    Image.open(content).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "PNG", pnginfo=information)
    return small.getvalue()


# Writing and checking


def with_block(text: str, block: Sequence[str], path: Path) -> str:
    """`text` with `block` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ReportError(f"{path}: needs once, in this order, the lines {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return "\n".join([f"{before}{BEGIN}", "", *block, "", f"{END}{rest.split(END)[1]}"])


def wrong_numbers(text: str, known: Mapping[str, str]) -> Iterator[str]:
    """A sentence for every marked number that is not the measured one."""
    for marked in FACT.finditer(text):
        key, line = marked[1], text.count("\n", 0, marked.start()) + 1
        if key not in known:
            yield f"line {line}: no number is called {key}; report.py --facts lists them"
        elif not re.search(rf"(?<![\w.]){re.escape(known[key])}$", text[: marked.start()]):
            yield f"line {line}: {key} is {known[key]}, the text says …{text[: marked.start()][-20:]!r}"


def run(root: Path, check: bool) -> list[str]:
    """Write or compare everything; what is wrong, if anything."""
    results = Results.read(root / "benchmarks" / "results")
    wanted = {root / "benchmarks" / "RESULTS.md": page(results)}
    for name, block in blocks(results).items():
        if (root / name).is_file():
            wanted[root / name] = with_block((root / name).read_text(), block, root / name)
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    figures = {root / "benchmarks" / "results" / name: data for name, data in figure_data(results).items()}
    for path, data in figures.items():
        if not path.is_file() or digest(data).encode() not in path.read_bytes():
            stale.append(path)
    if not check:
        for path in stale:
            write_bytes(path, draw(path.name, figures[path])) if path in figures else write_text(path, wanted[path])
            print(f"written: {path}")
        stale = []
    known = facts(results)
    prose = [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.is_file()]
    wrong = [f"{path}, {problem}" for path in prose for problem in wrong_numbers(path.read_text(), known)]
    return [f"{path} is not what the records give: run python benchmarks/report.py" for path in stale] + wrong


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything is outdated")
    parser.add_argument("--facts", action="store_true", help="print the keys and numbers that sentences may quote")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    given = parser.parse_args(argv)
    try:
        if given.facts:
            known = facts(Results.read(given.root / "benchmarks" / "results"))
            print("\n".join(f"{key:<40} {text}" for key, text in known.items()))
            return
        problems = run(given.root, given.check)
    except ReportError as error:
        problems = [str(error)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
