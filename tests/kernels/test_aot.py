"""Triton kernels compiled for GPUs without a GPU: no spills, no short offsets; shared memory and barriers in limits."""

from __future__ import annotations

import pytest
from harness.compiled import Unavailable, ahead_of_time

aot = pytest.importorskip("harness.aot", reason="no triton")


@pytest.mark.tier("full")
@pytest.mark.parametrize("architecture", aot.SHARED_LIMIT)
def test_code_of_every_kernel_is_within_its_limits(architecture):
    try:
        rows = ahead_of_time("--arch", str(architecture))
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert {row["arch"] for row in rows} == {architecture}
    assert {row["kernel"] for row in rows} == {case.kernel for case in aot.table()}
    assert [row for row in rows if row["faults"]] == []
