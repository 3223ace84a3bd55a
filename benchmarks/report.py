"""Write the measured numbers: the tables and the figure of RESULTS.md, README.md and the documentation.

    python benchmarks/report.py            write them from the records under benchmarks/results
    python benchmarks/report.py --check    write nothing; status 1 if a table, the figure or a number is outdated
    python benchmarks/report.py --facts    list the numbers that a sentence may quote

A table lies between `<!-- numbers: its name -->` and `<!-- end of numbers -->`. Sentences are written by people. A
number in one of them is followed by an invisible comment with its key, as in
`18.6 to 22.4×<!-- solves.broyden-n20-128x8192.gain-over-torchdeq -->`, and --check compares the two. The rows that the
documentation shows, and their names there, are in benchmarks/shown.json. Nothing is measured here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from harness.record import Row
from harness.tables import FORMS, Form, Table, digits, duration, scientific, slug, span, summary, table, times, written
from harness.targets import TARGETS, Target
from recording import write_bytes

Runs = dict[str, list[Row]]  # provider -> its row of every run
Text = Callable[[Runs], str]  # of a column of a table
ROOT = Path(__file__).resolve().parent.parent
SHOWN: dict[str, Any] = json.loads(Path(__file__).with_name("shown.json").read_text())
OURS, PEER, LAYER = "cpp", "torchdeq", "get_deq"
SECTIONS = {"Layers": "training", "Step": "training step"}  # of the tables whose title is not their section
MODEL_TIMES = {"forward": "forward_ms", "training": "ms"}  # heading -> column of a published model's row
MARGIN = 0.05  # a smaller share of a time does not count
SYNTHETIC = re.compile(r", b [\d.e-]+$")  # suffix of the names of the suite's problems: the scale of their injection
JUDGES = {"H100": ("H100",), "H200": ("H200", "H100")}  # GPUs that judge a target, the first that measured it
TIGHT = 1e-5  # tolerance of the suite of problems in a figure
DIGEST = "deqfast data"  # entry of a figure's PNG
FACT = re.compile(r"<!-- ([\w-]+\.[\w.-]+) -->")
BLOCK = re.compile(r"(<!-- numbers: ([\w ]+) -->)\n.*?(<!-- end of numbers -->|(?=<!-- numbers)|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Record:
    """File of rows, with its record of the machine and of the measurement."""

    path: Path
    machine: dict[str, Any]
    command: str
    date: str
    remark: str | None
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            return cls(path, **json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            sys.exit(f"{path}: no record: {error}")

    @property
    def threads(self) -> int:
        return self.machine["threads"]

    @property
    def where(self) -> str:
        """Machine and versions, such as "AMD EPYC, 2 cores, 1 thread, torch 2.15.0"."""
        machine = self.machine
        parts = [machine["gpu"], machine["processor"], f"{machine['cores']} cores"]
        parts.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        parts += [f"{name} {machine[name]}" for name in ("deqfast", "torch", "triton") if machine[name]]
        return ", ".join(filter(None, [*parts, f"Python {machine['python']}"]))

    @property
    def when(self) -> str:
        """Commit and date, such as "e6f2888, 2026-11-21", and whether the checkout differed from the commit."""
        sha, changed, _ = self.machine["commit"].partition("+")
        return f"{sha[:7]}{' with changes' if changed else ''}, {self.date[:10]}"


@dataclass(frozen=True)
class Results:
    """All records."""

    records: list[Record]

    @classmethod
    def read(cls, folder: Path, pattern: str = "*.json") -> Results:
        return cls([Record.read(path) for path in sorted(folder.glob(pattern))])

    def on_gpu(self, gpu: bool) -> list[Record]:
        """Records of GPUs, by date, or of CPUs."""
        chosen = [record for record in self.records if bool(record.machine["gpu"]) == gpu]
        return sorted(chosen, key=lambda record: record.date) if gpu else chosen

    def having(self, section: str) -> list[Record]:
        """Records of CPUs with their rows of a section, the most threads first; raises an error without any."""
        own = [
            replace(record, rows=[row for row in record.rows if row["section"] == section])
            for record in self.on_gpu(False)
        ]
        some = sorted((record for record in own if record.rows), key=lambda record: -record.threads)
        return some or sys.exit(f"no record under benchmarks/results has rows of section {section!r}: measure it first")

    def cases(self, section: str) -> dict[str, Runs]:
        """Rows of each case, from the records with its most threads."""
        most: dict[str, int] = {}
        cases: dict[str, Runs] = {}
        for record in self.having(section):
            for row in record.rows:
                if most.setdefault(row["case"], record.threads) == record.threads:
                    cases.setdefault(row["case"], {}).setdefault(row["provider"], []).append(row)
        return cases

    def origin(self, section: str) -> str:
        """Origin of a table's numbers, from the records with the most threads."""
        records = self.having(section)
        most = [record for record in records if record.threads == records[0].threads]
        where, when = (
            "; ".join(dict.fromkeys(words))
            for words in zip(*((record.where, record.when) for record in most), strict=True)
        )
        return f"{where}, kernel `{OURS}`; torchdeq 0.1.0; commit {when}."


