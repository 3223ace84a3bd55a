"""The Triton kernels compiled for GPUs that are not here: no spills, shared memory and barriers within limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
if not (Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
    pytest.skip("this triton does not bring NVIDIA's tools", allow_module_level=True)


def test_code_of_every_kernel_is_within_its_limits(tmp_path):
    """In a process of its own: the interpreter and the compiler exclude each other."""
    target = tmp_path / "rows.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "deqfast.testing.aot", "--json", target]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert target.exists(), result.stderr
    rows = json.loads(target.read_text())
    assert {row["arch"] for row in rows} == {80, 86, 90}
    kernels = {"picard", "left", "solve", "right", "transp", "act", "act'", "resid", "resid'"}
    kernels |= {"sums", "means", "scatter", "fc", "fc_vjp"}
    kernels |= {"picard/sums", "picard/judge", "picard/step", "left/sums", "left/judge", "right/step", "row"}
    assert {row["case"]["kernel"] for row in rows} == kernels
    assert [row for row in rows if row["faults"]] == []
    assert result.returncode == 0, result.stderr
