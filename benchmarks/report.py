"""Write what was measured: RESULTS.md, its figure and the blocks of numbers in README.md and the documentation.

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
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, linear_regression, median
from typing import Any

from harness.tables import (
    Form,
    Row,
    Table,
    digits,
    duration,
    megabytes,
    percent,
    scientific,
    slug,
    span,
    summary,
    table,
    times,
)
from harness.targets import GPU_TARGETS, TARGETS, Target

from deqfast.testing.records import write_bytes

Runs = dict[str, list[Row]]  # provider -> its row of every run
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
MACHINE = {
    "gpu": "{}",
    "processor": "{}",
    "cores": "{} cores",
    "threads": "{} threads",
    "deqfast": "deqfast {}",
    "torch": "torch {}",
    "triton": "triton {}",
    "python": "Python {}",
}
FACT = re.compile(r"<!-- ([\w-]+\.[\w.-]+) -->")
BEGIN, END = "<!-- numbers -->", "<!-- end of numbers -->"


class ReportError(Exception):
    """What keeps the report from being written, for a person to read."""


@dataclass(frozen=True)
class Record:
    """One file of rows, with what was recorded of the machine and of how it was measured."""

    path: Path
    machine: dict[str, Any]
    rows: list[Row]
    command: str | None = None
    date: str | None = None
    remark: str | None = None

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            return cls(path, **json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ReportError(f"{path}: no record: {error}") from None

    @property
    def threads(self) -> int:
        return self.machine.get("threads") or 0

    @property
    def where(self) -> str:
        """ "AMD EPYC, 2 cores, 1 thread, torch 2.15.0": what is recorded of the machine and its versions."""
        told = [form.format(self.machine[key]) for key, form in MACHINE.items() if self.machine.get(key)]
        return ", ".join(told).replace(" 1 threads", " 1 thread")

    @property
    def when(self) -> str:
        """ "e6f2888, 2026-11-21"; whether the checkout differed from the commit."""
        sha, plus, _ = str(self.machine.get("commit", "commit not recorded")).partition("+")
        return f"{sha[:7] if len(sha) == 40 else sha}{' with changes' if plus else ''}, {(self.date or 'no date')[:10]}"


@dataclass(frozen=True)
class Results:
    """Everything that the report is made from."""

    records: list[Record]

    @classmethod
    def read(cls, folder: Path, pattern: str = "*.json") -> Results:
        return cls([Record.read(path) for path in sorted(folder.glob(pattern))])

    def on_gpu(self, gpu: bool) -> list[Record]:
        return [record for record in self.records if bool(record.machine.get("gpu")) == gpu]

    def of(self, section: str) -> list[Record]:
        """The records of CPUs that hold rows of a section; a record that is missing is an error."""
        found = [one for one in self.on_gpu(False) if any(row["section"] == section for row in one.rows)]
        if not found:
            raise ReportError(f"no record under benchmarks/results has rows of section {section!r}: measure it first")
        return found

    def rows(self, section: str) -> list[Row]:
        return [row for record in self.of(section) for row in record.rows if row["section"] == section]

    def cases(self, section: str) -> dict[str, Runs]:
        """The rows of each case, of the records with the most threads that it was measured with."""
        found = [(one.threads, row) for one in self.of(section) for row in one.rows if row["section"] == section]
        most: dict[str, int] = {}
        for threads, row in found:
            most[row["case"]] = max(threads, most.get(row["case"], 0))
        cases: dict[str, Runs] = {}
        for threads, row in found:
            if threads == most[row["case"]]:
                cases.setdefault(row["case"], {}).setdefault(row["provider"], []).append(row)
        return cases


def values(runs: Runs, provider: str, column: str) -> list[float]:
    return [row[column] for row in runs.get(provider, []) if row.get(column) is not None]


def middle(runs: Runs, provider: str, column: str, form: Form) -> str:
    """The median of the runs; "" of none."""
    found = values(runs, provider, column)
    return form(median(found)) if found else ""


def hours(value: float) -> str:
    return f"{digits(value)} h"


FORMS: dict[str, Form] = {
    "ms": duration,
    "error": scientific,
    "nc_share": percent,
    "host_waits": digits,
    "paper_hours": hours,
}


def judged(results: Results, target: Target) -> dict[str, str]:
    """What is promised, what was measured, and whether all runs with the most threads meet it."""
    records = results.on_gpu(target.on_gpu)
    told = [(one.threads, value) for one in records if (value := target.value(one.rows)) is not None]
    found = [value for threads, value in told if threads == max(told)[0]]
    missed = sum(not target.met(value) for value in found)
    state = f"missed in {missed} of {len(found)} runs" if missed else "met"
    if not found:
        state = "not measured" + ": no GPU" * (target.on_gpu and not records)
    return {"target": target.what, "measured": span(found, FORMS.get(target.column, times)), "state": state}


def states(rows: Sequence[Mapping[str, str]]) -> Counter[str]:
    """How many targets are met, missed, not measured."""
    return Counter(row["state"].partition(" in ")[0] for row in rows)


def targets(results: Results) -> Table:
    body = [judged(results, target) for target in (*TARGETS, *GPU_TARGETS)]
    counts = ", ".join(f"{number} {state}" for state, number in states(body).items())
    words = f"Of {len(body)} targets: {counts}. All runs with the most threads have to meet a target."
    return Table("Targets", words, body)


# Title, section of the records, column of a row's time, words.
SUITE = (
    (
        "Solves",
        "solves",
        "solver_ms",
        "Solver time per iteration of 20, f subtracted; torchdeq's history is fp32 throughout. deqfast keeps the "
        "memory of a history for the next solve, torchdeq allocates and zeroes its own.",
    ),
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
    return [
        Table(title, words, [case_line(name, runs, time) for name, runs in cases.items()])
        for title, section, time, words in SUITE
        for cases in [results.cases(section)]
    ]


def case_line(name: str, runs: Runs, time: str) -> dict[str, str]:
    """The line of a case; `time`: the column of its rows that is shown, of several runs the median."""

    def gain(peer: str) -> str:
        found = [row["gains"][peer] for row in runs.get(OURS, []) if peer in row.get("gains", {})]
        return f"{times(median(found))} ({span(found)})" if " to " in span(found) else span(found)

    own, theirs = (values(runs, provider, "peak_bytes") for provider in (OURS, PEER))
    residuals = [middle(runs, provider, "residual", scientific) for provider in (OURS, PEER)]
    return {
        "case": name,
        **{text: middle(runs, provider, time, duration) for provider, text in PROVIDERS.items()},
        "gain over torchdeq": gain(PEER),
        "gain over the pseudo-inverse": gain("pinv"),
        "of its byte floor": middle(runs, OURS, "floor_x", times),
        "memory": middle(runs, OURS, "peak_bytes", megabytes) if theirs else "",
        "torchdeq, memory": middle(runs, PEER, "peak_bytes", megabytes),
        "memory of torchdeq's": times(median(own) / median(theirs)) if own and theirs else "",
        "residual, deqfast / torchdeq": " / ".join(residuals) if all(residuals) else "",
        "relative error": middle(runs, OURS, "error", scientific),
    }


def races(results: Results) -> tuple[Table, Table]:
    """A line for each solver: what it makes of the suite of problems, and its time on each cell that was trained."""
    rows = results.rows("residual")
    tolerances = sorted({row["tol"] for row in rows}, reverse=True)
    suite, cells = [], []
    for provider in dict.fromkeys(row["provider"] for row in rows):
        own = [row for row in rows if row["provider"] == provider]
        synthetic, trained = {"solver": provider}, {"solver": provider}
        for tol in tolerances:
            synthetic |= race([row for row in own if row["tol"] == tol and SYNTHETIC.search(row["case"])], f"{tol:g}")
        for row in own:
            if not SYNTHETIC.search(row["case"]):
                trained[f"{row['case']}, {row['tol']:g}"] = duration(row["ms"]) if row["reached"] else "missed"
        suite += [synthetic] if len(synthetic) > 1 else []
        cells += [trained] if len(trained) > 1 else []
    problems = {row["case"] for row in rows if SYNTHETIC.search(row["case"])}
    words = (
        "Each solver until the worst sample's relative residual in float64 is within the tolerance, f included, at "
        f"most 60 evaluations: of {len(problems)} synthetic problems how many were missed, the median of evaluations, "
        "the geometric mean of the gain over torchdeq's same method (over how many problems). torchdeq's Anderson "
        "ships with an absolute ridge, `lam=1e-4`."
    )
    trained_words = (
        "The same on cells that were trained: time, or that a sample missed. `torch …` is deqfast with that kernel.\n\n"
        "![Residual against time on two trained cells](results/time_to_residual.png)"
    )
    return Table("Residual", words, suite), Table("Cells", trained_words, cells)


def race(rows: Sequence[Row], tol: str) -> dict[str, str]:
    """A solver's rows of the suite to a tolerance: how many it missed, evaluations, gain over torchdeq.

    The evaluations are the median, the most there may be where the tolerance was missed; the gain is the geometric mean
    over the problems that torchdeq's same method solves too, whose number stands behind it.
    """
    if not rows:
        return {}
    gains = [row["gain"] for row in rows if row["reached"] and "gain" in row]
    evaluations = [row["evaluations" if row["reached"] else "most_evaluations"] for row in rows]
    return {
        f"missed, {tol}": f"{sum(not row['reached'] for row in rows)} of {len(rows)}",
        f"evaluations, {tol}": f"{median(evaluations):g}",
        f"gain, {tol}": f"{times(geometric_mean(gains))} ({len(gains)})" if gains else "",
    }


STEP: dict[str, tuple[str, str, Form]] = {  # heading -> provider, column and form
    "threads": ("deq", "threads", "{:g}".format),
    "explicit step": ("explicit", "ms", duration),
    "DEQ step": ("deq", "ms", duration),
    "evaluations": ("deq", "evaluations", "{:.1f}".format),
    "DEQ over explicit": ("deq", "times_explicit", times),
    "operations": ("deq", "flop_ratio", times),
    "time over operations": ("deq", "over_flop", times),
    "NC1-NC4 of an epoch": ("explicit", "nc_share", percent),
    "paper, explicit": ("explicit", "paper_hours", hours),
    "paper, DEQ": ("deq", "paper_hours", hours),
}


def steps(results: Results) -> Table:
    words = (
        "A training step of the study's two networks in turns, medians; the 20 trainings of each in the paper are "
        "extrapolated."
    )
    rows = [
        {"networks": name} | {heading: middle(runs, *column) for heading, column in STEP.items()}
        for name, runs in results.cases("training step").items()
    ]
    return Table("Step", words, rows)


def scaling(results: Results) -> Table:
    """A line for each curve: time per iteration at its ends, how it and the memory grow, and the gain."""
    curves: dict[tuple[str, str], Runs] = {}
    for row in results.rows("scaling"):
        if "solver_ms" in row:
            curves.setdefault((row["solver"], row["axis"]), {}).setdefault(row["provider"], []).append(row)
    rows = []
    for (solver, axis), curve in curves.items():
        own, theirs = curve[OURS], curve.get(PEER, [])
        rows.append(
            {
                "solver, what changes": f"{solver}, {axis} {own[0][axis]} to {own[-1][axis]}",
                "time per iteration": " to ".join(duration(row["solver_ms"]) for row in (own[0], own[-1])),
                "time ~ x^": slope(own, axis, "solver_ms"),
                "torchdeq's": slope(theirs, axis, "solver_ms"),
                "memory ~ x^": slope(own, axis, "peak_bytes"),
                "its memory": slope(theirs, axis, "peak_bytes"),
                "gain over torchdeq": span(values(curve, OURS, "gain")),
            }
        )
    words = "One variable at a time around (32, 8192) and 20 iterations, f subtracted; exponents of the larger half."
    return Table("Scaling", words, rows)


def slope(rows: Sequence[Row], axis: str, column: str) -> str:
    """The exponent a of column ~ axis^a over the larger half of the points, where fixed costs have faded."""
    points = [(math.log(row[axis]), math.log(row[column])) for row in rows if row.get(column, 0) > 0]
    points = points[max(0, min(len(points) // 2, len(points) - 2)) :]
    return f"{linear_regression(*zip(*points, strict=True)).slope:.2f}" if len(points) > 1 else ""


def model(results: Results) -> Table:
    """A line for each size, gradient and solver of the model; torchdeq's and deqfast's images per second."""
    grouped: dict[str, dict[int, dict[str, Row]]] = {}  # name -> number of GPUs -> provider
    for row in results.rows("internet scale (model)"):
        name = ", ".join([row["size"], row["adjoint"], row["solver"].split()[0]])
        grouped.setdefault(name, {}).setdefault(row["gpus"], {})[row["provider"]] = row
    lines = []
    for name, of_gpus in grouped.items():
        line = {"model of": name}
        for gpus, (theirs, own) in ((gpus, (found[PEER], found["deqfast"])) for gpus, found in of_gpus.items()):
            line[f"images/s on {gpus}"] = " / ".join(f"{row['images_per_second']:,.0f}" for row in (theirs, own))
        line["gain"] = times(of_gpus[min(of_gpus)]["deqfast"]["gain"])
        line[f"all images on {gpus}"] = " / ".join(hours(row["internet_s"] / 3600) for row in (theirs, own))
        lines.append(line)
    words = (
        "**A model, not a measurement**: training of MDEQ on H200 GPUs by torchdeq / deqfast, every operation at the "
        "longer of its bytes at the copy rate and its arithmetic at a share of a product's rate "
        "(`benchmarks/internet_scale.py`; every input and its source is in the record); last, 5.85 billion images once."
    )
    return Table("Model", words, lines)


def optional(results: Results) -> list[Table]:
    """Tables of what not every checkout has: what was wrong, and GPUs."""
    rows = [row for one in results.on_gpu(False) for row in one.rows]
    wrong = [
        {"row": f"{row['section']} {row['case']} {row['provider']}", "fault": row["fault"]}
        for row in rows
        if "fault" in row
    ]
    found = [Table("Faults", "What was not timed, as it failed or its answer is wrong.", wrong)] if wrong else []
    for gpu in dict.fromkeys(record.machine["gpu"] for record in results.on_gpu(True)):
        own = [record for record in results.on_gpu(True) if record.machine["gpu"] == gpu]
        words = "; ".join(f"{record.path.name}, {record.when}" for record in own) + "."
        found.append(table([row for record in own for row in record.rows], gpu, words))
    return found


def sources(results: Results) -> Table:
    rows = [
        {
            "record": f"[{one.path.name}](results/{one.path.name})",
            "machine": one.where,
            "commit, date": one.when,
            "command, remark": "; ".join(filter(None, [one.command and f"`{one.command}`", one.remark])),
        }
        for one in results.records
    ]
    return Table("Records", "What was measured, where and how; a command is one of the commit beside it.", rows)


def tables(results: Results) -> list[Table]:
    found = [targets(results), *suite(results), *races(results), steps(results), scaling(results), model(results)]
    return [*found, *optional(results), sources(results)]


def page(results: Results) -> str:
    """The text of RESULTS.md."""
    lines = [
        "# Benchmark results",
        "",
        "Written by `python benchmarks/report.py` from the records in [results](results), which hold more: medians, "
        "quartiles, numbers of rounds, bytes, launches, host waits (to six digits), and single ops; `python "
        "benchmarks/report.py --show benchmarks/results` prints the times of all rows. Here: the least of the rounds, "
        "with the most threads that a case was measured with; of several runs the median, behind a gain the least and "
        "the largest. deqfast is its kernel `cpp`. A byte floor is what the algorithm must move at the copy rate of "
        "the same run; a time below it is one of data that stayed in a cache.",
    ]
    if not results.on_gpu(True):
        lines += ["", "Not yet run on a GPU: no GPU time is reported. `bash benchmarks/gpu.sh` measures those targets."]
    for one in tables(results):
        lines += ["", f"## {one.title}", "", one.words, "", *one.lines()]
    return "\n".join(lines) + "\n"


def blocks(results: Results) -> dict[str, list[str]]:
    """What stands between the markers of each text."""
    solves, (residual, cells) = suite(results)[0], races(results)
    few = ["deqfast", "torchdeq", "gain over torchdeq", "memory of torchdeq's"]
    words = "Solver time per iteration at (128, 8192) fp32, f subtracted; gains: median (least to largest) of the runs."
    note = ["", f"{words} {origin(results.of('solves'))}"]
    return {
        "README.md": [*solves.lines(few, SOLVERS), *note],
        "docs/pages/performance.md": [
            *solves.lines(names=SOLVERS),
            *note,
            "",
            *residual.lines(),
            "",
            f"{residual.words} {origin(results.of('residual'))}",
        ],
        "docs/pages/choosing.md": cells.lines(),
    }


def origin(records: Sequence[Record]) -> str:
    """Where the numbers of a table come from: of the records with the most threads."""
    most = [one for one in records if one.threads == max(record.threads for record in records)]
    made = "; ".join(dict.fromkeys(one.where for one in most))
    return f"{made}, kernel `{OURS}`; torchdeq 0.1.0; commit {'; '.join(dict.fromkeys(one.when for one in most))}."


def facts(results: Results) -> dict[str, str]:
    """The numbers that sentences may quote: every entry of every table, and how many targets and cases there are."""
    found = {key: text for one in tables(results) for key, text in one.facts().items()}
    counts = states(targets(results).rows)
    found |= {f"targets.{slug(state)}": str(number) for state, number in counts.items()}
    compared = [
        median(own) < median(plain)
        for section in ("solves", "ops", "training", "fc", "nc")
        for runs in results.cases(section).values()
        if (own := values(runs, OURS, "ms_min")) and (plain := values(runs, "torch", "ms_min"))
    ]
    found |= {"targets.all": str(counts.total()), "cpp.faster": str(sum(compared)), "cpp.all": str(len(compared))}
    block = [row for row in results.rows("residual") if row["case"] == SHOWN[1] and row["reached"]]
    shares = [row["f_ms"] / row["ms_min"] for row in block if row["provider"].startswith("deqfast")]
    return found | option_facts(results) | {"cells.residual-block.f-of-a-solve": span(shares, percent)}


COUNTED: dict[str, Form] = {  # the columns of the options' cases that are the same on every machine
    "evaluations": "{:g}".format,
    "sample_evaluations": "{:g}".format,
    "samples_missed": "{:g}".format,
    "error": digits,
    "peak_bytes": megabytes,
}


def option_facts(results: Results) -> dict[str, str]:
    """What was counted on the cases of the options, as "options.trace-128x8192.trace.peak-bytes"."""
    return {
        f"options.{slug(row['case'])}.{slug(row['provider'])}.{column.replace('_', '-')}": form(row[column])
        for row in results.rows("options")
        for column, form in COUNTED.items()
        if row.get(column) is not None
    }


METHODS = {  # as it is called in the records -> name, colour of Okabe and Ito's palette
    "picard": ("Picard", "#009E73"),
    "fixed_point_iter": ("Picard", "#009E73"),
    "anderson": ("Anderson", "#0072B2"),
    "broyden": ("Broyden", "#D55E00"),
}
SHOWN = ("fully connected tanh, digits", "residual block, cifar10")


def draw(courses: list[Row], made: str, digest: str) -> bytes:
    """A PNG of the best residual so far of the worst sample against time, a panel for each problem.

    made: where the numbers come from; digest: of all that is shown, which the PNG holds.
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
            style, label = "-" if library == "deqfast" else "--", f"{name}, {library}"
            residuals = [value or math.nan for value in row["course"]["residual"]]
            axis.plot(row["course"]["ms"], residuals, style, color=colour, lw=2, label=label)
    axes[0][0].set_ylabel("relative residual, worst sample")
    handles, labels = axes[0][0].get_legend_handles_labels()
    labels, handles = zip(*sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0]), strict=True)
    legend = figure.legend(handles, labels, title=made, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    legend.get_title().set_fontsize(7)
    large, small, information = io.BytesIO(), io.BytesIO(), PngInfo()
    figure.savefig(large, dpi=150)
    pyplot.close(figure)
    information.add_text("deqfast data", digest)
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
    digest = hashlib.sha256(json.dumps([courses, made]).encode()).hexdigest()
    if not figure.is_file() or digest.encode() not in figure.read_bytes():
        stale.append(figure)
    for path in [] if check else stale:
        write_bytes(path, draw(courses, made, digest) if path == figure else wanted[path].encode())
        print(f"written: {path}")
    known = facts(results)
    prose = [path for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))] if path.is_file()]
    wrong = [f"{path}, {fault}" for path in prose for fault in wrong_numbers(path.read_text(), known)]
    return [f"{path} is not what the records give: run python benchmarks/report.py" for path in stale if check] + wrong


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything is outdated")
    parser.add_argument("--facts", action="store_true", help="print the keys and numbers that sentences may quote")
    parser.add_argument("--show", type=Path, metavar="FOLDER", help="print the times of the rows of the records there")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    given = parser.parse_args(argv)
    try:
        if given.show:
            records = Results.read(given.show, "*.json*").records  # .json.part: of a run that did not come to its end
            if not records:
                raise ReportError(f"--show {given.show}: no records (*.json) there")
            print("\n".join(summary([row for one in records for row in one.rows])))
            return
        if given.facts:
            known = facts(Results.read(given.root / "benchmarks" / "results"))
            print("\n".join(f"{key:<40} {text}" for key, text in known.items()))
            return
        faults = run(given.root, given.check)
    except ReportError as error:
        faults = [str(error)]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