def values(runs: Runs, provider: str, column: str) -> list[float]:
    return [row[column] for row in runs.get(provider, []) if row.get(column) is not None]


def centred(some: Sequence[float], form: Form = times) -> str:
    """Median, with the least and the largest in brackets if their texts differ: "20.0× (18.6 to 22.4×)"."""
    ends = span(some, form)
    return f"{form(median(some))} ({ends})" if " to " in ends else ends


# Texts of columns. The number of several runs is their median.


def numbers(column: str, *providers: str, partial: bool = False, form: Form | None = None) -> Text:
    """Numbers of the providers, joined by " / "; "" if any is absent, except for `partial`."""

    def text(runs: Runs) -> str:
        each = [values(runs, provider, column) for provider in providers]
        parts = [(form(median(some)) if form else written(column, median(some))) if some else "" for some in each]
        return " / ".join(filter(None, parts)) if partial or all(parts) else ""

    return text


def gain(peer: str, form: Callable[[Sequence[float]], str] = centred) -> Text:
    return lambda runs: form([row["gains"][peer] for row in runs.get(OURS, []) if peer in row.get("gains", {})])


def share(column: str) -> Text:
    """A column relative to torchdeq's."""

    def text(runs: Runs) -> str:
        own, theirs = (values(runs, provider, column) for provider in (OURS, PEER))
        return times(median(own) / median(theirs)) if own and theirs else ""

    return text


def ratios(runs: Runs, column: str) -> list[float]:
    """Time of a published model with the layer of ``deqfast.compat`` over its time with torchdeq, in every run."""
    return [own[column] / peer[column] for own, peer in zip(runs[LAYER], runs[PEER], strict=True)]


def worst(column: str) -> Text:
    """Largest difference of a published model's values from torchdeq's."""
    return lambda runs: scientific(largest) if (largest := max(values(runs, LAYER, column))) else "0"


# First word of a column in shown.json -> its text from the other words. Any other first word is a column of the rows,
# whose providers follow.
TEXTS: dict[str, Callable[..., Text]] = {
    "gain": gain,
    "gains": partial(gain, form=span),
    "share": share,
    "paired": lambda column: lambda runs: numbers(column, OURS)(runs) if values(runs, PEER, column) else "",
    "some": partial(numbers, partial=True),
    "mean": partial(numbers, form="{:g}".format),
    "worst": worst,
    "ratio": lambda column: lambda runs: centred(ratios(runs, column), digits),
    "of": lambda column: lambda runs: runs[LAYER][0][column],
}


def columns(section: str) -> dict[str, Text]:
    """Columns of a table of shown.json, by their headings."""
    specified = SHOWN["tables"][section]
    if "time" in specified:
        specified = {heading: text.replace("TIME", specified["time"]) for heading, text in SHOWN["suite"].items()}
    words = {heading: text.split() for heading, text in specified.items()}
    return {heading: TEXTS.get(kind, partial(numbers, kind))(*rest) for heading, (kind, *rest) in words.items()}


def made(results: Results, title: str) -> Table:
    """Table of a section, which is its title in lower case unless ``SECTIONS`` has it."""
    section = SECTIONS.get(title, slug(title))
    first = {"models": "model", "training step": "networks"}.get(section, "case")
    lines = [
        {first: name} | {heading: text(runs) for heading, text in columns(title).items()}
        for name, runs in results.cases(section).items()
    ]
    return Table(title, lines)


