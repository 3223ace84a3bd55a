"""Repetitions of Python in the C++ headers: the constants, the order of the stop rule, and the arguments of the ops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deqfast.kernels import constants

from deqfast.ops.registry import OPS
from deqfast.ops.steps import PROGRESS, StopRule

CSRC = Path(__file__).resolve().parents[2] / "csrc"
TYPES = {"Tensor": "Tensor", "int": "int64_t", "float": "double", "bool": "bool"}


def header(name: str) -> str:
    """csrc/common/`name`, without comments."""
    return re.sub(r"//.*", "", (CSRC / "common" / name).read_text())


def constant_name(name: str) -> str:
    """STALL_GAIN for kStallGain; the last capitals of a name are a Roman number."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("k")).upper()


def header_constants() -> dict[str, float]:
    text = header("constants.h")
    entries = re.findall(r"constexpr \w+ (k\w+) = ([^;]+);", text)
    for body in re.findall(r"enum \w+ : \w+ \{([^}]*)\}", text):
        entries += re.findall(r"(k\w+) = (\w+)", body)
    return {constant_name(name): float(value) for name, value in entries}


def test_python_and_cpp_hold_the_same_constants():
    ours = {name: value for name, value in vars(constants).items() if name.isupper()}
    assert len(ours) > 12
    assert header_constants() == ours


def test_the_stop_rule_and_the_progress_have_the_same_order():
    body = {kind: re.search(rf"{kind} \{{([^}}]*)\}}", header("monitor.h"))[1] for kind in ("RuleNumbers", "Progress")}
    assert re.findall(r"(\w+)(?= *[;,])", body["RuleNumbers"]) == list(StopRule._fields)
    assert len(body["Progress"].split(",")) == len(PROGRESS) + 1
    common = pytest.importorskip("deqfast.kernels.common", reason="no triton")
    assert [common.progress_row(name) for name in PROGRESS] == [*range(len(PROGRESS))]


def signatures() -> dict[str, list[tuple[str, str]]]:
    """Type and name of every argument of the functions in csrc/common that are templates on a device.

    An argument that is a struct stands for its fields, see flat.h.
    """
    text = "".join(header(path.name) for path in (CSRC / "common").glob("*.h"))
    structs = dict(re.findall(r"struct (\w+) \{([^{}()]*)\}", text))

    def fields(arguments: str, end: str) -> list[tuple[str, str]]:
        listed = [declared.split(maxsplit=1) for declared in arguments.split(end) if declared.strip()]
        pairs = [(kind, name) for kind, names in listed for name in names.split(", ")]
        return [
            field
            for kind, name in pairs
            for field in (fields(structs[kind], ";") if kind in structs else [(kind, name)])
        ]

    functions = re.findall(r"template <class Device>\s+[\w:<>, ]+? (\w+)\(([^)]*)\)", text)
    return {name: fields(arguments, ",") for name, arguments in functions if name in OPS}


@pytest.mark.parametrize("op", OPS)
def test_the_arguments_of_an_op_have_the_same_order(op):
    table = re.findall(r"([\w\[\]]+)(?:\(\w!\))? (\w+)", OPS[op].schema.partition(" -> ")[0])
    assert signatures()[op] == [(TYPES[kind], name) for kind, name in table]
