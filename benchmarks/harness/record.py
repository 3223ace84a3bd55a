"""The file of measured rows: what was measured, on which machine, at which commit, with which command.

{"machine": {...}, "command": str, "date": str, "remark": str or null, "rows": [row, ...]}; a row has at least
`section`, `case` and `provider`, and of these what applies (ms: milliseconds):

===================  ==================================================================================================
ms, ms_min           of the whole call: median and least of `rounds` rounds; ms_quartiles: [first, third]
copy_gb_per_s        the copy rate, from rounds interleaved with these
f_ms                 the part of f: as many calls of f as the solve made; on a GPU without the host, as a graph
solver_ms            (ms_min - f_ms) / evaluations: the solver's own time per iteration, on a CPU
share_of_f           (ms_min - f_ms) / f_ms
bytes                what the algorithm must move per call (without f)
floor_ms, floor_x    the time of these bytes at the copy rate of the same run, and the measured time over it
residual             largest relative residual of the batch, in float64
error                relative error against float64
peak_bytes           torch's peak memory during the call, minus the memory allocated before
launches             launches of the host per iteration, a graph's as one; on the CPU torch operations outside f
device_ms, busy      time of the kernels and copies of a call on a GPU, by the profiler; its share of ms_min
host_waits           how often per call the host waits for a value of the device
gains                the time of every peer / this one: solver_ms if it exists, else ms_min
gain                 of section "residual": ms of `peer` / this one's; `reached`: whether `residual` is within `tol`
sample_evaluations   samples that f was called with; backward_evaluations: products with the Jacobian of an adjoint
accuracy, radius     of a trained layer: share of correct digits, spectral radius; accuracy_of_few: at three evaluations
course               of section "residual course": {ms, residual} after every evaluation, the best of the worst sample
missed, false        of benchmarks/classical.py: whether no root was reached, and the claims that it was
forward_ms ...       of section "models": see harness/models.py
flop, nc_share ...   of section "training step": see harness/study_step.py
skipped, fault       why the row has no time
===================  ==================================================================================================
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import recording
import torch

import deqfast
from deqfast import _extension

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# Files that recordings and their report write: they do not change what is measured.
WRITTEN = (
    "benchmarks/baselines",
    "benchmarks/results",
    "benchmarks/*.md",
    "README.md",
    "docs/pages",
)
SETUP = ROOT / "setup.py"
NO_SETUPTOOLS = "the sources of the built extensions cannot be checked without setuptools: pip install setuptools"
Row = dict[str, Any]


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace `path` in one step; each of the `rows` is a line, of six digits."""
    rows = ",\n  ".join(json.dumps(rounded(row)) for row in data["rows"])
    head = json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1).removesuffix("\n}")
    recording.write_bytes(path, f'{head},\n "rows": [\n  {rows}\n ]\n}}\n'.encode())


def rounded(row: Any) -> Any:
    """Row with its floating-point numbers to six significant digits; a measurement has no more."""
    return json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.6g}"))


def write_record(path: Path, rows: list[Row], device: str = "cpu", remark: str | None = None) -> None:
    """Write the rows of this run with their provenance."""
    write_json(path, provenance(device) | {"remark": remark, "rows": rows})


def provenance(device: str = "cpu") -> dict[str, Any]:
    """Provenance of this run: machine, command, date, commit."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    return {"machine": machine(device), "command": command(sys.orig_argv), "date": date}


def command(words: list[str]) -> str:
    """Command as typed, from the interpreter's arguments; a script installed next to the interpreter by its name.

    What limits the threads comes first: OMP_NUM_THREADS, and taskset if the process may not use all cores.
    """
    interpreter, *given = words
    threads, cores = os.environ.get("OMP_NUM_THREADS"), sorted(os.sched_getaffinity(0))
    limits = [f"OMP_NUM_THREADS={threads}"] if threads else []
    limits += ["taskset", "-c", ",".join(map(str, cores))] if len(cores) < (os.cpu_count() or 1) else []
    if given and os.path.dirname(os.path.abspath(given[0])) == os.path.dirname(interpreter):
        return shlex.join([*limits, os.path.basename(given[0]), *given[1:]])
    return shlex.join([*limits, "python", *given])


def read_record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def commit() -> str:
    """Commit of the checkout, with "+changes" if tracked files other than ``WRITTEN``, or those of a build, differ."""
    given = os.environ.get("DEQFAST_COMMIT")  # of a copy without git's data
    head = recording.commit(RESULTS.parent) or "unknown"
    others = ("--", ":/", *(f":(top,exclude){path}" for path in WRITTEN))
    status = ("git", "-C", str(RESULTS.parent), "status", "--porcelain", "--untracked-files=no")
    changed = not given and recording.tool(*status, *others)
    if stale := stale_extensions():
        warnings.warn("; ".join(stale), stacklevel=2)
    return head + ("+changes" if changed or stale else "")


def stale_extensions() -> list[str]:
    """Sentences on extension modules built from other sources, with the remedy; or on why setup.py cannot say."""
    modules = {"cpu": _extension.cpp_module, "cuda": _extension.cuda_module}
    loaded = {device: module for device, module in modules.items() if module is not None}
    if not loaded:
        return []
    if importlib.util.find_spec("setuptools") is None:
        return [NO_SETUPTOOLS]
    digest = runpy.run_path(str(SETUP))["digest"]
    return [
        f"{module.__name__} was built from other sources than csrc/ has: install deqfast again (pip install -e .)"
        for device, module in loaded.items()
        if module.build_info().get("sources") != digest(device)
    ]


@functools.cache
def machine(device: str = "cpu") -> dict[str, Any]:
    """Machine and versions of the measurement."""
    gpu = device == "cuda"
    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    # Present and maximum clocks; the power limit.
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
    return {
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "nvidia_smi": recording.tool("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader") if gpu else None,
        "processor": recording.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "deqfast": deqfast.__version__,
        "commit": commit(),
        "kernels": {name: str(state).replace(str(ROOT), ".") for name, state in deqfast.backends().items()},
    }