def judged(results: Results, target: Target) -> dict[str, str]:
    """Target, measured value, and whether all runs meet it; on a CPU those with the most threads."""
    records = results.on_gpu(target.on_gpu)
    all_runs: list[tuple[int, float]] = []
    for machine in JUDGES.get(target.set_for, ("",)):
        own = [record for record in records if machine in (record.machine["gpu"] or "")]
        measured = [(record.threads, value) for record in own if (value := target.value(record.rows)) is not None]
        all_runs = all_runs or measured
    some = [value for threads, value in all_runs if target.on_gpu or threads == max(all_runs)[0]]
    missed = sum(not target.met(value) for value in some)
    state = f"missed in {missed} of {len(some)} runs" if missed else "met"
    if not some:
        state = "not measured: no GPU" if target.on_gpu and not records else "not measured"
        state = "missed until measured" if target.awaited else state
    form: Form = times if target.against else FORMS.get(target.column, digits)
    return {"target": target.what, "measured": span(some, form), "state": state}


def targets(results: Results) -> Table:
    return Table("Targets", [judged(results, target) for target in TARGETS])


def model_facts(results: Results) -> dict[str, str]:
    """Median of the ratios of all published models and of the whole ones, and how many of them gain.

    A model gains if its training step is shorter by ``MARGIN`` in every run, and loses if it is longer by that.
    """
    every = [*results.cases("models").values()]
    facts = {}
    for kind, cases in {"all": every, "whole": [runs for runs in every if runs[LAYER][0]["whole"]]}.items():
        for title, column in MODEL_TIMES.items():
            facts[f"models.{kind}.{title}"] = digits(median(median(ratios(runs, column)) for runs in cases))
        training = [ratios(runs, "ms") for runs in cases]
        gaining = [median(ratio) for ratio in training if max(ratio) <= 1 - MARGIN]
        losing = sum(min(ratio) >= 1 + MARGIN for ratio in training)
        facts[f"models.{kind}.gain"] = f"{len(gaining)} of {len(cases)}"
        facts[f"models.{kind}.lose"] = f"{losing} of {len(cases)}"
        facts[f"models.{kind}.gaining"] = span(gaining, digits)
    return facts


def clones(results: Results) -> str:
    """Commits of the models' repositories."""
    sources = dict.fromkeys(row["source"] for runs in results.cases("models").values() for row in runs[LAYER])
    parts = [f"{name} {commit[:7]}" for name, _, commit in (source.partition("@") for source in sources)]
    return f"Repositories: {', '.join(parts)}."


def layers(results: Results) -> list[str]:
    """The training step of whole layers on a CPU, and the gain over torchdeq on each kind of GPU.

    Evaluations and residuals are deqfast's and torchdeq's. On a GPU the evaluations are in brackets.
    """
    texts, lines = columns("Layers"), []
    trained = [record for record in results.on_gpu(True) if any(row["section"] == "training" for row in record.rows)]
    trained.sort(key=results.records.index)
    for name, runs in results.cases("training").items():
        short = {"training step": name} | {
            title: texts[title](runs) for title in ("deqfast", PEER, "gain over torchdeq")
        }
        short |= {what: texts[f"{what}, deqfast / torchdeq"](runs) for what in ("evaluations", "residual")}
        short |= {f"gain, {record.machine['gpu']}": "" for record in trained}
        for record in trained:
            rows = {row["provider"]: row for row in reversed(record.rows) if row["case"] == name}
            if "cuda" in rows and PEER in rows:
                both = f"{rows['cuda']['evaluations']} / {rows[PEER]['evaluations']}"
                short[f"gain, {record.machine['gpu']}"] = f"{span([rows['cuda']['gains'][PEER]])} ({both})"
        lines.append(short)
    on_gpus = [
        f"{record.machine['gpu']}: kernel `cuda`, torch {record.machine['torch']}; commit {record.when}."
        for record in trained
    ]
    return [*Table("", lines).lines(names=SHOWN["layers"]), "", results.origin("training"), *on_gpus]


def raced(results: Results) -> list[Row]:
    """Row of each problem, solver and tolerance: the medians of the time and the gain over the runs, and whether every
    run reached the tolerance."""
    kinds: dict[tuple[str, str, float], list[Row]] = {}
    for solvers in results.cases("residual").values():
        for row in chain(*solvers.values()):
            kinds.setdefault((row["case"], row["provider"], row["tol"]), []).append(row)
    return [
        runs[0]
        | {name: median(some) for name in ("ms", "gain") if (some := [run[name] for run in runs if name in run])}
        | {"reached": all(run["reached"] for run in runs)}
        for runs in kinds.values()
    ]


