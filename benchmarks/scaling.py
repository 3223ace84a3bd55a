"""How time and memory of a solve grow with batch, state size, history, iterations and threads, beside torchdeq 0.1.0.

    python benchmarks/scaling.py --figure benchmarks/results

One variable is changed at a time around 32 samples of 8192 elements and 20 iterations. f is an element-wise
contraction, whose own time is subtracted; both libraries, f alone and a large copy are timed in turns. Before it is
timed, a solve has to reach the residual that the same solve reaches in float64. Bytes are those that the algorithm must
move, at two rates of a copy: the best of all sizes (in a cache), and that of the copy in turns with the solve (in
memory). Peak memory is exact: what torch's allocator handed out.
A full run takes five to seven minutes on two quiet cores; no GPU is used.

Rows of the record beside what harness/record.py says: `axis` and `series`, the variable of a curve and the curve;
`solve_ms`, of a whole solve without f; `cache_floor_ms`, at the rate of a cache; `held_bytes`, what the algorithm must
hold, and `history_bytes` of it. Sections: scaling copy, caches, training (memory only), exponents, cache left.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from harness import counters, traffic
from harness.maps import NEVER, Contraction
from harness.peers import torchdeq_solve
from harness.record import RESULTS, Row, joined, read_record, write_record
from harness.timing import Copy, in_turns
from scaling_figures import draw, exponents, leaves_cache
from torch import Tensor

import deqfast

KERNEL = "cpp"
SECONDS, ROUNDS = 0.4, 20  # of one row, at most
COPIED = 16 << 20  # floats of the copy that is timed in turns with the solves: more than caches hold
TOO_LONG = 4.0  # seconds of a call: larger sizes of its series are left out
SAMPLES_CHECKED = 2
# By how much the final residual of a solve may be above that of the same solve in float64, relative to the latter;
# near the floor of fp32, where Broyden's residuals jump, relative to that floor.
RESIDUAL_ALLOWED, RESIDUAL_FLOOR = 0.25, 1e-4
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Point:
    """One problem of a series; `axis` names the field that the series changes, `series` its curve.

    history: pairs of Anderson and Broyden; None: 6 and as many as iterations.
    """

    axis: str
    batch: int = 32
    dim: int = 8192
    history: int | None = None
    iterations: int = 20
    threads: int = 1
    series: str = ""

    @property
    def x(self) -> int:
        return getattr(self, self.axis)


@dataclass(frozen=True)
class Case:
    """A solver of the library; peer: whether torchdeq has the same."""

    name: str
    solver: Any
    peer: bool = True


def cases(point: Point) -> list[Case]:
    """The solvers of a point, all with a tolerance that stops none."""
    iterations = point.iterations
    anderson = deqfast.Anderson(NEVER, iterations, history=point.history or 6)
    broyden = deqfast.Broyden(NEVER, iterations, history=point.history or iterations)
    windows = [
        Case("anderson", anderson, peer=point.history != 1),  # torchdeq's needs two iterates
        Case("anderson bf16 history", replace(anderson, history_dtype=torch.bfloat16), peer=False),
        Case("broyden", broyden),
    ]
    return windows if point.axis == "history" else [Case("picard", deqfast.Picard(NEVER, iterations)), *windows]


def points(quick: bool, threads: list[int]) -> list[Point]:
    """All problems, one axis after the other, each from small to large."""
    base = Point("batch", threads=max(threads))
    if quick:
        base = replace(base, batch=2, dim=64, iterations=6)
        sizes: dict[str, list[int]] = {
            "batch": [1, 4],
            "one": [64, 256],
            "dim": [64, 256],
            "history": [1, 4],
            "iterations": [2, 6],
        }
    else:
        sizes = {
            "batch": [2**k for k in range(9)],
            "one": [4**k for k in range(4, 11)],
            "dim": [4**k for k in range(4, 9)],
            "history": [2**k for k in range(6)],
            "iterations": [2, 4, 8, 16, 32, 60],
        }
    long = base.iterations if quick else 40  # so that a window of 32 pairs is full for a while
    found = [replace(base, batch=size, series="batch") for size in sizes["batch"]]
    found += [replace(base, axis="dim", batch=1, dim=size, series="dim, one sample") for size in sizes["one"]]
    found += [replace(base, axis="dim", dim=size, series="dim") for size in sizes["dim"]]
    found += [
        replace(base, axis="history", history=size, iterations=long, series="history") for size in sizes["history"]
    ]
    found += [replace(base, axis="iterations", iterations=size, series="iterations") for size in sizes["iterations"]]
    for batch, dim in [(1, 256), (2, 64)] if quick else [(1, 2**18), (32, 8192), (256, 1024)]:
        found += [
            replace(base, axis="threads", batch=batch, dim=dim, threads=count, series=f"threads ({batch}, {dim})")
            for count in threads
        ]
    return found


def caches() -> dict[str, int]:
    """Bytes of the data caches that one core sees, by level; empty where the system does not say."""
    found = {}
    for index in sorted(CACHES.glob("index*")):
        kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction" and size.endswith("K"):
            found[f"L{level}"] = int(size[:-1]) << 10
    return found


def copy_rates(quick: bool, threads: list[int]) -> list[Row]:
    """Bytes per second of a copy, read and write counted, by the bytes it touches."""
    rows = []
    for count in threads:
        torch.set_num_threads(count)
        for exponent in (14, 16) if quick else range(15, 30):
            source = torch.randn(2 ** (exponent - 3))  # half of the bytes are the target's
            target = source.clone()
            seconds = in_turns({"copy": functools.partial(target.copy_, source)}, seconds=0.15)["copy"]
            rows.append(
                {"section": "scaling copy", "case": "copy", "provider": "torch", "threads": count,
                 "bytes": 2 * source.nbytes, "bytes_per_s": 2 * source.nbytes / min(seconds)}
            )  # fmt: skip
    return rows


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a copy: the best of all sizes, and that of the largest."""

    cache: float
    memory: float

    @classmethod
    def of(cls, rows: list[Row], threads: int) -> Rates:
        own = [row for row in rows if row["threads"] == threads]
        return cls(max(row["bytes_per_s"] for row in own), max(own, key=lambda row: row["bytes"])["bytes_per_s"])


