"""What the compiled code of the GPU kernels needs, without a GPU: registers, stack, shared memory, barriers.

The Triton kernels are compiled ahead of time by ``deqfast.testing.aot``, in a process of its own; the CUDA kernels are
read from the extension as it was built.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deqfast import _extension
from deqfast.testing.cuobjdump import CUOBJDUMP, demangle

from .record import Row

Usage = dict[tuple[str, str], dict[str, int]]  # (mangled name, "sm_90") -> counters


def depends_on(group: str) -> str:
    """The compiler, and what else the rows of "triton" or "cuda" depend on."""
    if CUOBJDUMP is None:
        return "no compiler of triton's, nor its cuobjdump"
    if group == "triton":
        import triton

        return f"triton {triton.__version__}"
    if _extension.cuda_module is None:
        return f"no CUDA kernels ({_extension.cuda_reason})"
    if shutil.which("c++filt") is None:
        return "CUDA kernels whose names cannot be read (no c++filt)"
    version = _extension.cuda_module.build_info()["cuda"]
    architectures = ", ".join(sorted({architecture for _, architecture in cuda_resources()}))
    return f"nvcc {version // 1000}.{version % 1000 // 10} for {architectures}"


def triton_rows() -> list[Row]:
    """A row per kernel and specialisation; about 100 s of one core, 20 s with those that triton's cache has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "rows.json")
        command = [sys.executable, "-m", "deqfast.testing.aot", "--json", str(target)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not target.exists():  # it fails also where limits are broken, which its own test reports
            raise RuntimeError(f"aot.py compiled nothing: {result.stderr[-2000:]}")
        compiled = json.loads(target.read_text())
    rows: dict[str, Row] = {}
    for entry in compiled:
        case = entry["case"]
        dtypes = "/".join(filter(None, (case["state"], case["history"])))
        parts = [case["kernel"], dtypes, case["method"], f"window={case['window']}", f"size={case['size']}"]
        name = " ".join(filter(None, parts))
        row = rows.setdefault(name, {"section": "triton", "case": name, "provider": "triton"})
        row |= on_architecture(f"sm_{entry['arch']}", entry)
    return list(rows.values())


def on_architecture(architecture: str, entry: dict[str, Any]) -> dict[str, int]:
    return {f"{name} {architecture}": entry[name] for name in ("registers", "stack", "shared", "barriers")}


def cuda_rows() -> list[Row]:
    """A row per kernel of the built extension; about 30 s."""
    usage, barriers = cuda_resources(), cuda_barriers()
    readable = demangle(sorted({name for name, _ in usage}))
    if len(set(readable.values())) < len(readable):
        raise RuntimeError("two kernels of the CUDA extension have one name")
    rows: dict[str, Row] = {}
    for name, architecture in sorted(usage):
        row = rows.setdefault(name, {"section": "cuda", "case": readable[name], "provider": "cuda"})
        entry = {**usage[name, architecture], "barriers": barriers[name, architecture]}
        row |= on_architecture(architecture, entry)
    return list(rows.values())


def cuda_resources() -> Usage:
    usage, architecture, name = {}, "", ""
    for line in dump("--dump-resource-usage"):
        if line.startswith("arch = "):
            architecture = line.split()[-1]
        elif match := re.match(r" Function (\w+):", line):
            name = match.group(1)
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+)", line):
            counters = zip(("registers", "stack", "shared"), map(int, match.groups()), strict=True)
            usage[name, architecture] = dict(counters)
    return usage


def cuda_barriers() -> collections.Counter[tuple[str, str]]:
    """Barriers in the code."""
    barriers: collections.Counter[tuple[str, str]] = collections.Counter()
    architecture, name = "", ""
    for line in dump("-sass"):
        if "BAR.SYNC" in line:
            barriers[name, architecture] += 1
        elif line.startswith("arch = "):
            architecture = line.split()[-1]
        elif "Function : " in line:
            name = line.split()[-1]
    return barriers


def dump(option: str) -> Any:
    """The lines that cuobjdump prints of the extension, one by one: its assembly is 350 MB."""
    assert CUOBJDUMP is not None and _extension.cuda_module is not None
    command = [str(CUOBJDUMP), option, str(_extension.cuda_module.__file__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
