"""Write what was measured: RESULTS.md, its figures and the blocks of numbers in README.md and the documentation.

    python benchmarks/report.py            write tables and the figure from the records under benchmarks/results
    python benchmarks/report.py --check    write nothing; status 1 where a table, the figure or a number is outdated
    python benchmarks/report.py --facts    list the numbers that a sentence may quote

Sentences are written by people. A number in one of them is followed by an invisible comment with its key, as in
`18.6 to 22.4×<!-- solves.broyden-n20-128x8192.gain-over-torchdeq -->`, and --check compares the two. Nothing is
measured here.
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

from harness.files import write_bytes
from harness.targets import GPU_TARGETS, STUDY_TARGETS, TARGETS, Target

Row = dict[str, Any]
Form = Callable[[float], str]
ROOT = Path(__file__).resolve().parent.parent
OURS, PEER = "cpp", "torchdeq"
SOLVERS = {
    "picard-128x8192": "Picard",
    "anderson-m6-128x8192": "Anderson, m = 6",
    "anderson-m6-bf16-128x8192": "Anderson, m = 6, bf16 history",
    "broyden-n20-128x8192": "Broyden, n = 20",
}
PROVIDERS = {
    OURS: "deqfast",
    PEER: PEER,
    "eager": "eager",
    "torch": "`torch` kernel",
    "explicit": "the cell once",
    "pinv": "pseudo-inverse",
}
SYNTHETIC = re.compile(r", b [\d.e-]+$")  # how the problems of the suite are named: by the scale of their injection
FACT = re.compile(r"<!-- ([\w-]+\.[\w.-]+) -->")
BEGIN, END = "<!-- numbers -->", "<!-- end of numbers -->"


class ReportError(Exception):
    """What keeps the report from being written, for a person to read."""


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


UNITS = {"ns": 1e-6, "µs": 1e-3, "ms": 1.0, "s": 1e3}


def duration(ms: float) -> str:
    """In the largest unit that leaves a number from 1 on."""
    rounded = float(f"{ms:.2e}")  # 999.9 µs is 1.00 ms
    unit = next((unit for unit in reversed(UNITS) if abs(rounded) >= UNITS[unit]), "ns")
    return f"{digits(ms / UNITS[unit])} {unit}"


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


def slug(text: str) -> str:
    """ "gain-over-torchdeq": how a row or a column is called in the key of a number."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


@dataclass(frozen=True)
class Table:
    """A table with its heading and the words before it; columns that are empty throughout are left out."""

    title: str
    words: str
    rows: Sequence[Mapping[str, str]]  # column -> text, the name of the row first

    def lines(self, columns: Sequence[str] = (), names: Mapping[str, str] | None = None) -> list[str]:
        """Markdown; `columns`: only these; `names`: only the rows of these names, and what to call them."""
        if not self.rows:
            return []
        first, *others = self.rows[0]
        used = [first, *(name for name in columns or others if any(row[name] for row in self.rows))]
        rows = [
            {**row, first: names[row[first]]} if names else row for row in self.rows if not names or row[first] in names
        ]
        cells = [used, ["---", *["---:"] * (len(used) - 1)]]
        cells += [[row[name].replace("|", "\\|") for name in used] for row in rows]
        return ["| " + " | ".join(row) + " |" for row in cells]

    def facts(self) -> dict[str, str]:
        """Each number by the names of table, row and column."""
        return {
            ".".join(map(slug, (self.title, name, column))): cell
            for (_, name), *cells in (row.items() for row in self.rows)
            for column, cell in cells
            if cell
        }


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
        return cls(path, data["machine"], data.get("command"), data.get("date"), data.get("remark"), data["rows"])

    @property
    def threads(self) -> int:
        return self.machine.get("threads") or 0

    @property
    def where(self) -> str:
        """ "AMD EPYC, 2 cores, 2 threads"."""
        return self.told(gpu="{}", processor="{}", cores="{} cores", threads="{} threads").replace(
            "1 threads", "1 thread"
        )

    @property
    def versions(self) -> str:
        return self.told(deqfast="deqfast {}", torch="torch {}", triton="triton {}", python="Python {}")

    def told(self, **forms: str) -> str:
        """What is recorded of the machine under these keys."""
        return ", ".join(form.format(self.machine[key]) for key, form in forms.items() if self.machine.get(key))

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

    def cases(self, section: str) -> list[Case]:
        """Each by the largest number of threads that it was measured with."""
        found: dict[str, Case] = {}
        for record in self.of(section):
            for row in record.rows:
                threads = row.get("threads") or record.threads
                if row["section"] != section or threads < found.get(row["case"], Case("", 0, {})).threads:
                    continue
                if row["case"] not in found or threads > found[row["case"]].threads:
                    found[row["case"]] = Case(row["case"], threads, {})
                found[row["case"]].runs.setdefault(row["provider"], []).append(row)
        return list(found.values())