def solve_with(solver: Any, provider: str) -> Callable[[Any, Tensor], Tensor]:
    if provider == "torchdeq":
        return torch.no_grad()(torchdeq_solve(solver))
    return torch.no_grad()(lambda f, z0: deqfast.solve(f, z0, solver, provider).value)


class Rows(Contraction):
    """The first samples of a contraction in float64, and how far a solution of theirs is from a fixed point."""

    def __init__(self, f: Contraction, count: int) -> None:
        self.c, self.eigenvalues, self.calls = f.c[:count].double(), f.eigenvalues.double(), 0


def check(row: Row, f: Contraction, value: Tensor, solver: Any) -> None:
    """Compare the final residual of the first samples with that of the same solve of them in float64."""
    if getattr(solver, "history_dtype", None) is not None:
        solver = replace(solver, history_dtype=None)  # beside float64 there are no others
    exact = Rows(f, SAMPLES_CHECKED)
    solve = solve_with(solver, "torchdeq" if row["provider"] == "torchdeq" else "torch")
    reference = exact.residual(solve(exact, torch.zeros_like(exact.c)))
    found = exact.residual(value[:SAMPLES_CHECKED])
    row["allowed"] = RESIDUAL_ALLOWED
    if math.isfinite(found):
        row["error"] = max(found - reference, 0.0) / max(reference, RESIDUAL_FLOOR)
    if row.get("error", math.inf) > RESIDUAL_ALLOWED:
        row["problem"] = f"residual {found:.2e}, in float64 {reference:.2e}: not timed"


