// Common parts of the CUDA solver kernels: one block of threads works on one sample.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>

#include "../common/monitor.h"

namespace deqfast {

// What the kernels of all steps here are.
struct OnDevice {
  static constexpr bool kOnHost = false;
};

constexpr int kThreads = 256;  // of a block, unless the launch says otherwise
constexpr int kWarps = kThreads / 32;
constexpr int kMostThreads = 512;  // of the largest block, in whole warps

// N adjacent elements, moved by one load or store if the address allows 16 bytes (8 for bfloat16).
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T value[N];
};

template <class T, int N>
__device__ Pack<T, N> load(const T* from) {
  return *reinterpret_cast<const Pack<T, N>*>(from);
}

// The pack, or zeros. Selected by whole words: a selection by elements would wait for the load at once.
template <class T, int N>
__device__ Pack<T, N> load_if(bool wanted, const T* from) {
  if constexpr (sizeof(Pack<T, N>) % sizeof(uint4) == 0) {
    constexpr int words = sizeof(Pack<T, N>) / sizeof(uint4);
    uint4 word[words];
#pragma unroll
    for (int i = 0; i < words; ++i) word[i] = wanted ? reinterpret_cast<const uint4*>(from)[i] : uint4{0, 0, 0, 0};
    Pack<T, N> pack;
    memcpy(&pack, word, sizeof pack);
    return pack;
  } else if constexpr (sizeof(Pack<T, N>) == sizeof(uint2)) {
    const uint2 word = wanted ? *reinterpret_cast<const uint2*>(from) : uint2{0, 0};
    Pack<T, N> pack;
    memcpy(&pack, &word, sizeof pack);
    return pack;
  } else {
    return wanted ? load<T, N>(from) : Pack<T, N>{};
  }
}

template <class T, int N>
__device__ void store(T* to, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// By default the compiler stores a pack by its elements.
__device__ inline void store_word(uint4* to, const uint4& word) {
#ifdef __CUDA_ARCH__
  asm("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
      :
      : "l"(__cvta_generic_to_global(to)), "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
      : "memory");
#else
  *to = word;
#endif
}

// `store` to global memory.
template <class T, int N>
__device__ void store_global(T* to, const Pack<T, N>& pack) {
  if constexpr (sizeof pack % sizeof(uint4) == 0) {
    constexpr int words = sizeof pack / sizeof(uint4);
    uint4 word[words];
    memcpy(word, &pack, sizeof pack);
#pragma unroll
    for (int i = 0; i < words; ++i) store_word(reinterpret_cast<uint4*>(to) + i, word[i]);
  } else {
    store(to, pack);
  }
}

// Begin to copy an element to shared memory. The threads of the block can read it after `wait_for_copies` of this one
// and a barrier. Before sm_80 it is copied immediately.
template <class T>
__device__ void copy_to_shared(T* to, const T* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)),
                 "n"(sizeof(T))
               : "memory");
#else
  *to = *from;
#endif
}

__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Sums over the block of values that are numbered at run time. A warp adds to slots of its own, in program order; the
// slots are added in the order of the warps. The bits are therefore always the same.
template <class T, int Count>
struct BlockSums {
  T slots[kMostThreads / 32][Count];
  T totals[Count];

  // Before the first `add`.
  __device__ void clear(int count) {
    for (int v = threadIdx.x % 32; v < count; v += 32) slots[threadIdx.x / 32][v] = T(0);
    __syncwarp();
  }

  // By all threads of a warp.
  __device__ void add(int v, T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32][v] += x;
  }

  // By all threads of the block; `totals` holds the first `count` sums on return.
  __device__ void finish(int count) {
    __syncthreads();
    for (int v = threadIdx.x; v < count; v += blockDim.x) {
      T total = slots[0][v];
#pragma unroll kWarps
      for (int w = 1; w < blockDim.x / 32; ++w) total += slots[w][v];
      totals[v] = total;
    }
    __syncthreads();
  }
};

