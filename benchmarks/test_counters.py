"""Counters beside the committed baseline: none may rise.

    pytest benchmarks --gate

Calls of f, operations, host waits, allocations and memory of small solves, layers and metrics; registers, stack, shared
memory and barriers of the compiled Triton and CUDA kernels.
"""

import pytest
from harness import compiled, counted

pytestmark = pytest.mark.gate


def test_counters(gate):
    gate.judge("counters", {case: counted.measure(case) for case in counted.CASES})


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", compiled.COMPILERS)
def test_compiled_kernels(gate, compiler):
    try:
        name, rows, version = compiled.COMPILERS[compiler]()
    except compiled.Unavailable as reason:
        gate.not_judged(compiler, str(reason))
    gate.judge(name, rows, version)
