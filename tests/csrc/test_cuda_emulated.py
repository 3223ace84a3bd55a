"""The emulation of CUDA finds the faults that it is made for; and the number of launches. For the solver steps see
tests/test_host.py. Results, in any order of the threads, are tested with the other implementations."""

from __future__ import annotations

import ctypes
import re

import emulate
import pytest
import torch
from correctness.norm_states import NORM_OPS, NormCase
from op_calls import good

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no g++ was found")


SOURCE = r"""
#include <cuda_runtime.h>

#include <stdexcept>

// Each reverses 64 numbers if its fault is 0.

template <int kFault>
__global__ void barrier(int* data) {
  __shared__ int buffer[64];
  buffer[threadIdx.x] = data[threadIdx.x];
  if (kFault != 1) __syncthreads();
  data[threadIdx.x] = buffer[63 - threadIdx.x];
}

// The last of two blocks to arrive writes what both have stored after the numbers.
template <int kFault>
__global__ void hand_over(int* data) {
  __shared__ bool last;
  const int own = blockIdx.y * 32 + threadIdx.x;
  data[64 + own] = data[own];
  if (kFault != 1) __threadfence();
  if (kFault != 2) __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(data + 128, 1) % 2 == 1;
  __syncthreads();
  if (!last) return;
  if (kFault != 3) __threadfence();
  for (int i = threadIdx.x; i < 64; i += 32) data[i] = data[127 - i];
}

// Two blocks wait for what the other leaves.
template <int kFault>
__global__ void meeting(int* data) {
  const int own = blockIdx.y * 32 + threadIdx.x;
  data[64 + own] = data[own];
  __syncthreads();
  if (threadIdx.x == 0) {
    if (kFault != 1) __threadfence();
    atomicAdd(data + 128, 1);
    while (kFault != 2 && *static_cast<volatile int*>(data + 128) < 2) __nanosleep(20);
    if (kFault != 3) __threadfence();
  }
  __syncthreads();
  data[own] = data[127 - own];
}

template <int kFault>
__global__ void copies(int* data) {
  __shared__ int buffer[64];
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(buffer + threadIdx.x))), "l"(data + threadIdx.x),
                 "n"(sizeof(int))
               : "memory");
  if (kFault != 1 && kFault != 2) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  if (kFault == 2) asm volatile("cp.async.wait_all;" ::: "memory");
  data[threadIdx.x] = buffer[63 - threadIdx.x];
}

template <int kFault>
__global__ void lanes(int* data) {
  const unsigned lane = threadIdx.x % 32, mask = kFault == 1 ? 0x7fffffffu : ~0u;
  if (kFault == 2 && lane == 31) return;
  int x = data[threadIdx.x];
  __syncthreads();
  if (kFault == 3 && lane == 31) x = __shfl_sync(mask, x, 0);
  else x = __shfl_sync(mask, x, 31 - lane);
  __syncwarp(kFault == 4 && lane == 0 ? 3u : ~0u);
  data[(threadIdx.x + 32) % 64] = x;
}

template <int kFault>
__global__ void places(int* data) {
  extern __shared__ int memory[];
  memory[kFault == 1 ? threadIdx.x + 1 : threadIdx.x] = data[threadIdx.x];
  if (kFault == 2 && threadIdx.x < 32) __syncthreads();
  else __syncthreads();
  if (kFault == 3 && threadIdx.x % 32 == 0) __syncwarp();
  else if (kFault == 3) __syncthreads();
  if (kFault == 4 && threadIdx.x == 0) memory[0] = reinterpret_cast<uint4*>(data + 1)->x;
  data[threadIdx.x] = memory[63 - threadIdx.x];
}

// The message of an error, or an empty one.
extern "C" const char* run(const char* name, int* data) {
  static std::string message;
  message.clear();
  try {
    LAUNCHES
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  return message.c_str();
}
"""

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
    path.write_text(SOURCE.replace("LAUNCHES", "\n".join(launches)))
    run = emulate.build(path).run
    run.restype = ctypes.c_char_p
    return run


@pytest.mark.parametrize("order", emulate.ORDERS)
@pytest.mark.parametrize("kernel", FAULTS)
def test_each_fault_shows_and_nothing_else(kernel, order, run):
    for fault, message in enumerate(["", *FAULTS[kernel]]):
        data = torch.cat([torch.arange(64), torch.zeros(65)]).int()
        with emulate.order(order):
            said = run(f"{kernel}<{fault}>".encode(), emulate.address(data)).decode()
        assert re.search(message or "^$", said), (fault, said)
        assert (fault > 0) == (data[:64].tolist() != [*range(63, -1, -1)] or bool(said)), (fault, data, said)


@pytest.mark.parametrize("implementation", ["emulated"], indirect=True)
@pytest.mark.parametrize("op", [*NORM_OPS, "fc_fixed_point"])
def test_one_launch_and_none_for_an_empty_batch(op, implementation):
    run, before = implementation.op(op, op.removesuffix("_backward")), emulate.launches()
    run(*good(op).values())
    assert emulate.launches() - before == 1
    if op in NORM_OPS:
        run(*NormCase(op, shape=(0, 16, 3, 5)).arguments().values())
        assert emulate.launches() - before == 1
