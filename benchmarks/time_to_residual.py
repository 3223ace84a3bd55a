"""Time to a residual: Picard, Anderson and Broyden beside torchdeq's, each until the worst sample is good enough.

    python benchmarks/time_to_residual.py --json FILE --figure FILE

The problems are a synthetic suite of 24 and cells of trained models, which are trained first, once, if no run of the
study is given. Every solver gets the same f, start, tolerance and at most 60 evaluations of f. A time counts only where
the returned value, put into f in float64, has a relative residual within the tolerance in every sample; torchdeq's own
word is not taken. deqfast stops every sample by itself at its first iterate within the tolerance, and returns that one;
torchdeq goes on with all until one iterate of the whole batch is within it. So its finished samples end nearer to the
solution than asked for, and may leave the tolerance again.

Without training this takes less than 10 minutes of two cores. FILE.png and FILE.svg show residuals against time and
evaluations.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import NEVER, torchdeq_solve
from gpu_report import aligned
from harness import problems, trained
from harness.problems import Problem
from harness.record import Row, write_record
from torch import Tensor

import deqfast

TOLERANCES = (1e-3, 1e-5)
EVALUATIONS = 60
# f in float32 errs by some 1e-7: a solver that stops at the tolerance may be this far above it in float64.
SLACK = 1.05
ROUNDS = 5
QUICK_BATCH, QUICK_DIM = 4, 256
SHOWN = ("outliers inside, b 1", "decaying 0.99, b 0.01")  # of the suite, beside the trained cells
SHOWN_PROVIDERS = (
    "deqfast picard", "deqfast anderson m=6", "deqfast broyden", "torchdeq fixed_point_iter", "torchdeq anderson m=6",
    "torchdeq broyden",
)  # fmt: skip
LOWEST_SHOWN = 3e-8
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """A solver to compare. solve: (f, z0, tol) -> value, and the evaluations of each sample if it knows them.

    peer: torchdeq's name for the same method; its own is its peer.
    """

    name: str
    peer: str
    solve: Callable[[Map, Tensor, float], tuple[Tensor, Tensor | None]]


def _deqfast(make: Callable[..., Any], f: Map, z0: Tensor, tol: float) -> tuple[Tensor, Tensor | None]:
    solution = deqfast.solve(f, z0, make(tol, EVALUATIONS), kernel="cpp")
    return solution.value, solution.iterations


def _torchdeq(
    name: str, iterations: int, options: dict[str, Any], f: Map, z0: Tensor, tol: float
) -> tuple[Tensor, Tensor | None]:
    return torchdeq_solve(name, iterations, options, tol)(f, z0), None


def providers() -> list[Provider]:
    """All solvers, torchdeq's last."""
    picard, anderson, broyden = (f"torchdeq {name}" for name in ("fixed_point_iter", "anderson m=6", "broyden"))
    ours: dict[str, tuple[str, Callable[..., Any]]] = {
        "picard": (picard, deqfast.Picard),
        "anderson m=6": (anderson, deqfast.Anderson),
        "anderson m=6 bf16 history": (anderson, partial(deqfast.Anderson, history_dtype=torch.bfloat16)),
        "anderson m=8": (anderson, partial(deqfast.Anderson, history=8)),
        "broyden": (broyden, partial(deqfast.Broyden, history=EVALUATIONS)),
        "broyden n=20": (broyden, deqfast.Broyden),
    }
    theirs = {
        picard: ("fixed_point_iter", EVALUATIONS, {}),
        anderson: ("anderson", EVALUATIONS, {"m": 6}),
        broyden: ("broyden", EVALUATIONS - 1, {}),  # it does not count its first evaluation
    }
    return [
        *(Provider(f"deqfast {name}", peer, partial(_deqfast, make)) for name, (peer, make) in ours.items()),
        *(Provider(name, name, partial(_torchdeq, *arguments)) for name, arguments in theirs.items()),
    ]


class Counted:
    """An f that knows how often it was called."""

    def __init__(self, f: Map) -> None:
        self.f, self.calls = f, 0

    def __call__(self, z: Tensor) -> Tensor:
        self.calls += 1
        return self.f(z)