FORMS: dict[str, Form] = {
    "ms": duration,
    "error": scientific,
    "nc_share": percent,
    "host_waits": digits,
    "paper_hours": digits,
}


def judged(results: Results, target: Target) -> dict[str, str]:
    """What is promised, what was measured, and whether all runs with the most threads meet it."""
    records = [one for one in results.records if bool(one.machine.get("gpu")) == target.on_gpu]
    told = [(one.threads, target.value(one.rows)) for one in records]
    most = max((threads for threads, value in told if value is not None), default=0)
    values = [value for threads, value in told if threads == most and value is not None]
    missed = sum(not target.met(value) for value in values)
    form = FORMS.get(target.column, times)
    measured = span(values, form)
    if missed and any(form(value) == form(target.bound) for value in values):
        measured = f"{min(values):.6g} to {max(values):.6g}"  # misses by less than three digits tell
    state = f"missed in {missed} of {len(values)} runs" if missed else "met"
    if not values:
        state = "not measured" + ": no GPU" * (target.on_gpu and not results.gpus)
    return {"target": target.what, "measured": measured, "state": state}


def targets(results: Results) -> Table:
    body = [judged(results, target) for target in (*TARGETS, *STUDY_TARGETS, *GPU_TARGETS)]
    counts = ", ".join(f"{number} {state}" for state, number in states_of(body).items())
    words = f"Of {len(body)} targets: {counts}. All runs with the most threads have to meet a target."
    return Table("Targets", words, body)


def states_of(rows: Iterable[Mapping[str, str]]) -> Counter[str]:
    return Counter(row["state"].partition(" in ")[0] for row in rows)


def case_table(title: str, words: str, cases: Sequence[Case], time: str) -> Table:
    """A line for each case; `time`: the column of its rows that is shown, of several runs the median."""

    def spread(case: Case, peer: str) -> str:
        ends = span(values := case.gains(peer))
        return f"{median(values, times)} ({ends})" if " to " in ends else ends

    def line(case: Case) -> dict[str, str]:
        own, theirs = (case.values(name, "peak_bytes") for name in (OURS, PEER))
        residuals = [median(case.values(name, "residual"), scientific) for name in (OURS, PEER)]
        providers = {text: median(case.values(name, time), duration) for name, text in PROVIDERS.items()}
        return (
            {"case": case.name}
            | providers
            | {
                "gain over torchdeq": spread(case, PEER),
                "gain over the pseudo-inverse": spread(case, "pinv"),
                "of its byte floor": median(case.values(OURS, "floor_x"), times),
                "memory of torchdeq's": times(statistics.median(own) / statistics.median(theirs))
                if own and theirs
                else "",
                "residual, deqfast / torchdeq": " / ".join(residuals) if all(residuals) else "",
                "relative error": median(case.values(OURS, "error"), scientific),
            }
        )

    return Table(title, words, [line(case) for case in cases])


