"""Counters beside the committed baseline: none may rise.

    pytest benchmarks --gate=counters

Calls of f, operations, host waits, allocations and memory of small solves, layers and metrics; registers, stack, shared
memory and barriers of the compiled Triton and CUDA kernels.
"""

import pytest
from harness import compiled, counted

pytestmark = pytest.mark.gate("counters")


@pytest.mark.parametrize("case", counted.CASES)
def test_counters(gate, case):
    gate.counters(case, counted.measure(case))


def test_every_baseline_is_measured(gate):
    gate.close("counters", counted.CASES)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", compiled.COMPILERS)
def test_compiled_kernels(gate, compiler):
    try:
        name, rows, depends_on = compiled.COMPILERS[compiler]()
    except compiled.Unavailable as reason:
        gate.not_judged(compiler, str(reason))
    gate.compiled(name, rows, compiled.broken_limits(rows), depends_on)
