"""Time to a residual: Picard, Anderson and Broyden beside torchdeq's, each until the worst sample is good enough.

    python benchmarks/time_to_residual.py --json FILE --figure FILE

The problems are a synthetic suite of 24 and cells of trained models, which are trained first, once, if no run of the
study is given. Every solver gets the same f, start, tolerance and at most 60 evaluations of f. A time counts only where
the returned value, put into f in float64, has a relative residual within the tolerance in every sample; torchdeq's own
word is not taken. On trained cells deqfast's default solvers run with kernel="torch" too. deqfast stops every sample by
itself at its first iterate within the tolerance, and returns that one; torchdeq goes on with all until one iterate of
the whole batch is within it. So its finished samples end nearer to the solution than asked for, and may leave the
tolerance again.

Without training this takes less than 10 minutes of two cores. FILE.png shows residuals against time and evaluations.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import problems, trained
from harness.maps import NEVER
from harness.peers import torchdeq_method
from harness.problems import Problem
from harness.record import Row, write_record
from harness.residual_report import ON_TORCH, SMALL_RIDGE, case_table, draw, summary_table
from torch import Tensor

import deqfast
from deqfast.ops import choose_kernel

TOLERANCES = (1e-3, 1e-5)
EVALUATIONS = 60
# f in float32 errs by some 1e-7: a solver that stops at the tolerance may be this far above it in float64.
SLACK = 1.05
ROUNDS = 5
QUICK_BATCH, QUICK_DIM = 4, 256
SHOWN = ("outliers inside, b 1", "decaying 0.99, b 0.01", "fully connected tanh", "residual block")  # in the figure
SHOWN_PROVIDERS = (
    "deqfast picard", "deqfast anderson m=6", f"deqfast broyden n={EVALUATIONS}", "torchdeq fixed_point_iter",
    "torchdeq anderson m=6", "torchdeq broyden",
)  # fmt: skip
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Provider:
    """A solver to compare. solve: (f, z0, tol) -> value, and the evaluations of each sample if it knows them.

    peer: torchdeq's name for the same method; its own is its peer.
    """

    name: str
    peer: str
    solve: Callable[[Map, Tensor, float], tuple[Tensor, Tensor | None]]


def _deqfast(
    make: Callable[..., Any], f: Map, z0: Tensor, tol: float, kernel: str = "cpp"
) -> tuple[Tensor, Tensor | None]:
    solution = deqfast.solve(f, z0, make(tol, EVALUATIONS), kernel=kernel)
    return solution.value, solution.iterations


def _torchdeq(make: Callable[..., Any], f: Map, z0: Tensor, tol: float, **options: float) -> tuple[Tensor, None]:
    """options: of torchdeq's function, which is as it ships without any."""
    solver = make(tol, EVALUATIONS)
    run, max_iter = torchdeq_method(solver)
    return run(f, z0, max_iter=max_iter, tol=tol, stop_mode=solver.stop, **options)[0], None


def providers(on_torch: bool = False) -> list[Provider]:
    """All solvers, torchdeq's last; `on_torch`: and before them the default ones with kernel="torch"."""
    picard, anderson, broyden = (f"torchdeq {name}" for name in ("fixed_point_iter", "anderson m=6", "broyden"))
    whole = partial(deqfast.Broyden, history=EVALUATIONS)  # which is torchdeq's default
    ours: dict[str, tuple[str, Callable[..., Any]]] = {
        "picard": (picard, deqfast.Picard),
        "anderson m=6": (anderson, deqfast.Anderson),
        "anderson m=6 bf16 history": (anderson, partial(deqfast.Anderson, history_dtype=torch.bfloat16)),
        "anderson m=8": (anderson, partial(deqfast.Anderson, history=8)),
        f"broyden n={EVALUATIONS}": (broyden, whole),
        "broyden n=20": (broyden, deqfast.Broyden),
    }
    theirs: dict[str, Callable[..., Any]] = {picard: deqfast.Picard, anderson: deqfast.Anderson, broyden: whole}
    plain = [name for name in ours if on_torch and f"deqfast {name}" in ON_TORCH]
    return [
        *(Provider(f"deqfast {name}", peer, partial(_deqfast, make)) for name, (peer, make) in ours.items()),
        *(Provider(f"torch {name}", ours[name][0], partial(_deqfast, ours[name][1], kernel="torch")) for name in plain),
        *(Provider(name, name, partial(_torchdeq, make)) for name, make in theirs.items()),
        Provider(SMALL_RIDGE, SMALL_RIDGE, partial(_torchdeq, deqfast.Anderson, lam=1e-8)),
    ]


