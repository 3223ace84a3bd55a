"""The way of a training step through the code stays short."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("calls.py")


@pytest.mark.usefixtures("cpp_kernels")
def test_files_and_calls_of_a_step():
    """In a process of their own: a step asks more if dynamo is loaded."""
    command = [sys.executable, SCRIPT, "jfb", "implicit"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    passed = [int(number) for number in re.findall(r"\d+", printed)]
    assert len(passed) == 4 and all(map(operator.le, passed, (16, 120, 24, 320))), printed