# Title, section of the records, column of a row's time, words.
SUITE = (
    (
        "Solves",
        "solves",
        "solver_ms",
        "Solver time per iteration of 20, f subtracted; torchdeq's history is fp32 throughout. deqfast keeps the "
        "memory of a history for the next solve, torchdeq allocates and zeroes its own.",
    ),
    ("Ops", "ops", "ms_min", "One call."),
    (
        "Layers",
        "training",
        "ms_min",
        "Forward and backward of one layer. deqfast fuses the cell's normalisations; torchdeq, eager and the cell once "
        "call plain torch modules, so a ratio is that of whole layers.",
    ),
    (
        "FC",
        "fc",
        "ms_min",
        "The whole solve of z = tanh(W z + c) in one call of `deqfast.fc_fixed_point`, f included, beside loops.",
    ),
    (
        "NC",
        "nc",
        "ms_min",
        "Neural collapse: NC1 to NC4 (nc) or NC1 alone (nc1) of N features in D dimensions (N × D), beside the D × D "
        "pseudo-inverse.",
    ),
)


def suite(results: Results) -> list[Table]:
    return [case_table(title, words, results.cases(section), time) for title, section, time, words in SUITE]


def race(results: Results, tol: float, provider: str) -> dict[str, str]:
    """Of a solver over the suite of problems to a tolerance: how many it missed, evaluations, gain over torchdeq.

    The evaluations are the median, the most there may be where the tolerance was missed; the gain is the geometric mean
    over the problems that torchdeq's same method solves too, whose number stands behind it.
    """
    rows = [
        row
        for row in results.rows("residual")
        if (row["tol"], row["provider"]) == (tol, provider) and SYNTHETIC.search(row["case"])
    ]
    gains = [row["gain"] for row in rows if row["reached"] and "gain" in row]
    evaluations = [row["evaluations" if row["reached"] else "most_evaluations"] for row in rows]
    missed = sum(not row["reached"] for row in rows)
    return {
        f"missed, {tol:g}": f"{missed} of {len(rows)}" if rows else "",
        f"evaluations, {tol:g}": f"{statistics.median(evaluations):g}" if rows else "",
        f"gain, {tol:g}": f"{times(statistics.geometric_mean(gains))} ({len(gains)})" if gains else "",
    }


def races(results: Results) -> Table:
    """A line for each solver: the suite of problems, and its time on each trained cell to the tightest tolerance."""
    rows = results.rows("residual")
    tolerances = sorted({row["tol"] for row in rows}, reverse=True)
    trained = [row for row in rows if row["tol"] == tolerances[-1] and not SYNTHETIC.search(row["case"])]
    cells = list(dict.fromkeys(row["case"] for row in trained))
    reached = {(row["case"], row["provider"]): duration(row["ms"]) if row["reached"] else "missed" for row in trained}
    lines = []
    for name in dict.fromkeys(row["provider"] for row in rows):
        line = {"solver": name}
        for tol in tolerances:
            line |= race(results, tol, name)
        lines.append(line | {cell: reached.get((cell, name), "") for cell in cells})
    words = (
        "Each solver until the worst sample's relative residual in float64 is within the tolerance, f included, at "
        "most 60 evaluations: of 24 synthetic problems how many were missed, the median of evaluations, the geometric "
        "mean of the gain over torchdeq's same method (over how many problems); and the time on cells that were "
        f"trained, to {tolerances[-1]:g}. `torch …` is deqfast with that kernel; torchdeq's Anderson ships with an "
        "absolute ridge, `lam=1e-4`.\n\n![Residual against time on two trained cells](results/time_to_residual.png)"
    )
    return Table("Residual", words, lines)


def steps(results: Results) -> Table:
    rows = []
    for case in results.cases("training step"):
        (explicit,), (deq,) = case.runs["explicit"], case.runs["deq"]
        rows.append(
            {
                "networks": case.name,
                "threads": str(case.threads),
                "explicit step": duration(explicit["ms"]),
                "DEQ step": duration(deq["ms"]),
                "evaluations": f"{deq['evaluations']:.1f}",
                "DEQ over explicit": times(deq["times_explicit"]),
                "operations": times(deq["flop_ratio"]),
                "time over operations": times(deq["over_flop"]),
                "NC1-NC4 of an epoch": percent(explicit["nc_share"]),
                "paper, explicit": f"{digits(explicit['paper_hours'])} h",
                "paper, DEQ": f"{digits(deq['paper_hours'])} h",
            }
        )
    words = "A training step of the study's two networks in turns, medians; the paper's 40 trainings are extrapolated."
    return Table("Step", words, rows)