class Watched:
    """An f that notes when it was called and when its value was there (seconds)."""

    def __init__(self, f: Map) -> None:
        self.f = f
        self.calls: list[tuple[float, float]] = []

    def __call__(self, z: Tensor) -> Tensor:
        start = time.perf_counter()
        value = self.f(z)
        self.calls.append((start, time.perf_counter()))
        return value


def timed(problem: Problem, provider: Provider, tol: float) -> tuple[float, float]:
    """Milliseconds of a solve, and those of them within f."""
    f, start = Watched(problem.f), time.perf_counter()
    provider.solve(f, problem.z0, tol)
    spent = time.perf_counter() - start
    return 1e3 * spent, 1e3 * sum(end - begin for begin, end in f.calls)


@torch.no_grad()
def judged(problem: Problem, provider: Provider, tol: float) -> Row:
    """One solve: evaluations, residual in float64, and whether it is within the tolerance."""
    f = Watched(problem.f)
    value, of_samples = provider.solve(f, problem.z0, tol)
    residuals = problem.residuals(value)
    worst = float(residuals.max())
    row: Row = {
        "section": "residual", "case": problem.name, "provider": provider.name, "peer": provider.peer, "tol": tol,
        "batch": len(problem.z0), "dim": problem.dim, "dtype": "float32", "evaluations": len(f.calls),
        "most_evaluations": EVALUATIONS, "residual": finite(worst),
        "residual_median": finite(float(residuals.median())),
        "reached": worst <= SLACK * tol, "samples_missed": int((~(residuals <= SLACK * tol)).sum()),
    }  # fmt: skip
    if of_samples is not None:
        row["mean_evaluations"] = float(of_samples.double().mean())
    if not row["reached"]:
        row["skipped"] = f"residual {worst:.1e} after {len(f.calls)} evaluations"
    return row


@torch.no_grad()
def measure(problem: Problem, compared: list[Provider], tol: float, rounds: int) -> list[Row]:
    """A row per provider; those that reach the tolerance are timed in turns.

    ms, ms_min: median and least of the whole call, f included; f_ms: within f in the fastest; gain: the peer's `ms`
    over this one's where both reach the tolerance; mean_evaluations: of a sample until it was done; samples_missed: how
    many are above the tolerance.
    """
    rows = [judged(problem, provider, tol) for provider in compared]
    racing = [(row, provider) for row, provider in zip(rows, compared, strict=True) if row["reached"]]
    times: dict[str, list[tuple[float, float]]] = {provider.name: [] for _, provider in racing}
    for _ in range(rounds):
        for _, provider in racing:
            times[provider.name].append(timed(problem, provider, tol))
    for row, provider in racing:
        spent = times[provider.name]
        row["ms"], (row["ms_min"], row["f_ms"]) = statistics.median(total for total, _ in spent), min(spent)
        row["solver_ms"] = (row["ms_min"] - row["f_ms"]) / row["evaluations"]
    peers = {row["provider"]: row.get("ms") for row in rows}
    for row, _ in racing:
        if row["provider"] != row["peer"] and peers[row["peer"]] is not None:
            row["gain"] = peers[row["peer"]] / row["ms"]
    return rows


@torch.no_grad()
def courses(problem: Problem, compared: list[Provider], rounds: int) -> list[Row]:
    """Of solves that nothing stops early, a row per provider: the best residual so far of the worst sample after every
    evaluation, and the median time (ms) at which f's value was there. The residuals are those of f's arguments."""
    times: list[list[list[float]]] = [[] for _ in compared]
    for _ in range(rounds):
        for provider, moments in zip(compared, times, strict=True):
            f, start = Watched(problem.f), time.perf_counter()
            provider.solve(f, problem.z0, NEVER)
            moments.append([1e3 * (end - start) for _, end in f.calls])
    rows: list[Row] = []
    for provider, moments in zip(compared, times, strict=True):
        residuals = residuals_on_the_way(problem, provider)
        rows.append({
            "section": "residual course", "case": problem.name, "provider": provider.name, "batch": len(problem.z0),
            "dim": problem.dim, "dtype": "float32", "evaluations": list(range(1, len(residuals) + 1)),
            "ms": [statistics.median(of_call) for of_call in zip(*moments, strict=True)],
            "residual": [finite(residual) for residual in residuals],
        })  # fmt: skip
    return rows