// x of all threads of the block, combined in pairs in a fixed order.
template <class T, class Combine>
__device__ T over_block(T x, const Combine& combine) {
  __shared__ T slots[kMostThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();  // slots of an earlier call are no longer read
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
  __syncthreads();
  x = slots[0];
  for (int w = 1; w < blockDim.x / 32; ++w) x = combine(x, slots[w]);
  return x;
}

// The columns [begin, end) of a sample's f(z) - z and f(z), for all threads of a block.
template <class T>
struct BlockVectors {
  const T *z, *fz;
  int64_t begin, end;

  __device__ Norms<T> largest() const {
    Norms<T> x = {};
    for (int64_t d = begin + threadIdx.x; d < end; d += blockDim.x) {
      x = {larger(x.res, magnitude(fz[d] - z[d])), larger(x.f, magnitude(fz[d]))};
    }
    const auto combine = [](T a, T b) { return larger(a, b); };
    return {over_block(x.res, combine), over_block(x.f, combine)};
  }
  __device__ Norms<T> squares_over(const Norms<T>& scale) const {
    Norms<T> x = {};
    for (int64_t d = begin + threadIdx.x; d < end; d += blockDim.x) {
      const T g = (fz[d] - z[d]) / scale.res, f = fz[d] / scale.f;
      x = {x.res + g * g, x.f + f * f};
    }
    const auto combine = [](T a, T b) { return a + b; };
    return {over_block(x.res, combine), over_block(x.f, combine)};
  }
};

// The same for a whole sample, from the norms of its parts, `stride` elements apart.
template <class T>
struct PartNorms {
  const T* parts;
  int64_t stride;
  unsigned count;

  __device__ Norms<T> at(unsigned part) const { return {parts[part * stride], parts[part * stride + 1]}; }
  __device__ Norms<T> largest() const {
    Norms<T> x = {};
    for (unsigned part = 0; part < count; ++part) {
      x = {larger(x.res, magnitude(at(part).res)), larger(x.f, magnitude(at(part).f))};
    }
    return x;
  }
  __device__ Norms<T> squares_over(const Norms<T>& scale) const {
    Norms<T> x = {};
    for (unsigned part = 0; part < count; ++part) {
      const T g = at(part).res / scale.res, f = at(part).f / scale.f;
      x = {x.res + g * g, x.f + f * f};
    }
    return x;
  }
};

// Records of a sample before its judgement, read at the start of a kernel.
template <class T>
struct Records {
  T residual[2], progress[kProgress];
  int32_t iterations;

  // Begin to copy them to shared memory, by the thread that will judge.
  __device__ void fetch(const Monitor<T>& monitor, int64_t row) {
    for (int i = 0; i < 2; ++i) copy_to_shared(&residual[i], monitor.residual + i * monitor.batch + row);
    for (int i = 0; i < kProgress; ++i) copy_to_shared(&progress[i], monitor.progress + i * monitor.batch + row);
    copy_to_shared(&iterations, monitor.iterations + row);
  }
  __device__ void fetch(const Records& from) {
    for (int i = 0; i < 2; ++i) copy_to_shared(&residual[i], from.residual + i);
    for (int i = 0; i < kProgress; ++i) copy_to_shared(&progress[i], from.progress + i);
    copy_to_shared(&iterations, &from.iterations);
  }
};

// The judgement of the block's sample by thread 0, which has fetched the records, for all threads. The first of the
// sample's blocks writes the new records.
template <class T>
__device__ Verdict judge_sample(const Records<T>& records, const Monitor<T>& monitor, int64_t row,
                                const Norms<T>& norms, const StopRule<T>& rule) {
  __shared__ Verdict verdict;
  Records<T> now;
  int8_t status = kRunning;
  if (threadIdx.x == 0) {
    wait_for_copies();
    now = records;
    const Monitor<T> own{&status, &now.iterations, now.residual, now.progress, nullptr, 1};
    verdict = judge(own, 0, norms, rule_at(rule, records.iterations));
  }
  __syncthreads();  // all threads have read the status too
  if (threadIdx.x == 0 && blockIdx.y == 0) {
    monitor.status[row] = status;
    monitor.iterations[row] = now.iterations;
    for (int i = 0; i < 2; ++i) monitor.residual[i * monitor.batch + row] = now.residual[i];
    for (int i = 0; i < kProgress; ++i) monitor.progress[i * monitor.batch + row] = now.progress[i];
    if (status != kRunning) atomicSub(monitor.active, 1);
  }
  return verdict;
}

// Keep the best iterate or return to it, in the columns [begin, end) of the sample, if no step follows.
template <int N, class T>
__device__ void carry_out(const Verdict& verdict, T* z, T* best, int64_t begin, int64_t end) {
  if (!verdict.improved && !verdict.broken) return;
  constexpr int C = 4;  // concurrent loads
  const T* from = verdict.improved ? z : best;
  T* to = verdict.improved ? best : z;
  for (int64_t first = begin + threadIdx.x * N; first < end; first += C * blockDim.x * N) {
    Pack<T, N> packs[C];
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int64_t d = first + c * blockDim.x * N;
      if (d < end) packs[c] = load<T, N>(from + d);
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const int64_t d = first + c * blockDim.x * N;
      if (d < end) store_global(to + d, packs[c]);
    }
  }
}

// If samples are few and long, several blocks share a sample. The first launch leaves partial sums and the norms of the
// parts. In the second, every block adds them in the same order and comes to the same verdict, from records as they
// were before it.
template <class T>
struct Snapshot {
  Records<T> records;
  int running;
  unsigned arrived;  // blocks that have written their part of the second launch's sums
};

// The columns of a block that shares its sample with `gridDim.y` blocks; boundaries are multiples of 16 elements.
struct Columns {
  int64_t begin, end;

  __device__ explicit Columns(int64_t dim) {
    const int64_t part = ((dim + gridDim.y - 1) / gridDim.y + 15) / 16 * 16;
    begin = blockIdx.y * part < dim ? blockIdx.y * part : dim;
    end = begin + part < dim ? begin + part : dim;
  }
};

inline int processors_of(int device) {
  int processors = 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return processors;
}

// Elements of a long sample. A shorter one is summed in one order, so that its bits do not depend on the batch.
constexpr int64_t kLong = 8192;

// Blocks per sample for a kernel: one if the samples fill the GPU, else as many as run concurrently, with at least 4096
// elements each.
template <class Kernel>
unsigned blocks_per_sample(Kernel kernel, int64_t batch, int64_t dim, int device) {
  int resident = 0;
  const int processors = processors_of(device);
  const int64_t most = dim / 4096;
  if (4 * batch >= 3 * processors || dim < kLong) return 1;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  const int64_t wanted = static_cast<int64_t>(resident) * processors / batch, blocks = wanted < most ? wanted : most;
  return blocks < 2 ? 1 : static_cast<unsigned>(blocks < 64 ? blocks : 64);
}

// Memory for the duration of a call, on the tensor's device and stream.
inline torch::stable::Tensor workspace(const torch::stable::Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, torch::headeronly::ScalarType::Byte);
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
