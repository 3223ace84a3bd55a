"""Resources of the compiled GPU kernels, found without a GPU: registers, stack, shared memory, barriers.

``harness.aot`` compiles the Triton kernels ahead of time. The CUDA kernels are read from the built extension.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deqfast import _extension

from . import cuobjdump
from .cuobjdump import Unavailable
from .gate import Rows

MEASURED = ("registers", "stack", "shared", "barriers")  # counters, each for an architecture: "registers sm_90"


def ahead_of_time(*options: str) -> list[dict[str, Any]]:
    """Rows of ``harness.aot`` with `options`, from a separate process: interpreter and compiler exclude each other.

    Without options it takes two minutes, or 10 s from cache.
    """
    if cuobjdump.CUOBJDUMP is None:
        raise Unavailable("no triton, or one without cuobjdump")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "rows.json")
        command = [sys.executable, "-m", "harness.aot", "--json", str(target), *options]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not target.exists():  # it also fails if a row has faults
            raise RuntimeError(f"aot compiled nothing: {result.stderr[-2000:]}")
        return json.loads(target.read_text())


def triton_kernels() -> tuple[str, Rows]:
    """Name of the baseline, and a row per kernel and specialisation."""
    rows: Rows = {}
    for entry in ahead_of_time():
        dtypes = "/".join(filter(None, (entry["state"], entry["history"])))
        parts = [entry["kernel"], dtypes, entry["method"], f"window={entry['window']}", f"size={entry['size']}"]
        parts += [f"warps={entry['given_warps']}"] if entry["given_warps"] else []
        row = rows.setdefault(" ".join(filter(None, parts)), {})
        row |= {f"{name} sm_{entry['arch']}": entry[name] for name in MEASURED}
    minor = ".".join(importlib.metadata.version("triton").split(".")[:2])  # patch releases share a baseline
    return f"triton-{minor}", rows


def cuda_kernels() -> tuple[str, Rows]:
    """As ``triton_kernels``, for the built extension and its architectures; takes about 30 s."""
    rows: Rows = {}
    for kernel in cuobjdump.cuda_kernels():
        row = rows.setdefault(kernel.name, {})
        row |= {f"{name} {kernel.architecture}": getattr(kernel, name) for name in MEASURED}
    assert _extension.cuda_module is not None
    version = _extension.cuda_module.build_info()["cuda"]
    return f"cuda-{version // 1000}.{version % 1000 // 10}", rows


COMPILERS: dict[str, Callable[[], tuple[str, Rows]]] = {"triton": triton_kernels, "cuda": cuda_kernels}
