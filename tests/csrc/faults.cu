// Kernels with faults, for test_cuda_emulated.py, which writes their launches in the place of LAUNCHES.

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
    LAUNCHES;
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  return message.c_str();
}