class Followed:
    """An f that notes the time of every value, or, with `problem`, the residuals (B,) of every argument."""

    def __init__(self, f: Map, problem: Problem | None = None) -> None:
        self.f, self.problem = f, problem
        self.times: list[float] = []
        self.residuals: list[Tensor] = []

    def __call__(self, z: Tensor) -> Tensor:
        if self.problem is not None:
            self.residuals.append(self.problem.residuals(z.view_as(self.problem.z0)))
        value = self.f(z)
        self.times.append(time.perf_counter())
        return value


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def judged(problem: Problem, provider: Provider, tol: float) -> Row:
    """One solve: evaluations, residual in float64, and whether it is within the tolerance."""
    f = Counted(problem.f)
    value, of_samples = provider.solve(f, problem.z0, tol)
    residuals = problem.residuals(value)
    worst = float(residuals.max())
    row: Row = {
        "section": "residual", "case": problem.name, "provider": provider.name, "peer": provider.peer, "tol": tol,
        "batch": len(problem.z0), "dim": problem.dim, "dtype": "float32", "evaluations": f.calls,
        "most_evaluations": EVALUATIONS, "residual": worst if math.isfinite(worst) else None,
        "reached": worst <= SLACK * tol, "samples_missed": int((~(residuals <= SLACK * tol)).sum()),
    }  # fmt: skip
    if of_samples is not None:
        row["mean_evaluations"] = float(of_samples.double().mean())
    if not row["reached"]:
        row["skipped"] = f"residual {worst:.1e} after {f.calls} evaluations"
    return row


@torch.no_grad()
def measure(problem: Problem, compared: list[Provider], tol: float, rounds: int) -> list[Row]:
    """A row per provider; those that reach the tolerance are timed in turns."""
    rows = [judged(problem, provider, tol) for provider in compared]
    racing = [(row, provider) for row, provider in zip(rows, compared, strict=True) if row["reached"]]
    times: dict[str, list[float]] = {provider.name: [] for _, provider in racing}
    of_f: list[float] = []
    for _ in range(rounds):
        for _, provider in racing:
            run = partial(provider.solve, problem.f, problem.z0, tol)
            times[provider.name].append(1e3 * seconds(run))
            of_f.append(1e3 * seconds(partial(problem.f, problem.z0)))
    for row, provider in racing:
        spent = times[provider.name]
        row |= {"ms": statistics.median(spent), "ms_min": min(spent), "f_ms": row["evaluations"] * min(of_f)}
        row["solver_ms"] = (row["ms_min"] - row["f_ms"]) / row["evaluations"]
    peers = {row["provider"]: row.get("ms") for row in rows}
    for row, _ in racing:
        if row["provider"] != row["peer"] and peers[row["peer"]] is not None:
            row["gain"] = peers[row["peer"]] / row["ms"]
    return rows


@torch.no_grad()
def course(problem: Problem, provider: Provider, rounds: int) -> Row:
    """Of a solve that nothing stops early: the best residual so far of the worst sample after every evaluation, and the
    median time (ms) at which f's value was there."""
    watched = Followed(problem.f, problem)
    provider.solve(watched, problem.z0, NEVER)
    residuals = torch.stack(watched.residuals).nan_to_num(math.inf).cummin(0).values.max(dim=1).values
    times = []
    for _ in range(rounds):
        followed, start = Followed(problem.f), time.perf_counter()
        provider.solve(followed, problem.z0, NEVER)
        times.append([1e3 * (moment - start) for moment in followed.times])
    return {
        "section": "residual course", "case": problem.name, "provider": provider.name, "batch": len(problem.z0),
        "dim": problem.dim, "dtype": "float32", "evaluations": list(range(1, len(residuals) + 1)),
        "ms": [statistics.median(moments) for moments in zip(*times, strict=True)],
        "residual": [float(residual) if math.isfinite(residual) else None for residual in residuals],
    }  # fmt: skip


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(rows: list[Row], tol: float) -> list[Row]:
    """A row per provider over the problems of `rows` at a tolerance.

    evaluations: median, `EVALUATIONS` where the tolerance was missed; failures: problems in which it was; ms, shared:
    total time over the problems that all providers solved, and how many these are; gain, gains: geometric mean of the
    time of torchdeq's same method over this one's, and in how many problems both solved; f_share: of f in the time.
    """
    chosen = [row for row in rows if row["section"] == "residual" and row["tol"] == tol]
    failed = {row["case"] for row in chosen if not row["reached"]}
    lines = []
    for name in dict.fromkeys(row["provider"] for row in chosen):
        own = [row for row in chosen if row["provider"] == name]
        solved = [row for row in own if row["reached"]]
        shared = [row for row in solved if row["case"] not in failed]
        gains = [row["gain"] for row in solved if "gain" in row]
        lines.append({
            "provider": name, "tol": tol, "problems": len(own), "failures": len(own) - len(solved),
            "evaluations": statistics.median(row["evaluations"] if row["reached"] else EVALUATIONS for row in own),
            "ms": sum(row["ms"] for row in shared) if shared else None, "shared": len(shared),
            "f_share": sum(row["f_ms"] for row in shared) / sum(row["ms_min"] for row in shared) if shared else None,
            "gain": geometric_mean(gains) if gains else None, "gains": len(gains),
        })  # fmt: skip
    return lines


