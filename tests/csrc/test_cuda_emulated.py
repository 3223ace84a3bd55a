"""The emulation of CUDA finds what it is for; and how often the kernels launch. Those of the solver steps: see
tests/test_host.py. What they compute, in any order of the threads, is tested with the other implementations."""

from __future__ import annotations

import emulate
import pytest
import torch
from op_calls import good

from deqfast.testing.norm_states import NORM_OPS, NormCase

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


@pytest.mark.parametrize("implementation", ["emulated"], indirect=True)
@pytest.mark.parametrize("op", [*NORM_OPS, "fc_fixed_point"])
def test_one_launch_and_none_for_an_empty_batch(op, implementation):
    run, before = implementation.op(op, op.removesuffix("_backward")), emulate.launches()
    run(*good(op).values())
    assert emulate.launches() - before == 1
    if op in NORM_OPS:
        run(*NormCase(op, shape=(0, 16, 3, 5)).arguments().values())
        assert emulate.launches() - before == 1
