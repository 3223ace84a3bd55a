"""Counters beside the committed baseline: none may rise.

    pytest benchmarks --gate=counters

Calls of f, torch operations, host waits, allocations and memory of small solves, layers and metrics; registers, stack,
shared memory and barriers of the compiled Triton and CUDA kernels.
"""

import pytest
from harness import compiled, counted

pytestmark = pytest.mark.gate("counters")
COMPILED = {"triton": compiled.triton_rows, "cuda": compiled.cuda_rows}


@pytest.mark.parametrize("case", counted.CASES)
def test_counters(gate, case):
    gate.require("counters", counted.depends_on())
    gate.counters("counters", [counted.measure(case)])


def test_every_baseline_is_measured(gate):
    gate.require("counters", counted.depends_on())
    gate.close("counters", counted.CASES, counted.depends_on())


@pytest.mark.parametrize("group", COMPILED)
def test_compiled_kernels(gate, group):
    depends_on = compiled.depends_on(group)
    gate.require(group, depends_on)
    gate.whole(group, COMPILED[group](), depends_on)