def heading(point: Point, case: Case, provider: str) -> Row:
    return {
        "section": "scaling", "case": case.name, "provider": provider, "axis": point.axis, "series": point.series,
        "batch": point.batch, "dim": point.dim, "dtype": "float32", "history": getattr(case.solver, "history", 0),
        "iterations": point.iterations, "threads": point.threads,
    }  # fmt: skip


def solved(point: Point, case: Case, provider: str) -> tuple[Row, Callable[[], Tensor]]:
    """A row of the record without its times, its answer checked, and the call that is to be timed."""
    row = heading(point, case, provider)
    f, z0 = Contraction(point.batch, point.dim), torch.zeros(point.batch, point.dim)
    solve = functools.partial(solve_with(case.solver, provider), f, z0)
    values: list[Tensor] = []
    row["peak_bytes"] = counters.memory(lambda: values.append(solve()))[1]  # the warm-up, too
    row["evaluations"] = f.calls
    residual = f.residual(values[0])
    row["residual"] = residual if math.isfinite(residual) else None
    check(row, f, values.pop(), case.solver)
    return row, solve


def measure(point: Point, case: Case, providers: list[str], rates: Rates, copy: Copy, seconds: float) -> list[Row]:
    """A row per provider, all timed in turns with f alone and `copy`; `ms` is of a call, and `solver_ms` without f.

    seconds: for the rounds, after the first calls.
    """
    torch.set_num_threads(point.threads)
    found = {provider: solved(point, case, provider) for provider in providers}
    f, z0 = Contraction(point.batch, point.dim), torch.zeros(point.batch, point.dim)
    calls: dict[str, Callable[[], Any]] = {name: call for name, (row, call) in found.items() if "problem" not in row}
    calls |= {"f": functools.partial(calls_of, f, z0, point.iterations), "copy": copy}
    times = in_turns(calls, rounds=ROUNDS, seconds=seconds)
    rows = [row for row, _ in found.values()]
    for row in rows:
        row["copy_gb_per_s"] = copy.rate(min(times["copy"])) / 1e9
        if "problem" not in row:
            tell_times(row, times[row["provider"]], min(times["f"]) * row["evaluations"] / point.iterations)
        if row["provider"] != "torchdeq":
            describe_bytes(row, case.solver, z0.nbytes, rates)
    return rows


@torch.no_grad()
def calls_of(f: Contraction, z: Tensor, count: int) -> None:
    for _ in range(count):
        z = f(z)


def tell_times(row: Row, whole: list[float], of_f: float) -> None:
    """Of the rounds of a call (seconds), in which f takes `of_f`."""
    row["ms"], row["ms_min"] = 1e3 * statistics.median(whole), 1e3 * min(whole)
    row["f_ms"], row["rounds"] = 1e3 * of_f, [1e3 * seconds for seconds in whole]
    row["solve_ms"] = row["ms_min"] - row["f_ms"]
    row["solver_ms"] = row["solve_ms"] / row["evaluations"]


def describe_bytes(row: Row, solver: Any, state_bytes: int, rates: Rates) -> None:
    """What the algorithm must move, and how long that takes in memory and in a cache; what it must hold."""
    row["bytes"] = traffic.solve_passes(solver, row["evaluations"], KERNEL) * state_bytes
    row["floor_ms"] = 1e-6 * row["bytes"] / row["copy_gb_per_s"]
    row["cache_floor_ms"] = 1e3 * row["bytes"] / rates.cache
    if "ms_min" in row:
        row["floor_x"] = row["solve_ms"] / row["floor_ms"]
    row["held_bytes"] = traffic.solve_held(solver, KERNEL) * state_bytes
    row["history_bytes"] = row["held_bytes"] - traffic.held_beside_history(solver, KERNEL) * state_bytes


