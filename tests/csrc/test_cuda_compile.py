"""The built CUDA kernels on the supported architectures: registers, stack, shared memory, instructions."""

import re

import pytest
from harness import cuobjdump

ARCHITECTURES = {"sm_80", "sm_86", "sm_90"}
STATIC_SHARED_LIMIT = 48 * 1024  # bytes of a kernel without opting in to more, on every architecture
MAX_BARRIERS = 32


@pytest.fixture(scope="module")
def kernels():
    try:
        compiled = cuobjdump.cuda_kernels()
    except cuobjdump.Unavailable as reason:
        pytest.skip(str(reason))
    if {kernel.architecture for kernel in compiled} != ARCHITECTURES:
        pytest.skip("the CUDA kernels were built for some architectures only (TORCH_CUDA_ARCH_LIST)")
    return compiled


def moves_rows(kernel):
    """Return whether it is a kernel of the solver steps for aligned rows."""
    step = re.match(r"picard_\w+<\w+, (\d+)|multisecant_\w+<.*?, (\d+)>", kernel.name)
    return step is not None and int(step.group(1) or step.group(2)) > 1


def test_every_kernel_is_built_for_every_architecture_fits_and_does_not_spill(kernels):
    names = {kernel.name for kernel in kernels}
    assert len(names) > 50
    assert len(kernels) == len(names) * len(ARCHITECTURES)
    for kernel in kernels:
        assert kernel.stack == 0, kernel
        assert kernel.shared <= STATIC_SHARED_LIMIT, kernel
        assert kernel.barriers <= MAX_BARRIERS, kernel


def test_aligned_rows_are_loaded_and_stored_by_16_bytes(kernels):
    aligned = [kernel for kernel in kernels if moves_rows(kernel)]
    assert len(aligned) > 30
    for kernel in aligned:
        assert kernel.wide_loads, kernel
        stores_rows = not kernel.name.startswith(("picard_sums", "picard_row_sums", "multisecant_dots_kernel"))
        assert kernel.wide_stores or not stores_rows, kernel
        assert not kernel.short_stores, kernel


def test_code_is_read_once(monkeypatch, tmp_path):
    read = []

    def look(name):
        read.append(name)
        return [name, 1]

    for folder, expected in (("", ["a", "a"]), (str(tmp_path / "kept"), ["a", "b"])):
        monkeypatch.setenv("DEQFAST_DISASSEMBLED", folder)
        read.clear()
        assert [cuobjdump.read_once(b"code", lambda: look("a")) for _ in range(2)] == [["a", 1]] * 2
        if folder:
            assert cuobjdump.read_once(b"other code", lambda: look("b")) == ["b", 1]
        assert read == expected
