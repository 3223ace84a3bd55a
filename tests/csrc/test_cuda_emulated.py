"""What the emulation of the CUDA kernels is for: any order of the threads, and the number of launches. What the steps
compute is tested with the others', in tests/test_steps.py; see emulate.py."""

from __future__ import annotations

import emulate
import pytest
import torch

from deqfast.testing.states import METHODS, Case, check_step

EVENTS = ("run", "done", "nan", "inf", "overflow", "tiny", "converged", "zero", "stalled", "degenerate")

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")


class TestEmulation:
    """It finds a barrier that is missing."""

    SOURCE = """
#include <cuda_runtime.h>
__global__ void reverse(int* data) {
  __shared__ int buffer[64];
  buffer[threadIdx.x] = data[threadIdx.x];
  BARRIER
  data[threadIdx.x] = buffer[63 - threadIdx.x];
}
extern "C" void run(int* data) { reverse<<<1, 64, 0, nullptr>>>(data); }
"""

    @pytest.mark.parametrize("barrier", ["__syncthreads();", ""])
    def test_a_missing_barrier_shows(self, barrier, tmp_path):
        path = tmp_path / "reverse.cu"
        path.write_text(self.SOURCE.replace("BARRIER", barrier))
        run, right = emulate.build(path).run, []
        for order in emulate.ORDERS:
            data = torch.arange(64, dtype=torch.int32)
            with emulate.order(order):
                run(emulate.address(data))
            right.append(data.tolist() == list(range(63, -1, -1)))
        assert all(right) if barrier else not any(right)


@pytest.fixture(params=[1, 2], ids=["one block", "two blocks"])
def blocks(request):
    """Blocks that share a sample of 8192 elements: on a GPU that the samples do not fill, more than one."""
    if request.param > 1:
        emulate.set_device(processors=132, shared_memory=227 * 1024)
    yield request.param
    emulate.set_device(processors=4, shared_memory=99 * 1024)


@pytest.mark.parametrize("order", emulate.ORDERS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("method", [None, *METHODS])
def test_steps_in_any_order_of_the_threads(method, last, order, blocks):
    rows = tuple(event for event in EVENTS if method or event != "degenerate")
    case = Case(method, batch=len(rows), size=8192, history=3, k=6, stall_floor=1e-3, rows=rows, last=last)
    name = "picard_step" if method is None else "multisecant_step"
    emulate.load(name)
    launches = []

    def step(*arguments):
        before = emulate.launches()
        getattr(torch.ops.deqfast_emulated, name)(*arguments)
        launches.append(emulate.launches() - before)

    with emulate.order(order):
        check_step(step, case)
    assert launches == [1 if blocks == 1 else 2]