def solves(found: list[Point], copies: list[Row], seconds: float, copied: int = COPIED) -> Iterator[Row]:
    """The rows of all points, torchdeq's and ours of a solver one after the other; `copied`: floats of the copy.

    The rounds share `seconds`; when these are over, torchdeq is left out.
    """
    todo = [(point, case) for point in found for case in cases(point)]
    deadline, copy = time.monotonic() + seconds, Copy(elements=copied)
    skipped: dict[tuple[str, str, str], str] = {}
    for index, (point, case) in enumerate(todo):
        # The first calls and the check of the answer take their part, too.
        share = 0.5 * (deadline - time.monotonic()) / (len(todo) - index)
        theirs, ours = ((point.series, case.name, provider) for provider in ("torchdeq", KERNEL))
        if importlib.util.find_spec("torchdeq") is None:
            skipped[theirs] = "torchdeq is not installed"
        elif share < 0:
            skipped[theirs] = f"the {seconds:g} s were over"
        compared = (theirs, ours) if case.peer else (ours,)
        yield from (heading(point, case, one[2]) | {"skipped": skipped[one]} for one in compared if one in skipped)
        providers = [one[2] for one in compared if one not in skipped]
        if not providers:
            continue
        rates = Rates.of(copies, point.threads)
        rows = measure(point, case, providers, rates, copy, min(SECONDS * len(providers), share))
        for row in rows:
            if row.get("ms", 0) > 1e3 * TOO_LONG:
                skipped[point.series, case.name, row["provider"]] = f"the size before took more than {TOO_LONG:g} s"
        if len(rows) == 2 and all(row.get("solver_ms", 0) > 0 for row in rows):
            rows[1]["gain"] = rows[0]["solver_ms"] / rows[1]["solver_ms"]
        yield from rows


ADJOINTS: dict[str, Callable[[deqfast.Anderson, int], Any]] = {
    "jfb": lambda solver, iterations: deqfast.JFB(),
    "implicit": lambda solver, iterations: deqfast.Implicit(solver),
    "unrolled": lambda solver, iterations: deqfast.Unrolled(steps=iterations),
}


def training_memory(quick: bool) -> Iterator[Row]:
    """Memory of forward and backward of one residual cell by iterations, for three gradients; a count, no time."""
    channels, size, batch = (8, 4, 2) if quick else (32, 16, 8)
    torch.manual_seed(0)
    x = torch.randn(batch, channels, size, size)
    for iterations in (2, 6) if quick else (2, 4, 8, 16, 32, 60):
        for name, adjoint in ADJOINTS.items():
            solver = deqfast.Anderson(NEVER, iterations)
            block = deqfast.DEQBlock(deqfast.ResidualCell(channels), solver, adjoint(solver, iterations), KERNEL)
            step = functools.partial(train_once, block, x)
            step()
            yield {
                "section": "scaling training", "case": name, "provider": "deqfast", "axis": "iterations",
                "series": "training", "batch": batch, "dim": x[0].numel(), "dtype": "float32",
                "iterations": iterations, "peak_bytes": counters.memory(step)[1],
            }  # fmt: skip


def train_once(block: deqfast.DEQBlock, x: Tensor) -> None:
    block.zero_grad()
    block(x).square().mean().backward()


