"""Measure deqfast on a GPU: kernels, solves, cells, training steps and metrics, each beside its floor or its peer.

    python benchmarks/gpu.py --json FILE

Every section runs in a process of its own, so that one that hangs or breaks the device's context costs itself only. A
result is compared with float64 before it is timed; one that is wrong is reported instead. `bash benchmarks/gpu.sh`
builds and tests first and prints a table.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_models
import gpu_steps
import torch
from gpu_measure import DRY, FULL, Bench
from harness.record import provenance

# Name -> (function, time limit in seconds).
SECTIONS: dict[str, tuple[Callable[[Bench], None], int]] = {
    "rates": (gpu_steps.rates, 40),
    "step": (gpu_steps.steps, 150),
    "solve": (gpu_steps.solves, 60),
    "fc": (gpu_steps.fully_connected, 40),
    "cell": (gpu_models.conv_cell, 60),
    "training": (gpu_models.training, 60),
    "parts": (gpu_models.step_parts, 60),
    "NC": (gpu_models.neural_collapse, 40),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="file to write; an existing one is replaced")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes: shows that the script works")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda; cpu only with --dry-run")
    parser.add_argument("--seconds", type=float, default=240, help="time for all sections together (%(default)s)")
    parser.add_argument("--sections", choices=SECTIONS, nargs="+", help="only these, in this process, adding to FILE")
    given = parser.parse_args()
    given.device = given.device or ("cpu" if given.dry_run else "cuda")
    if given.device == "cpu" and not given.dry_run:
        parser.error("--device cpu is for --dry-run: the sizes are those of a GPU")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry-run tries the script without one")
    if given.seconds <= 0:
        parser.error(f"--seconds must be positive, got {given.seconds:g}")
    if not given.json.resolve().parent.is_dir():
        parser.error(f"--json: {given.json.resolve().parent} is not a folder")
    return given


def bench_of(given: argparse.Namespace) -> Bench:
    plan = FULL
    if given.dry_run:
        kernels = FULL.kernels if given.device == "cuda" else DRY.kernels
        plan = dataclasses.replace(DRY, device=given.device, kernels=kernels)
    return Bench(plan, given.json)


def run_sections(given: argparse.Namespace, names: tuple[str, ...], seconds: float) -> str | None:
    """Run sections in a process of their own; what went wrong, if anything."""
    command = [sys.executable, __file__, "--json", str(given.json), "--device", given.device, "--sections", *names]
    try:
        result = subprocess.run(command + ["--dry-run"] * given.dry_run, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    return None if result.returncode == 0 else f"ended with status {result.returncode}"


def processes(dry_run: bool) -> list[tuple[str, ...]]:
    """Which sections share a process: none, but where starting takes longer than measuring."""
    first, *others = SECTIONS
    return [(first,), tuple(others)] if dry_run else [(name,) for name in SECTIONS]


def measure(given: argparse.Namespace) -> int:
    """All sections; the number of rows with a problem."""
    given.json.unlink(missing_ok=True)
    bench = bench_of(given)
    bench.data |= {"dry_run": given.dry_run, **provenance(given.device), "seconds": {}}
    bench.write()
    deadline = time.monotonic() + given.seconds
    for names in processes(given.dry_run):
        start, title = time.monotonic(), " ".join(names)
        seconds = min(sum(SECTIONS[name][1] for name in names), deadline - start)
        problem = run_sections(given, names, seconds) if seconds > 1 else "no time was left"
        bench = bench_of(given)  # with the rows of the sections
        if problem is not None:
            bench.rows.append({"section": title, "case": "(whole section)", "provider": "", "problem": problem})
        bench.data["seconds"][title] = round(time.monotonic() - start, 1)
        bench.write()
        print(f"{title}: {bench.data['seconds'][title]} s{f', {problem}' if problem else ''}", flush=True)
    return sum("problem" in row for row in bench.rows)


def main() -> None:
    given = arguments()
    if given.sections:
        bench = bench_of(given)
        for name in given.sections:
            SECTIONS[name][0](bench)
        return
    problems = measure(given)
    if problems:
        sys.exit(f"{problems} rows have a problem")


if __name__ == "__main__":
    main()
