"""Counters compared with the committed baseline: none may rise.

    pytest benchmarks --gate

Calls of f, operations, host waits, allocations and memory of small solves, layers and metrics; registers, stack, shared
memory and barriers of the compiled Triton and CUDA kernels.
"""

import pytest
from harness import compiled, counted
from harness.gate import judge

pytestmark = pytest.mark.gate


@pytest.fixture
def update(pytestconfig):
    return pytestconfig.getoption("--update-baseline")


def test_counters(update):
    judge("counters", {case: counted.measure(case) for case in counted.CASES}, update)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("compiler", compiled.COMPILERS)
def test_compiled_kernels(update, compiler):
    try:
        name, rows = compiled.COMPILERS[compiler]()
    except compiled.Unavailable as reason:
        pytest.skip(str(reason))
    judge(name, rows, update, alike=False)