def line(row: Row) -> str:
    """A row as progress on the terminal."""
    size = f"B={row['batch']} D={row['dim']} n={row.get('history', 0)} K={row['iterations']} t={row.get('threads', 1)}"
    head = f"{row['case']:<22}{row['provider']:<10}{size:<38}"
    memory = f"{row['peak_bytes'] / 2**20:9.1f} MiB" if "peak_bytes" in row else ""
    if "solver_ms" not in row:
        return f"{head}{row.get('skipped', row.get('problem', '')):>20}{memory}"
    floor = f"{row['floor_x']:6.2f} x floor" if "floor_x" in row else ""
    gain = f"{row['gain']:6.1f} x torchdeq" if "gain" in row else ""
    return f"{head}{row['solver_ms']:>12.4f} ms/iter{memory} {floor}{gain}"


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write; an existing one is replaced (default: "
                        "results/scaling_cpu.json beside this script, with --quick none)")  # fmt: skip
    parser.add_argument("--figure", type=Path, metavar="FOLDER", help="draw scaling_time and scaling_memory into this "
                        "folder, as .png and .svg; existing ones are replaced")  # fmt: skip
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads to compare; the "
                        "other variables are measured with the largest (default: 1 2)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=300, help="for the solves: fewer rounds as these run out, and "
                        "no torchdeq after them (%(default)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs: seconds")
    parser.add_argument("--redraw", action="store_true", help="only draw the figures of an existing --json")
    parser.add_argument("--remark", help="what else is to be known of the machine, kept in the file")
    found = parser.parse_args(given)
    if found.json is None and not found.quick:
        found.json = RESULTS / "scaling_cpu.json"
    if found.seconds <= 0:
        parser.error(f"--seconds {found.seconds:g}: more than 0")
    if min(found.threads) < 1:
        parser.error(f"--threads {' '.join(map(str, found.threads))}: numbers from 1 on")
    for name, folder in (("json", found.json and found.json.resolve().parent), ("figure", found.figure)):
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name}: {folder} is not a folder")
    if found.redraw and (found.figure is None or found.json is None or not found.json.is_file()):
        parser.error(f"--redraw needs --figure and an existing --json, got {found.json}")
    if not found.redraw and not deqfast.backends()[KERNEL]:
        parser.error(f"the kernel {KERNEL} cannot run here: {deqfast.backends()[KERNEL].reason}")
    return found


def run(quick: bool, threads: list[int], seconds: float) -> list[Row]:
    """All rows, printed as they come; the solves in about `seconds`."""
    threads = sorted(set(threads))
    copies = copy_rates(quick, threads)
    rates = Rates.of(copies, max(threads))
    print(f"copy: {rates.cache / 1e9:.1f} GB/s in a cache, {rates.memory / 1e9:.1f} GB/s in memory; caches {caches()}")
    rows = [*copies, *({"section": "scaling caches", "case": name, "provider": "system", "bytes": size}
                       for name, size in caches().items())]  # fmt: skip
    torch.set_num_threads(max(threads))
    for row in training_memory(quick):
        rows.append(row)
        print(line(row), flush=True)
    for row in solves(points(quick, threads), copies, seconds, 1 << 14 if quick else COPIED):
        rows.append(row)
        print(line(row), flush=True)
    fitted = exponents(rows)
    print("\nexponents a of time (or memory) ~ x^a; a second one where the slope changes")
    for row in fitted:
        print(f"{row['series']:<18}{row['case']:<24}{row['provider']:<10}{row['measure']:<12}{row['text']}")
    left = cache_rows(rows)
    for row in left:
        print(f"{row['series']}: the history of {row['case']} leaves the largest cache at {row['x']:.0f}")
    return rows + fitted + left


def cache_rows(rows: list[Row]) -> list[Row]:
    """Where the histories leave the largest cache."""
    series = {row["series"]: None for row in rows if row.get("history_bytes")}
    cases = {row["case"]: None for row in rows if row.get("history_bytes")}
    found = [(one, case, leaves_cache(rows, one, case)) for one in series for case in cases]
    return [
        {"section": "scaling cache left", "case": case, "provider": KERNEL, "series": one, "x": x}
        for one, case, x in found if x is not None
    ]  # fmt: skip


def main(given: list[str] | None = None) -> None:
    found = arguments(given)
    rows = read_record(found.json)["rows"] if found.redraw else run(found.quick, found.threads, found.seconds)
    if found.json is not None and not found.redraw:
        quick = "--quick: no times to be quoted" if found.quick else None
        write_record(found.json, rows, remark=joined(quick, found.remark))
    if found.figure is not None:
        for path in draw(rows, found.figure):
            print(path)
    wrong = [line(row) for row in rows if "problem" in row and row["provider"] == KERNEL]
    if wrong:
        sys.exit("wrong answers, not timed:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