def scaling(results: Results) -> Table:
    """A line for each curve: time per iteration at its ends, how it and the memory grow, and the gain."""
    curves: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in results.rows("scaling"):
        if "peak_bytes" in row and "problem" not in row and row["axis"] != "threads":
            curve = curves.setdefault((row["series"], row["solver"]), {OURS: [], PEER: []})
            curve.setdefault(row["provider"], []).append(row)
    rows = []
    for (series, name), of in curves.items():
        axis, first, last = of[OURS][0]["axis"], of[OURS][0], of[OURS][-1]
        rows.append(
            {
                "solver, what changes": f"{name}, {series} {first[axis]} to {last[axis]}",
                "time per iteration": " to ".join(duration(r["solver_ms"]) for r in (first, last) if "solver_ms" in r),
                "time ~ x^": slope(of[OURS], axis, "solver_ms"),
                "torchdeq's": slope(of[PEER], axis, "solver_ms"),
                "memory ~ x^": slope(of[OURS], axis, "peak_bytes"),
                "its memory": slope(of[PEER], axis, "peak_bytes"),
                "gain over torchdeq": span([row["gain"] for row in of[OURS] if "gain" in row]),
            }
        )
    words = "One variable at a time around (32, 8192) and 20 iterations, f subtracted; exponents of the larger half."
    return Table("Scaling", words, rows)