def text(table: list[list[str]]) -> str:
    """The table with its first column to the left, the others to the right."""
    return "\n".join(aligned([[*line, ""] for line in table], 1))


def optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_table(rows: list[Row], title: str) -> str:
    """What `summary` says, for people."""
    blocks = []
    for tol in TOLERANCES:
        lines = summary(rows, tol)
        shared, total = lines[0]["shared"], lines[0]["problems"]
        table = [["solver", "median evals", "failures", f"ms of {shared}", "of it f", "x torchdeq", "over"]]
        table += [
            [line["provider"], f"{line['evaluations']:g}", f"{line['failures']}/{total}", optional(line["ms"], ".1f"),
             optional(line["f_share"], ".0%"), optional(line["gain"], ".1f"), str(line["gains"] or "-")]
            for line in lines
        ]  # fmt: skip
        head = f"{title}, relative residual {tol:g}, at most {EVALUATIONS} evaluations"
        blocks.append(f"{head}; total time over the {shared} problems that all solved\n{text(table)}")
    return "\n\n".join(blocks)


def case_table(rows: list[Row], case: str) -> str:
    """All rows of a problem, for people: what a default solver is chosen by."""
    found = [row for row in rows if row["section"] == "residual" and row["case"] == case]
    table = [["solver", "tol", "evals", "a sample", "ms", "of it f", "x torchdeq", "missed"]]
    table += [
        [row["provider"], f"{row['tol']:g}", str(row["evaluations"]), optional(row.get("mean_evaluations"), ".1f"),
         optional(row.get("ms"), ".1f"), optional(row["f_ms"] / row["ms_min"] if row["reached"] else None, ".0%"),
         optional(row.get("gain"), ".1f"), f"{row['samples_missed']}/{row['batch']}"]
        for row in found
    ]  # fmt: skip
    return f"{case}: B={found[0]['batch']} D={found[0]['dim']}\n{text(table)}"