def residuals_on_the_way(problem: Problem, provider: Provider) -> list[float]:
    """The best residual so far, of the worst sample, after every evaluation of a solve that nothing stops early."""
    seen: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        seen.append(problem.residuals(z.view_as(problem.z0)))
        return problem.f(z)

    provider.solve(f, problem.z0, NEVER)
    return torch.stack(seen).nan_to_num(math.inf).cummin(0).values.max(dim=1).values.tolist()


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def suite_of(given: argparse.Namespace) -> list[Problem]:
    """The problems of the suite that were asked for."""
    names = [name for name, (dim, *_) in problems.MAPS.items() if not given.quick or dim <= QUICK_DIM]
    names = [name for name in names if wanted(given, "suite", name)]
    return problems.suite(names, QUICK_BATCH if given.quick else problems.SUITE_BATCH)


def cells_of(given: argparse.Namespace) -> list[Problem]:
    """The trained cells that were asked for, trained where need be."""
    batch, found = QUICK_BATCH if given.quick else trained.BATCH, []
    if wanted(given, "trained", "digits"):
        found += [trained.digits_cell(given.cells, activation, batch=batch) for activation in trained.DIGITS_STEPS]
    if wanted(given, "trained", "study") and not (given.quick and given.run is None):
        run = given.run or trained.study_run(given.cells, given.data_root)
        found.append(trained.study_cell(run, given.data_root, batch))
    return found


def wanted(given: argparse.Namespace, *names: str) -> bool:
    return not given.only or any(part in name for part in given.only for name in names)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all rows to this file; an existing one is replaced")
    parser.add_argument("--figure", type=Path, help="draw residuals over time; FILE.png is replaced")
    parser.add_argument("--threads", type=int, help="CPU threads (default: as many as PyTorch takes)")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", default=[],
        help=f"only problems whose name contains a PART: suite, trained, digits, study, {', '.join(problems.MAPS)}",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true", help="small problems, one round, no training of the study: to try"
    )
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


def measured(given: argparse.Namespace, synthetic: list[Problem], cells: list[Problem]) -> list[Row]:
    """All rows; a line per problem tells of the progress."""
    rounds, rows = 1 if given.quick else ROUNDS, []
    everything = synthetic + cells
    for number, problem in enumerate(everything, 1):
        start = time.monotonic()
        compared = providers(on_torch=number > len(synthetic))
        rows += [row for tol in TOLERANCES for row in measure(problem, compared, tol, rounds)]
        print(f"{number}/{len(everything)} {problem.name}: {time.monotonic() - start:.1f} s", flush=True)
    shown = [problem for problem in everything if problem.name.startswith(SHOWN)]
    drawn = [provider for provider in providers() if provider.name in SHOWN_PROVIDERS]
    for problem in (shown or everything[:1]) if given.figure else []:
        print(f"the course of {problem.name}", flush=True)
        rows += courses(problem, drawn, rounds)
    return rows


def obstacle() -> str | None:
    """What is not installed, if anything."""
    if importlib.util.find_spec("torchdeq") is None:
        return "torchdeq is not installed"
    try:
        choose_kernel("cpp", torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return None


def remark(given: argparse.Namespace, cells: list[Problem]) -> str | None:
    """What the record says of how it was made."""
    words = [f"{problem.name}: {problem.origin}" for problem in cells]
    return "; ".join(["--quick: no times to be quoted"] * given.quick + words) or None


def main(argv: list[str] | None = None) -> None:
    given = arguments(argv)
    if given.threads:
        torch.set_num_threads(given.threads)
    if (missing := obstacle()) is not None:
        sys.exit(f"time_to_residual.py: error: {missing}")
    given.cells.mkdir(parents=True, exist_ok=True)
    try:
        synthetic, cells = suite_of(given), cells_of(given)
    except trained.StudyError as error:
        sys.exit(f"time_to_residual.py: error: {error}")
    if not synthetic + cells:
        sys.exit("time_to_residual.py: error: --quick leaves out all that --only asks for")
    rows = measured(given, synthetic, cells)
    if given.json:
        write_record(given.json, rows, remark=remark(given, cells))
    if given.figure:
        draw(rows, given.figure)
    for problem in cells:
        print(f"\n{case_table(rows, problem.name)}")
    if synthetic:
        names = {problem.name for problem in synthetic}
        print(f"\n{summary_table([row for row in rows if row['case'] in names])}")


if __name__ == "__main__":
    main()
