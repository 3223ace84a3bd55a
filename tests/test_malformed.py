"""Malformed arguments of the CPU ops: each call raises an error or stays within the memory of its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = 120  # of each op


@pytest.mark.usefixtures("cpp_kernels")
def test_no_call_leaves_its_memory():
    command = [sys.executable, "-X", "faulthandler", str(Path(__file__).with_name("malformed.py")), str(CALLS), "1"]
    path = os.pathsep.join(["benchmarks", os.environ.get("PYTHONPATH", "")])
    options: dict = {"cwd": Path(__file__).parents[1], "env": {**os.environ, "PYTHONPATH": path}}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout)
    assert sum(map(sum, outcomes.values())) >= 2000
    for op, (accepted, refused) in outcomes.items():
        assert accepted >= 10 and refused >= 10, (op, accepted, refused)
