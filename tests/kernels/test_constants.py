"""The constants of Python's kernels are those of the C++ header."""

from __future__ import annotations

import re
from pathlib import Path

from deqfast.kernels import constants

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "common" / "constants.h"


def constant_name(name: str) -> str:
    """STALL_GAIN for kStallGain; the last capitals of a name are a Roman number."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def header_constants() -> dict[str, float]:
    text = HEADER.read_text()
    entries = re.findall(r"constexpr \w+ (k\w+) = ([^;]+);", text)
    for body in re.findall(r"enum \w+ : \w+ \{([^}]*)\}", text):
        entries += re.findall(r"(k\w+) = (\w+)", body)
    return {constant_name(name): float(value) for name, value in entries}


def test_python_and_cpp_hold_the_same_constants():
    ours = {name: value for name, value in vars(constants).items() if name.isupper()}
    assert len(ours) > 12
    assert header_constants() == ours
