"""The emulation of CUDA finds the faults that it is made for; and the number of launches. For the solver steps see
tests/test_host.py. Results, in any order of the threads, are tested with the other implementations."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import emulate
import pytest
import torch
from correctness.norm_states import NORM_OPS, NormCase
from op_calls import good

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")


NOT_IN_ORDER = "thread .* of block .* global memory that thread .*, without fences and an atomic in between"
# Message for each fault; None: its results are wrong.
FAULTS = {
    "barrier": [None],
    "hand_over": [NOT_IN_ORDER] * 3,
    "meeting": [NOT_IN_ORDER] * 3,
    "copies": [None, None],
    "lanes": ["leaves (itself )?out", "ended", "other lanes are elsewhere", "wait with another mask"],
    "places": ["beyond the shared memory", "threads of a block are at", "deadlock", "not aligned"],
}
GRIDS = {"hand_over": "dim3(1, 2), 32", "meeting": "dim3(1, 2), 32"}
KERNELS = [f"{kernel}<{fault}>" for kernel in FAULTS for fault in range(len(FAULTS[kernel]) + 1)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    launches = (
        f'if (!strcmp(name, "{kernel}")) {kernel}<<<{GRIDS.get(kernel.partition("<")[0], "1, 64")}, 256>>>(data);'
        for kernel in KERNELS
    )
    path = tmp_path_factory.mktemp("emulated") / "faults.cu"
    source = Path(__file__).with_name("faults.cu").read_text()
    path.write_text(source.replace("LAUNCHES;", "\n".join(launches)))
    run = emulate.build(path).run
    run.restype = ctypes.c_char_p
    return run


@pytest.mark.parametrize("order", emulate.ORDERS)
@pytest.mark.parametrize("kernel", FAULTS)
def test_each_fault_shows_and_nothing_else(kernel, order, run):
    for fault, message in enumerate(["", *FAULTS[kernel]]):
        data = torch.cat([torch.arange(64), torch.zeros(65)]).int()
        with emulate.order(order):
            error = run(f"{kernel}<{fault}>".encode(), emulate.address(data)).decode()
        assert re.search(message or "^$", error), (fault, error)
        assert (fault > 0) == (data[:64].tolist() != [*range(63, -1, -1)] or bool(error)), (fault, data, error)


@pytest.mark.parametrize("implementation", ["emulated"], indirect=True)
@pytest.mark.parametrize("op", [*NORM_OPS, "fc_fixed_point"])
def test_a_single_launch_and_none_for_an_empty_batch(op, implementation):
    run, before = implementation.op(op), emulate.launches()
    run(*good(op).values())
    assert emulate.launches() - before == 1
    if op in NORM_OPS:
        run(*NormCase(op, shape=(0, 16, 3, 5)).arguments().values())
        assert emulate.launches() - before == 1