def races(results: Results) -> tuple[Table, Table]:
    """A line for each solver: its results on the suite of problems, and its time on each trained cell."""
    suite, cells = [], []
    solvers: dict[str, list[Row]] = {}
    for row in raced(results):
        solvers.setdefault(row["provider"], []).append(row)
    for solver, rows in solvers.items():
        solved = [row for row in rows if SYNTHETIC.search(row["case"])]
        trained = {
            f"{row['case']}, {row['tol']:g}": duration(row["ms"]) if row["reached"] else "missed"
            for row in rows
            if row not in solved
        }
        cells += [{"solver": solver} | trained] if trained else []
        suite += [{"solver": solver} | race(solved)] if solved else []
    return Table("Residual", suite), Table("Cells", cells)


def race(rows: Sequence[Row]) -> dict[str, str]:
    """Results of a solver's rows of the suite, for each tolerance: how many it missed, evaluations, gain over torchdeq.

    The evaluations are the median; a missed tolerance counts as the most evaluations. The gain is the geometric mean
    over the problems that torchdeq's same method solves too. Their number follows the gain.
    """
    line = {}
    for tol in sorted({row["tol"] for row in rows}, reverse=True):
        own = [row for row in rows if row["tol"] == tol]
        gains = [row["gain"] for row in own if row["reached"] and "gain" in row]
        evaluations = [row["evaluations" if row["reached"] else "most_evaluations"] for row in own]
        line[f"missed, {tol:g}"] = f"{sum(not row['reached'] for row in own)} of {len(own)}"
        line[f"evaluations, {tol:g}"] = f"{median(evaluations):g}"
        line[f"gain, {tol:g}"] = f"{times(geometric_mean(gains))} ({len(gains)})" if gains else ""
    return line


WITHOUT_TIMES = ("extension", "profile")  # sections of phases of gpu.sh


def on_gpus(results: Results) -> list[Table]:
    """The timed rows of each kind of GPU; of several runs of a case, its newest."""
    kinds: dict[str, dict[tuple[str, str, str], Row]] = {}
    for record in results.on_gpu(True):
        timed = [row for row in record.rows if row["section"] not in WITHOUT_TIMES]
        rows = {(row["section"], row["case"], row["provider"]): row for row in timed}
        kinds.setdefault(record.machine["gpu"], {}).update(rows)
    return [table(list(rows.values()), gpu) for gpu, rows in kinds.items()]


def sources(results: Results) -> Table:
    rows = [
        {
            "record": f"[{record.path.name}](results/{record.path.name})",
            "machine": record.where,
            "commit, date": record.when,
            "command, remark": "; ".join(filter(None, [f"`{record.command}`", record.remark])),
        }
        for record in results.records
    ]
    return Table("Records", rows)


def tables(results: Results) -> list[Table]:
    solves, layers, fc, nc, rivals, textbook, step, models = (made(results, title) for title in SHOWN["tables"])
    some = [targets(results), solves, layers, fc, nc, rivals, textbook, *races(results), step, models]
    return [*some, sources(results), *on_gpus(results)]


def options(results: Results) -> Table:
    """A line for each provider of each case of the options."""
    lines = [
        {"row": f"{name}.{provider}"}
        | {column: numbers(column, provider)(runs) for column in SHOWN["columns"]}
        | {"error": span(values(runs, provider, "error"), digits)}  # not a rounding error, but a share
        for name, runs in results.cases("options").items()
        for provider in runs
    ]
    return Table("Options", lines)


def gradients(results: Results) -> Table:
    """Time of each adjoint's gradient, and its error, on each cell."""
    rows = {row["row"]: row for row in options(results).rows}
    return Table(
        "",
        [
            {"adjoint": shown}
            | {
                f"{cell}: {title}": rows[f"{case}.{adjoint}"][column]
                for case, cell in SHOWN["cells"].items()
                for title, column in SHOWN["gradient columns"].items()
            }
            for adjoint, shown in SHOWN["adjoints"].items()
        ],
    )


