// picard_step on a GPU: z <- z + damping (f(z) - z). See ../cpu/picard_step.cpp.
#include <torch/csrc/stable/library.h>

#include "../common/halves.h"
#include "block.cuh"

namespace deqfast {
namespace {

enum Sum { kResSq, kFSq, kSums };
constexpr int kLeft = kSums + 2;  // per block of a shared sample: the sums, and the norms of the rule

template <class T>
__device__ Norms<T> norms_of_columns(const PicardParams<T>& p, int64_t row, const Columns& columns, const T* totals) {
  const BlockVectors<T> vectors{p.z + row * p.dim, p.fz + row * p.dim, columns.begin, columns.end};
  return norms_of(p.rule, {totals[kResSq], totals[kFSq]}, vectors);
}

template <class T, int kVector>
__device__ void accumulate(const Pack<T, kVector>& f, const Pack<T, kVector>& z, T& res_sq, T& f_sq) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const T g = f.value[i] - z.value[i];
    res_sq += g * g;
    f_sq += f.value[i] * f.value[i];
  }
}

template <class T, int kVector>
__device__ Pack<T, kVector> stepped(const Pack<T, kVector>& f, const Pack<T, kVector>& z, T damping) {
  if (damping == T(1)) return f;
  Pack<T, kVector> next;
#pragma unroll
  for (int i = 0; i < kVector; ++i) next.value[i] = z.value[i] + damping * (f.value[i] - z.value[i]);
  return next;
}

// One block per sample, kept in registers: one pass over the memory.
template <class T, int kVector, int kPacks>
__global__ void __launch_bounds__(kThreads, kPacks == 1 ? 4 : 2) picard_kernel(const PicardParams<T> p) {
  __shared__ BlockSums<T, kSums> sums;
  __shared__ Records<T> records;
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  if (threadIdx.x == 0) records.fetch(p.monitor, row);
  T* z = p.z + row * p.dim;
  const T* fz = p.fz + row * p.dim;
  Pack<T, kVector> f[kPacks], old[kPacks];
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int64_t d = (c * kThreads + threadIdx.x) * kVector;
    f[c] = d < p.dim ? load<T, kVector>(fz + d) : Pack<T, kVector>{};
    old[c] = d < p.dim ? load<T, kVector>(z + d) : Pack<T, kVector>{};
  }
  T res_sq = 0, f_sq = 0;
#pragma unroll
  for (int c = 0; c < kPacks; ++c) accumulate(f[c], old[c], res_sq, f_sq);
  sums.clear(kSums);
  sums.add(kResSq, res_sq);
  sums.add(kFSq, f_sq);
  sums.finish(kSums);
  const Norms<T> norms = norms_of_columns(p, row, Columns(p.dim), sums.totals);
  const Verdict verdict = judge_sample(records, p.monitor, row, norms, p.rule);
  T* best = p.best + row * p.dim;
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int64_t d = (c * kThreads + threadIdx.x) * kVector;
    if (d >= p.dim) break;
    if (verdict.improved) store_global(best + d, old[c]);
    if (verdict.broken) store_global(z + d, load<T, kVector>(best + d));
    if (verdict.advance) store_global(z + d, stepped(f[c], old[c], p.damping));
  }
}

template <class T>
struct Exchange {
  Snapshot<T>* snapshots;  // (B,)
  T* partials;             // (B, parts, kLeft)
  unsigned parts;          // blocks per sample of the first launch
};

template <class T, int kVector>
__device__ void sweep(const PicardParams<T>& p, int64_t row, const Columns& columns, BlockSums<T, kSums>& sums) {
  T res_sq = 0, f_sq = 0;
  const T *z = p.z + row * p.dim, *fz = p.fz + row * p.dim;
#pragma unroll 4
  for (int64_t d = columns.begin + threadIdx.x * kVector; d < columns.end; d += kThreads * kVector) {
    accumulate(load<T, kVector>(fz + d), load<T, kVector>(z + d), res_sq, f_sq);
  }
  sums.clear(kSums);
  sums.add(kResSq, res_sq);
  sums.add(kFSq, f_sq);
  sums.finish(kSums);
}

