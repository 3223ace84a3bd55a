// What the CUDA solver kernels share: one block of threads works on one sample.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>

#include "../common/monitor.h"

namespace deqfast {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// N neighbouring elements, moved by one load or store where the address allows 16 bytes (8 for bfloat16).
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

template <class T, int N>
__device__ Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <class T, int N>
__device__ void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Sums of `Count` values over the block, in an order that is always the same; `totals` (shared) holds them on return.
template <int Count, class T>
__device__ void block_sums(const T (&values)[Count], T (*partials)[Count], T* totals) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int v = 0; v < Count; ++v) {
    T x = values[v];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (lane == 0) partials[warp][v] = x;
  }
  __syncthreads();
  for (int v = threadIdx.x; v < Count; v += kThreads) {
    T total = partials[0][v];
    for (int w = 1; w < kWarps; ++w) total += partials[w][v];
    totals[v] = total;
  }
  __syncthreads();
}

// Judge the block's sample and carry the verdict out on its rows: keep the best iterate or return to it, leave the
// count of running samples. All threads take part; a barrier must lie between their reads of status and this call.
template <class T>
__device__ Verdict settle(const Monitor<T>& monitor, int64_t row, T res_sq, T f_sq, const StopRule<T>& rule, T* z,
                          T* best, int64_t dim) {
  __shared__ Verdict verdict;
  if (threadIdx.x == 0) {
    verdict = judge(monitor, row, res_sq, f_sq, rule);
    if (!verdict.advance) atomicSub(monitor.active, 1);
  }
  __syncthreads();
  const Verdict v = verdict;
  if (v.improved || v.broken) {
    const T* from = v.improved ? z : best;
    T* to = v.improved ? best : z;
    for (int64_t d = threadIdx.x; d < dim; d += kThreads) to[d] = from[d];
    __syncthreads();  // z may be replaced from here on
  }
  return v;
}

// Whether rows of `dim` elements of these tensors start at multiples of N elements.
template <int N, class... Pointers>
bool aligned(int64_t dim, Pointers... pointers) {
  const auto fits = [](auto* p) { return reinterpret_cast<uintptr_t>(p) % (N * sizeof(*p)) == 0; };
  return dim % N == 0 && (fits(pointers) && ...);
}

inline cudaStream_t current_stream(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline unsigned grid_of(int64_t batch, const char* op) {
  STD_TORCH_CHECK(batch <= std::numeric_limits<int32_t>::max(), op, ": `z` has too many samples: ", batch);
  return static_cast<unsigned>(batch);
}

inline void check_launch(const char* op) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, op, ": launch failed: ", cudaGetErrorString(error));
}

}  // namespace deqfast