def blocks(results: Results) -> dict[str, list[str]]:
    """Lines of each block of numbers by its name: every table, and the blocks of README and the documentation."""
    named = {slug(part.title): part for part in tables(results)}
    promised = [row for row in named["targets"].rows if row["measured"] or "until" in row["state"]]
    solves, gpus = named["solves"], on_gpus(results)
    few = ["deqfast", "torchdeq", "gain over torchdeq", "memory relative to torchdeq"]
    return {name: part.lines() for name, part in named.items()} | {
        "targets": Table("", promised).lines(),
        "solvers in short": [*solves.lines(few, SHOWN["solvers"]), "", results.origin("solves")],
        "layers in short": layers(results),
        "models and machine": [*named["models"].lines(), "", results.origin("models"), clones(results)],
        "gradients": gradients(results).lines(),
        "gpus": [line for part in gpus for line in (f"### {part.title}", "", *part.lines(), "", part.words)]
        or ["Not yet run on a GPU: no GPU time is reported. `bash benchmarks/gpu.sh` measures those targets."],
    }


def facts(results: Results) -> dict[str, str]:
    """Numbers that sentences may quote: every entry of every table, the options' gains, counts of targets."""
    known = {key: text for part in (*tables(results), options(results)) for key, text in part.facts().items()}
    known |= {f"calls.{method}.get-deq": text for method, text in calls(results).items()}
    known |= model_facts(results)
    counts = Counter(re.split(r" in | until |:", row["state"])[0] for row in targets(results).rows)
    known |= {f"targets.{slug(state)}": str(number) for state, number in counts.items()}
    known["targets.until-measured"] = str(sum("until" in row["state"] for row in targets(results).rows))
    return known | {"targets.all": str(counts.total())}


def calls(results: Results) -> dict[str, str]:
    """Time per call of the layer of ``get_deq`` relative to torchdeq, least to largest, by solver."""
    shares: dict[str, list[float]] = {}
    for name, runs in results.cases("calls").items():
        shares.setdefault(name.partition("-")[0], []).extend(1 / row["gains"][PEER] for row in runs[LAYER])
    return {method: span(some, digits) for method, some in shares.items()}


@dataclass(frozen=True)
class Figure:
    """Figure of rows, drawn by the function of ``harness.figures`` with the arguments `given` after the rows."""

    name: str
    draw: str
    rows: Sequence[Row]
    given: tuple[Any, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.rows, *self.given]).encode()).hexdigest()

    def png(self) -> bytes:
        figures = importlib.import_module("harness.figures")  # late, as only new figures need matplotlib
        return getattr(figures, self.draw)(self.rows, *self.given, **{DIGEST: self.digest})


def figures(results: Results) -> Iterator[Figure]:
    """All figures, with the rows that they show."""
    runs = results.having("options")
    gradient_rows = [row for row in runs[0].rows if row["case"] in SHOWN["gradients"]]
    origin = f"First of {len(runs)} runs. {results.origin('options')}".replace("`", "")
    names = {key: SHOWN[key] for key in ("gradients", "adjoints")}
    yield Figure("gradient_error", "gradient_errors", gradient_rows, (origin, names))
    yield Figure("layer_gains", "ratios", layer_gains(results), ("A training step of one layer with deqfast",))
    title = "A training step of published models with deqfast, on a CPU"
    yield Figure("model_ratios", "ratios", model_ratios(results), (title,))
    yield Figure("state_sizes", "state_sizes", state_sizes(results))
    suite = [row for row in raced(results) if SYNTHETIC.search(row["case"]) and row["tol"] == TIGHT]
    shown = [row for row in suite if row["provider"] in SHOWN["drawn racers"]]
    yield Figure("problems_solved", "problems_solved", shown, (len({row["case"] for row in suite}),))


def whisker(some: Sequence[float]) -> tuple[float, float, float]:
    return min(some), median(some), max(some)


def layer_gains(results: Results) -> list[Row]:
    """Gains over torchdeq of whole layers, on a CPU over the runs and on each kind of GPU."""
    lines = []
    for case, name in SHOWN["drawn layers"].items():
        runs = results.cases("training")[case][OURS]
        gains = {"2 cores of a CPU": whisker([row["gains"][PEER] for row in runs])}
        for record in results.on_gpu(True):
            some = [row["gains"][PEER] for row in record.rows if (row["case"], row["provider"]) == (case, "cuda")]
            gains |= {record.machine["gpu"].removesuffix(" HBM3"): whisker(some)} if some else {}
        lines.append({"name": name, "values": gains})
    return lines


