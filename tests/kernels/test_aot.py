"""Triton kernels compiled for GPUs without a GPU: no spills; shared memory and barriers within limits."""

from __future__ import annotations

import pytest
from harness.compiled import Unavailable, ahead_of_time

# Compiled together: each group and architecture takes a process, which takes seconds to start.
GROUPS = [
    ("picard", "picard/sums", "picard/judge", "picard/step", "fc", "fc_vjp"),
    ("left", "left/shared", "judge", "sums", "means", "scatter"),
    ("left/half", "totals", "enter", "solve/half", "right/half", "row/half", "picard/totals", "picard/verdict"),
    ("right", "right/shared", "row", "solve", "dots", "gamma", "product", "act", "act'", "resid", "resid'"),
]


@pytest.mark.tier("full")
@pytest.mark.parametrize("kernels", GROUPS, ids=lambda kernels: kernels[0])
@pytest.mark.parametrize("architecture", [80, 86, 90])
def test_code_of_every_kernel_is_within_its_limits(architecture, kernels):
    try:
        rows = ahead_of_time("--arch", str(architecture), "--kernels", *kernels)
    except Unavailable as reason:
        pytest.skip(str(reason))
    assert {row["arch"] for row in rows} == {architecture}
    assert {row["kernel"] for row in rows} == set(kernels)
    assert [row for row in rows if row["faults"]] == []


def test_the_groups_have_every_kernel():
    aot = pytest.importorskip("harness.aot", reason="no triton")
    assert sorted(name for group in GROUPS for name in group) == sorted({case.kernel for case in aot.table()})