def draw(rows: list[Row], path: Path) -> None:
    """Residual against time and against evaluations, a column per problem, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogFormatter

    # Okabe and Ito's palette; who solved is told by the line, too.
    colours = {"picard": "#009E73", "anderson": "#0072B2", "broyden": "#D55E00"}
    courses = [row for row in rows if row["section"] == "residual course"]
    cases = list(dict.fromkeys(row["case"] for row in courses))
    figure, axes = pyplot.subplots(2, len(cases), figsize=(3.6 * len(cases), 6.6), squeeze=False, sharey=True)
    for column, case in enumerate(cases):
        for row in (row for row in courses if row["case"] == case):
            method = next((name for name in colours if name in row["provider"]), "picard")
            ours = row["provider"].startswith("deqfast")
            style = {"color": colours[method], "ls": "-" if ours else "--", "lw": 1.8, "label": row["provider"]}
            shown = [value or math.nan for value in row["residual"]]
            axes[0, column].plot(row["ms"], shown, **style)
            axes[1, column].plot(row["evaluations"], shown, **style)
        shape = next(row for row in courses if row["case"] == case)
        axes[0, column].set_title(f"{case}\nB={shape['batch']}, D={shape['dim']}", fontsize=10)
        axes[0, column].set_xscale("log")
        axes[0, column].xaxis.set_major_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        for axis, label in zip(axes[:, column], ("time (ms)", "evaluations of f"), strict=True):
            axis.set(xlabel=label, yscale="log", ylim=(LOWEST_SHOWN, 3))
            for tol in TOLERANCES:
                axis.axhline(tol, color="#777777", lw=0.8, ls=":")
            axis.grid(alpha=0.25)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative residual of the worst sample")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    for ending in (".png", ".svg"):
        figure.savefig(path.with_suffix(ending), dpi=150)
    pyplot.close(figure)


def suite_of(given: argparse.Namespace) -> list[Problem]:
    """The problems of the suite that were asked for."""
    names = [name for name, (dim, *_) in problems.MAPS.items() if not given.quick or dim <= QUICK_DIM]
    names = [name for name in names if wanted(given, "suite", name)]
    return problems.suite(names, QUICK_BATCH if given.quick else problems.SUITE_BATCH)


def cells_of(given: argparse.Namespace) -> list[Problem]:
    """The trained cells that were asked for, trained where need be."""
    batch, found = QUICK_BATCH if given.quick else trained.BATCH, []
    if wanted(given, "trained", "digits"):
        found.append(trained.digits_cell(given.cells, batch=batch))
    if wanted(given, "trained", "study") and not (given.quick and given.run is None):
        run = given.run or trained.study_run(given.cells, given.data_root)
        found.append(trained.study_cell(run, given.data_root, batch))
    return found


def wanted(given: argparse.Namespace, *names: str) -> bool:
    return not given.only or any(part in name for part in given.only for name in names)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows to this file; an existing one is replaced")
    parser.add_argument("--figure", type=Path, help="draw residuals over time; FILE.png and FILE.svg are replaced")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as many as PyTorch takes)")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", default=[],
        help=f"only problems whose name contains a PART: suite, trained, digits, study, {', '.join(problems.MAPS)}",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small problems, one round: shows that it works")
    parser.add_argument("--run", type=Path, help="folder of a finished run of experiments/cifar_lt.py with a DEQ")
    parser.add_argument("--data-root", type=Path, help="folder of the CIFAR files; without: cells see drawn shapes")
    parser.add_argument("--cells", type=Path, default=Path("runs/residual"),
                        help="folder where trained cells are kept (%(default)s)")  # fmt: skip
    given = parser.parse_args(argv)
    known = ("suite", "trained", "digits", "study", *problems.MAPS)
    for part in given.only:
        if not any(part in name for name in known):
            parser.error(f"--only {part}: in none of {', '.join(known)}")
    if given.threads is not None and given.threads < 1:
        parser.error(f"--threads must be at least 1, got {given.threads}")
    for flag, path in (("--json", given.json), ("--figure", given.figure)):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{flag}: {path.resolve().parent} is not a folder")
    return given


def main(argv: list[str] | None = None) -> None:
    given = arguments(argv)
    if given.threads:
        torch.set_num_threads(given.threads)
    given.cells.mkdir(parents=True, exist_ok=True)
    try:
        synthetic, cells = suite_of(given), cells_of(given)
    except trained.StudyError as error:
        sys.exit(f"time_to_residual.py: error: {error}")
    rounds, compared, rows = 1 if given.quick else ROUNDS, providers(), []
    for number, problem in enumerate(synthetic + cells, 1):
        start = time.monotonic()
        rows += [row for tol in TOLERANCES for row in measure(problem, compared, tol, rounds)]
        print(f"{number}/{len(synthetic + cells)} {problem.name}: {time.monotonic() - start:.1f} s", flush=True)
    chosen = [problem for problem in synthetic if problem.name in SHOWN] + cells
    for problem in chosen if given.figure else []:
        print(f"the course of {problem.name}", flush=True)
        rows += [course(problem, provider, rounds) for provider in compared if provider.name in SHOWN_PROVIDERS]
    if given.json:
        write_record(given.json, rows, remark=f"{torch.get_num_threads()} threads" + ", quick" * given.quick)
    if given.figure and chosen:
        draw(rows, given.figure)
    for problem in cells:
        print(f"\n{case_table(rows, problem.name)}")
    if synthetic:
        names = {problem.name for problem in synthetic}
        print(f"\n{summary_table([row for row in rows if row['case'] in names], f'{len(synthetic)} problems')}")


if __name__ == "__main__":
    main()