def model_ratios(results: Results) -> list[Row]:
    """Gains over torchdeq in training steps of published models, the largest first."""
    lines = [
        {"name": name.replace("`", ""), "values": {"training": whisker([1 / ratio for ratio in ratios(runs, "ms")])}}
        for name, runs in results.cases("models").items()
    ]
    return sorted(lines, key=lambda line: -line["values"]["training"][1])


def state_sizes(results: Results) -> list[Row]:
    """Times per iteration without f by the elements of the state, of deqfast, torchdeq and the byte floor."""
    points = []
    for case, runs in results.cases("solves").items():
        solver, _, size = case.rpartition("-")
        if solver in SHOWN["drawn solvers"]:
            own, peer = (median(values(runs, provider, "solver_ms")) for provider in (OURS, PEER))
            elements = math.prod(map(int, size.split("x")))
            floor = own / median(values(runs, OURS, "floor_x"))
            times_of = {"deqfast": own, "torchdeq": peer, "floor": floor}
            points.append({"solver": SHOWN["drawn solvers"][solver], "elements": elements} | times_of)
    return points


def filled(text: str, known: Mapping[str, Sequence[str]], path: Path) -> str:
    """Return `text` with the lines of its blocks of numbers."""

    def fill(block: re.Match[str]) -> str:
        begin, name, end = block.groups()
        if name not in known or not end:
            sys.exit(f"{path}: {begin} needs an <!-- end of numbers --> and one of the names {', '.join(known)}")
        return "\n".join([begin, *known[name], end])

    return BLOCK.sub(fill, text)


def wrong_numbers(text: str, known: Mapping[str, str]) -> Iterator[str]:
    """Sentences on marked numbers that are neither the measured one nor a part of it ("18.6 to 22.4×")."""
    for marked in FACT.finditer(text):
        key, line = marked[1], text.count("\n", 0, marked.start()) + 1
        before = " ".join(text[: marked.start()][-80:].split())  # a line may end within a number's words
        if key not in known:
            yield f"line {line}: no number is called {key}; report.py --facts lists them"
            continue
        number = re.sub(r" \(\d+\)$", "", known[key])  # without the count after a mean
        allowed = [known[key], number.partition(" of ")[0], *filter(None, re.split(r" \(|\)| / ", number))]
        if not any(re.search(rf"(?<![\w.,-]){re.escape(form)}$", before) for form in allowed):
            yield f"line {line}: {key} is {known[key]}, the text says …{before[-20:]!r}"


def run(check: bool) -> list[str]:
    """Write or compare everything; return what is wrong."""
    results = Results.read(ROOT / "benchmarks" / "results")
    lines, known = blocks(results), facts(results)
    wrong, stale = [], {}
    folders = (ROOT / "benchmarks").glob("*.md"), (ROOT / "docs").rglob("*.md")
    for path in [ROOT / "README.md", *sorted(chain(*folders))]:
        text = path.read_text()
        if (wanted := filled(text, lines, path)) != text:
            stale[path] = wanted.encode()
        wrong += [f"{path}, {fault}" for fault in wrong_numbers(wanted, known)]
    for figure in figures(results):
        path = ROOT / "benchmarks" / "results" / f"{figure.name}.png"
        if not path.is_file() or figure.digest.encode() not in path.read_bytes():
            stale[path] = b"" if check else figure.png()
    for path, content in stale.items():
        if check:
            wrong.append(f"{path} differs from the records: run python benchmarks/report.py")
        else:
            write_bytes(path, content)
            print(f"written: {path}")
    return wrong


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if anything is outdated")
    parser.add_argument("--facts", action="store_true", help="print the keys and numbers that sentences may quote")
    parser.add_argument("--show", type=Path, metavar="FOLDER", help="print the times of the rows of the records there")
    given = parser.parse_args(argv)
    if given.show:
        records = Results.read(given.show, "*.json*").records  # .json.part is of an incomplete run
        if not records:
            sys.exit(f"--show {given.show}: no records (*.json) there")
        print("\n".join(summary([row for record in records for row in record.rows])))
    elif given.facts:
        known = facts(Results.read(ROOT / "benchmarks" / "results"))
        print("\n".join(f"{key:<40} {text}" for key, text in known.items()))
    elif wrong := run(given.check):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly if `| head` has seen enough
    main()