// Take the step, and keep the iterate if it is the best; or carry out a verdict without a step.
template <class T, int kVector>
__device__ void finish(const PicardParams<T>& p, int64_t row, const Columns& columns, const Verdict& verdict) {
  constexpr int kPacks = 4;  // concurrent loads of z and of f(z)
  T *z = p.z + row * p.dim, *best = p.best + row * p.dim;
  const T* fz = p.fz + row * p.dim;
  if (!verdict.advance) return carry_out<kVector>(verdict, z, best, columns.begin, columns.end);
  constexpr int kStride = kPacks * kThreads * kVector;
  for (int64_t first = columns.begin + threadIdx.x * kVector; first < columns.end; first += kStride) {
    Pack<T, kVector> f[kPacks], old[kPacks];
#pragma unroll
    for (int c = 0; c < kPacks; ++c) {
      const int64_t d = first + c * kThreads * kVector;
      if (d >= columns.end) continue;
      f[c] = load<T, kVector>(fz + d);
      old[c] = load<T, kVector>(z + d);
    }
#pragma unroll
    for (int c = 0; c < kPacks; ++c) {
      const int64_t d = first + c * kThreads * kVector;
      if (d >= columns.end) continue;
      if (verdict.improved) store_global(best + d, old[c]);
      store_global(z + d, stepped(f[c], old[c], p.damping));
    }
  }
}

// One block per sample that does not fit its registers.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 4 : 3) picard_long_kernel(const PicardParams<T> p) {
  __shared__ BlockSums<T, kSums> sums;
  __shared__ Records<T> records;
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  if (threadIdx.x == 0) records.fetch(p.monitor, row);
  const Columns columns(p.dim);
  sweep<T, kVector>(p, row, columns, sums);
  const Norms<T> norms = norms_of_columns(p, row, columns, sums.totals);
  const Verdict verdict = judge_sample(records, p.monitor, row, norms, p.rule);
  finish<T, kVector>(p, row, columns, verdict);
}

// Several blocks per sample: the sums, ...
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 4) picard_sums_kernel(const PicardParams<T> p, const Exchange<T> exchange) {
  __shared__ BlockSums<T, kSums> sums;
  __shared__ Records<T> records;
  const int64_t row = blockIdx.x;
  const bool keeps = blockIdx.y == 0 && threadIdx.x == 0, running = p.monitor.status[row] == kRunning;
  if (keeps) exchange.snapshots[row].running = running;
  if (!running) return;
  if (keeps) records.fetch(p.monitor, row);
  const Columns columns(p.dim);
  sweep<T, kVector>(p, row, columns, sums);
  const Norms<T> norms = norms_of_columns(p, row, columns, sums.totals);
  T* to = exchange.partials + (row * gridDim.y + blockIdx.y) * kLeft;
  if (threadIdx.x < kSums) to[threadIdx.x] = sums.totals[threadIdx.x];
  if (threadIdx.x == 0) {
    to[kSums] = norms.res;
    to[kSums + 1] = norms.f;
  }
  if (keeps) {
    wait_for_copies();
    exchange.snapshots[row].records = records;
  }
}

// ... and the step.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 4) picard_apply_kernel(const PicardParams<T> p, const Exchange<T> exchange) {
  __shared__ Records<T> records;
  const int64_t row = blockIdx.x;
  if (!exchange.snapshots[row].running) return;
  if (threadIdx.x == 0) records.fetch(exchange.snapshots[row].records);
  const T* partials = exchange.partials + row * exchange.parts * kLeft;
  T totals[kSums] = {};
  for (unsigned part = 0; part < exchange.parts; ++part) {
    for (int v = 0; v < kSums; ++v) totals[v] += partials[part * kLeft + v];
  }
  const Norms<T> norms =
      norms_of(p.rule, {totals[kResSq], totals[kFSq]}, PartNorms<T>{partials + kSums, kLeft, exchange.parts});
  const Verdict verdict = judge_sample(records, p.monitor, row, norms, p.rule);
  const Columns columns(p.dim);
  finish<T, kVector>(p, row, columns, verdict);
}

template <class T, int kVector>
void launch(const PicardParams<T>& params, const Tensor& z, cudaStream_t stream) {
  const unsigned batch = grid_of(params.monitor.batch, "picard_step");
  const auto blocks_of = [&](auto kernel) {
    return blocks_per_sample(kernel, batch, params.dim, z.get_device_index());
  };
  const unsigned parts = blocks_of(&picard_sums_kernel<T, kVector>);
  constexpr int kWidth = kThreads * kVector;  // elements that a block loads at once
  if (parts > 1) {
    const unsigned blocks = blocks_of(&picard_apply_kernel<T, kVector>);
    const int64_t snapshots = batch * sizeof(Snapshot<T>), partials = int64_t(batch) * parts * kLeft * sizeof(T);
    const Tensor memory = workspace(z, snapshots + partials);
    char* at = static_cast<char*>(memory.mutable_data_ptr());
    const Exchange<T> exchange{reinterpret_cast<Snapshot<T>*>(at), reinterpret_cast<T*>(at + snapshots), parts};
    picard_sums_kernel<T, kVector><<<dim3(batch, parts), kThreads, 0, stream>>>(params, exchange);
    picard_apply_kernel<T, kVector><<<dim3(batch, blocks), kThreads, 0, stream>>>(params, exchange);
  } else if (params.dim <= kWidth) {
    picard_kernel<T, kVector, 1><<<batch, kThreads, 0, stream>>>(params);
  } else if (params.dim <= 4 * kWidth) {
    picard_kernel<T, kVector, 4><<<batch, kThreads, 0, stream>>>(params);
  } else if (params.dim <= 8 * kWidth) {
    picard_kernel<T, kVector, 8><<<batch, kThreads, 0, stream>>>(params);
  } else {
    picard_long_kernel<T, kVector><<<batch, kThreads, 0, stream>>>(params);
  }
  check_launch("picard_step");
}