def slope(rows: Sequence[Row], axis: str, column: str) -> str:
    """The exponent a of column ~ axis^a over the larger half of the points, where fixed costs have faded."""
    points = [(math.log(row[axis]), math.log(row[column])) for row in rows if row.get(column, 0) > 0]
    points = points[max(0, min(len(points) // 2, len(points) - 2)) :]
    return f"{statistics.linear_regression(*zip(*points, strict=True)).slope:.2f}" if len(points) > 1 else ""


def model(results: Results) -> Table:
    """A line for each size, gradient and solver of the model; torchdeq's and deqfast's images per second."""
    rows = results.rows("internet scale (model)")
    grouped: dict[str, dict[tuple[str, int], Row]] = {}
    for row in rows:
        name = ", ".join([row["size"], row["adjoint"], row["solver"].split()[0]])
        grouped.setdefault(name, {})[row["provider"], row["gpus"]] = row
    gpus = list(dict.fromkeys(row["gpus"] for row in rows))
    lines = []
    for name, of in grouped.items():
        rates = {
            f"images/s on {one}": " / ".join(f"{of[who, one]['images_per_second']:,.0f}" for who in (PEER, "deqfast"))
            for one in gpus
        }
        gain, most = of["deqfast", gpus[0]]["gain"], of["deqfast", gpus[-1]]
        end = {"gain": times(gain), f"all images on {gpus[-1]}": f"{digits(most['internet_s'] / 3600)} h"}
        lines.append({"model of": name} | rates | end)
    words = (
        "**A model, not a measurement**: training of MDEQ on H200 GPUs by torchdeq / deqfast, every operation at the "
        "longer of its bytes at the copy rate and its arithmetic at a share of a product's rate "
        "(`benchmarks/internet_scale.py`; every input and its source is in the record); last, 5.85 billion images once."
    )
    return Table("Model", words, lines)


def row_table(title: str, words: str, rows: Iterable[Row]) -> Table:
    """A line for each row that was timed; of solves the time per iteration without f."""
    lines = [
        {
            "row": f"{row['section']} {row['case']} {row['provider']}",
            "time": duration(row["solver_ms"] if "solver_ms" in row else row["ms_min"]),
            "of its byte floor": times(row["floor_x"]) if row.get("floor_x") else "",
            "gain": times(row["gain"]) if row.get("gain") else "",
            "evaluations": f"{row['evaluations']:g}" if "evaluations" in row else "",
            "gain is over": row.get("peer", ""),
        }
        for row in rows
        if "ms_min" in row
    ]
    return Table(title, words, lines)


def optional(results: Results) -> list[Table]:
    """Tables of what not every checkout has measured: options of a solve beside their absence, and GPUs."""
    found = [row for one in results.records if one not in results.gpus for row in one.rows]
    options = [row for row in found if row["section"] == "options"]
    given = [("Options", "What an option costs or gains beside its absence.", options)] if options else []
    given += [(one.machine["gpu"], f"{one.path.name}, {one.when}.", one.rows) for one in results.gpus]
    return [row_table(*table) for table in given]


def sources(results: Results) -> Table:
    rows = [
        {
            "record": f"[{one.path.name}](results/{one.path.name})",
            "machine": one.where,
            "versions": one.versions,
            "commit, date": one.when,
            "command, remark": "; ".join(
                filter(None, [f"`{one.command}`" if one.command else "command not recorded", one.remark])
            ),
        }
        for one in results.records
    ]
    return Table("Records", "What was measured, where and how; a command is one of the commit beside it.", rows)


def tables(results: Results) -> list[Table]:
    found = [targets(results), *suite(results), races(results), steps(results), scaling(results), model(results)]
    return [*found, *optional(results), sources(results)]


def page(results: Results) -> str:
    """The text of RESULTS.md."""
    lines = [
        "# Benchmark results",
        "",
        "Written by `python benchmarks/report.py` from the records in [results](results), which hold more: medians, "
        "quartiles, numbers of rounds, bytes, launches, host waits (to six digits). Here: the least of the rounds, "
        "with the most threads that a case was measured with; of several runs the median, behind a gain the least and "
        "the largest. deqfast is its kernel `cpp`. A byte floor is what the algorithm must move at the copy rate of "
        "the same run; a time below it is one of data that stayed in a cache.",
    ]
    if not results.gpus:
        lines += ["", "Not yet run on a GPU: no GPU time is reported. `bash benchmarks/gpu.sh` measures those targets."]
    for table in tables(results):
        lines += ["", f"## {table.title}", "", table.words, "", *table.lines()]
    return "\n".join(lines) + "\n"


def blocks(results: Results) -> dict[str, list[str]]:
    """What stands between the markers of each text."""
    solves, residual = suite(results)[0], races(results)
    few = ["deqfast", "torchdeq", "gain over torchdeq", "memory of torchdeq's"]
    words = "Solver time per iteration at (128, 8192) fp32, f subtracted; gains: median (least to largest) of the runs."
    made, raced = origin(results.of("solves")), origin(results.of("residual"))
    note = residual.words.partition("\n")[0]
    return {
        "README.md": [*solves.lines(few, SOLVERS), "", f"{words} {made}"],
        "docs/pages/performance.md": [
            *solves.lines(names=SOLVERS),
            "",
            f"{words} {made}",
            "",
            *residual.lines(),
            "",
            f"{note} {raced}",
        ],
    }


def origin(records: Sequence[Record]) -> str:
    """Where the numbers of a table come from: of the records with the most threads."""
    most = [one for one in records if one.threads == max(record.threads for record in records)]
    made = "; ".join(dict.fromkeys(f"{one.where}, {one.versions}" for one in most))
    return f"{made}, kernel `{OURS}`; torchdeq 0.1.0; commit {'; '.join(dict.fromkeys(one.when for one in most))}."


def facts(results: Results) -> dict[str, str]:
    """The numbers that sentences may quote: every cell of every table, and how many targets and cases there are."""
    found = {key: text for table in tables(results) for key, text in table.facts().items()}
    states = states_of(targets(results).rows)
    found |= {f"targets.{slug(state)}": str(number) for state, number in states.items()}
    compared = [
        statistics.median(own) < statistics.median(plain)
        for _, section, *_ in SUITE
        for case in results.cases(section)
        if (own := case.values(OURS, "ms_min")) and (plain := case.values("torch", "ms_min"))
    ]
    return found | {"targets.all": str(states.total()), "cpp.faster": str(sum(compared)), "cpp.all": str(len(compared))}


METHODS = {  # as it is called in the records -> name, colour of Okabe and Ito's palette
    "picard": ("Picard", "#009E73"),
    "fixed_point_iter": ("Picard", "#009E73"),
    "anderson": ("Anderson", "#0072B2"),
    "broyden": ("Broyden", "#D55E00"),
}
SHOWN = ("fully connected tanh, digits", "residual block, cifar10")


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def draw(courses: list[Row], made: str) -> bytes:
    """A PNG of the best residual so far of the worst sample against time, a panel for each problem.

    made: where the numbers come from. The PNG holds a digest of what it shows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    cases = list(dict.fromkeys(row["case"] for row in courses))
    figure, axes = pyplot.subplots(1, len(cases), figsize=(9.6, 4), sharey=True, squeeze=False, layout="constrained")
    for axis, case in zip(axes[0], cases, strict=True):
        own = [row for row in courses if row["case"] == case]
        axis.set_title(f"{case}: {own[0]['batch']} samples of {own[0]['dim']:,}", fontsize=10)
        axis.set(xlabel="time, f included (ms)", xscale="log", yscale="log", ylim=(3e-8, 3))
        axis.grid(alpha=0.25)
        for row in own:
            library, method = row["provider"].split()[:2]
            name, colour = METHODS[method]
            style = "-" if library == "deqfast" else "--"
            course = row["course"]
            values = [value or math.nan for value in course["residual"]]
            axis.plot(course["ms"], values, style, color=colour, lw=2, label=f"{name}, {library}")
    axes[0][0].set_ylabel("relative residual, worst sample")
    handles, labels = axes[0][0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=labels.__getitem__)  # a column for each method
    box: dict[str, Any] = {
        "loc": "outside lower center",
        "ncols": 3,
        "frameon": False,
        "fontsize": 9,
        "title_fontsize": 7,
    }
    figure.legend([handles[i] for i in order], [labels[i] for i in order], title=made, **box)
    large, small, information = io.BytesIO(), io.BytesIO(), PngInfo()
    figure.savefig(large, dpi=150)
    pyplot.close(figure)
    information.add_text("deqfast data", digest([courses, made]))
    Image.open(large).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(small, "PNG", pnginfo=information)
    return small.getvalue()


def with_block(text: str, block: Sequence[str], path: Path) -> str:
    """`text` with `block` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ReportError(f"{path}: needs once, in this order, the lines {BEGIN} and {END}")
    before, rest = text.split(BEGIN)
    return "\n".join([f"{before}{BEGIN}", "", *block, "", f"{END}{rest.split(END)[1]}"])


def wrong_numbers(text: str, known: Mapping[str, str]) -> Iterator[str]:
    """A sentence for every marked number that is neither the measured one nor a part of it ("18.6 to 22.4×")."""
    for marked in FACT.finditer(text):
        key, line = marked[1], text.count("\n", 0, marked.start()) + 1
        before = " ".join(text[: marked.start()][-80:].split())  # a line may end within a number's words
        if key not in known:
            yield f"line {line}: no number is called {key}; report.py --facts lists them"
            continue
        number = re.sub(r" \(\d+\)$", "", known[key])  # without the count behind a mean
        allowed = [known[key], number.partition(" of ")[0], *filter(None, re.split(r" \(|\)| / ", number))]
        if not any(re.search(rf"(?<![\w.,-]){re.escape(one)}$", before) for one in allowed):
            yield f"line {line}: {key} is {known[key]}, the text says …{before[-20:]!r}"


def run(root: Path, check: bool) -> list[str]:
    """Write or compare everything; what is wrong, if anything."""
    results = Results.read(root / "benchmarks" / "results")
    wanted = {root / "benchmarks" / "RESULTS.md": page(results)}
    for name, block in blocks(results).items():
        if (root / name).is_file():
            wanted[root / name] = with_block((root / name).read_text(), block, root / name)
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    figure = root / "benchmarks" / "results" / "time_to_residual.png"
    courses = [row for row in results.rows("residual course") if row["case"] in SHOWN]
    made = origin(results.of("residual course"))
    if not figure.is_file() or digest([courses, made]).encode() not in figure.read_bytes():
        stale.append(figure)
    for path in [] if check else stale:
        write_bytes(path, draw(courses, made) if path == figure else wanted[path].encode())
        print(f"written: {path}")
    known = facts(results)
    prose = [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.is_file()]
    wrong = [f"{path}, {problem}" for path in prose for problem in wrong_numbers(path.read_text(), known)]
    return [f"{path} is not what the records give: run python benchmarks/report.py" for path in stale if check] + wrong


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
