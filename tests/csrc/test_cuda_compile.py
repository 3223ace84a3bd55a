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
        built = cuobjdump.cuda_kernels()
    except cuobjdump.Unavailable as reason:
        pytest.skip(str(reason))
    if {kernel.architecture for kernel in built} != ARCHITECTURES:
        pytest.skip("the CUDA kernels were built for some architectures only (TORCH_CUDA_ARCH_LIST)")
    return built


@pytest.fixture
def aligned(kernels):
    """Kernels of the solver steps for aligned rows."""
    vector = re.compile(r"picard_\w+<\w+, (\d+)|multisecant_\w+<.*?, (\d+)>")  # elements of an access
    steps = [(kernel, vector.match(kernel.name)) for kernel in kernels]
    return [kernel for kernel, step in steps if step and int(step[1] or step[2]) > 1]


def test_every_kernel_is_built_for_every_architecture_fits_and_does_not_spill(kernels):
    names = {kernel.name for kernel in kernels}
    assert len(names) > 50
    assert len(kernels) == len(names) * len(ARCHITECTURES)
    for kernel in kernels:
        assert kernel.stack == 0, kernel
        assert kernel.shared <= STATIC_SHARED_LIMIT, kernel
        assert kernel.barriers <= MAX_BARRIERS, kernel


def test_aligned_rows_are_loaded_and_stored_by_16_bytes(aligned):
    assert len(aligned) > 30
    for kernel in aligned:
        assert kernel.wide_loads, kernel
        stores_rows = not kernel.name.startswith(("picard_sums", "picard_row_sums", "multisecant_dots_kernel"))
        assert kernel.wide_stores or not stores_rows, kernel
        assert not kernel.short_stores, kernel


def test_steps_have_many_loads_under_way(aligned):
    """4.8 TB/s on 132 multiprocessors, and 0.8 us per load, need 29 KB under way on each."""
    for kernel in (kernel for kernel in aligned if kernel.architecture == "sm_90"):
        first_sweep = kernel.name.startswith("multisecant_left_kernel")  # nothing else is in it
        assert (min if first_sweep else max)(kernel.in_flight) >= 29_000, kernel


def test_a_flight_ends_where_its_last_load_is_waited_for():
    loads = cuobjdump.Loads()
    for line in (
        "/*10*/  LDG.E.128 R4, desc[UR4][R2.64] ;",
        "/*20*/  @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64+0x10] ;",
        "/*30*/  LDG.E R20, desc[UR4][R2.64] ;",
        "/*40*/  FADD R0, R9, R1 ;",  # waits for the two first
        "/*50*/  LDG.E.64 R12, desc[UR4][R20.64] ;",  # and this for the third
        "/*60*/  DADD R30, R30, R12 ;",
        "/*70*/  LDG.E R4, desc[UR4][R2.64] ;",  # none of 16 bytes
        "/*80*/  FADD R0, R4, R1 ;",
    ):
        loads.see(line)
    assert loads.flights == [36]


def test_code_is_read_once(monkeypatch, tmp_path):
    """And once for all processes, if a folder for what was read is named."""
    for folder, read in (("", 2), (str(tmp_path), 1)):
        monkeypatch.setenv("DEQFAST_DISASSEMBLED", folder)
        codes = iter([["a", 1], ["b", 2]])
        for _ in range(2):
            code = cuobjdump.read_once(b"code", lambda codes=codes: next(codes))
        assert code == [["a", 1], ["b", 2]][read - 1]
        assert cuobjdump.read_once(b"other code", lambda: ["c", 3]) == ["c", 3]