// Rows that are parts of samples: the sums of a block's columns, ...
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 4) picard_row_sums_kernel(const PicardParams<T> p, T* partials) {
  __shared__ BlockSums<T, kSums> sums;
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  sweep<T, kVector>(p, row, Columns(p.dim), sums);
  if (threadIdx.x < kSums) partials[(row * gridDim.y + blockIdx.y) * kSums + threadIdx.x] = sums.totals[threadIdx.x];
}

// ... those of a row, if several blocks share it, ...
template <class T>
__global__ void picard_row_join_kernel(const PicardParams<T> p, const T* partials, unsigned parts, T* sums) {
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  T total = 0;
  for (unsigned part = 0; part < parts; ++part) total += partials[(row * parts + part) * kSums + threadIdx.x];
  sums[row * kSums + threadIdx.x] = total;
}

// ... and the step, by a verdict.
template <class T, int kVector>
__global__ void __launch_bounds__(kThreads, 4) picard_row_step_kernel(const PicardParams<T> p, const int8_t* verdicts) {
  const int64_t row = blockIdx.x;
  finish<T, kVector>(p, row, Columns(p.dim), verdict_of(verdicts[row]));
}

template <class T, int kVector>
void launch_sums(const PicardParams<T>& params, T* sums, const Tensor& z, cudaStream_t stream) {
  const unsigned batch = grid_of(params.monitor.batch, "picard_sums");
  const unsigned parts = blocks_per_sample(&picard_row_sums_kernel<T, kVector>, batch, params.dim, z.get_device_index());
  const Tensor memory = workspace(z, int64_t(batch) * parts * kSums * sizeof(T));
  T* partials = parts == 1 ? sums : static_cast<T*>(memory.mutable_data_ptr());
  picard_row_sums_kernel<T, kVector><<<dim3(batch, parts), kThreads, 0, stream>>>(params, partials);
  if (parts > 1) picard_row_join_kernel<T><<<batch, kSums, 0, stream>>>(params, partials, parts, sums);
  check_launch("picard_sums");
}

template <class T, int kVector>
void launch_step(const PicardParams<T>& params, const int8_t* verdicts, const Tensor& z, cudaStream_t stream) {
  const unsigned batch = grid_of(params.monitor.batch, "picard_apply");
  const unsigned blocks = blocks_per_sample(&picard_row_step_kernel<T, kVector>, batch, params.dim, z.get_device_index());
  picard_row_step_kernel<T, kVector><<<dim3(batch, blocks), kThreads, 0, stream>>>(params, verdicts);
  check_launch("picard_apply");
}

struct Kernels : OnDevice {
  template <class T>
  static void sums(const PicardParams<T>& params, const RowSums<T>& own, const Tensor& z) {
    if (params.monitor.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    constexpr int kVector = 16 / sizeof(T);
    if (aligned<kVector>(params.dim, params.z, params.fz)) {
      launch_sums<T, kVector>(params, own.sums, z, current_stream(z));
    } else {
      launch_sums<T, 1>(params, own.sums, z, current_stream(z));
    }
  }
  template <class T>
  static void apply(const PicardParams<T>& params, const RowSums<T>& own, const Tensor& z) {
    if (params.monitor.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    constexpr int kVector = 16 / sizeof(T);
    if (aligned<kVector>(params.dim, params.z, params.fz, params.best)) {
      launch_step<T, kVector>(params, own.verdict, z, current_stream(z));
    } else {
      launch_step<T, 1>(params, own.verdict, z, current_stream(z));
    }
  }
  template <class T>
  static void run(const PicardParams<T>& params, const Tensor& z) {
    if (params.monitor.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    constexpr int kVector = 16 / sizeof(T);
    const cudaStream_t stream = current_stream(z);
    if (aligned<kVector>(params.dim, params.z, params.fz, params.best)) {
      launch<T, kVector>(params, z, stream);
    } else {
      launch<T, 1>(params, z, stream);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) {
  m.impl("picard_sums", TORCH_BOX(&picard_sums<Kernels>));
  m.impl("picard_apply", TORCH_BOX(&picard_apply<Kernels>));
  m.impl("picard_step", TORCH_BOX(&Flat<&picard_step<Kernels>>::Op::call));
}

}  // namespace deqfast
