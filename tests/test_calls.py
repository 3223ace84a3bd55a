"""The way of a training step through the code stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("calls.py")


@pytest.mark.usefixtures("cpp_kernels")
@pytest.mark.parametrize(("adjoint", "files", "calls"), [("jfb", 16, 120), ("implicit", 24, 320)])
def test_files_and_calls_of_a_step(adjoint, files, calls):
    """In a process of its own: a step asks more if dynamo is loaded."""
    command = [sys.executable, SCRIPT, adjoint]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    passed = [int(number) for number in re.findall(r"\d+", printed)]
    assert passed[0] <= files and passed[1] <= calls
