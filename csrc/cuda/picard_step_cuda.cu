// picard_step on a GPU: z <- z + damping (f(z) - z), one block per sample. See ../cpu/picard_step.cpp.
#include <torch/csrc/stable/library.h>

#include "../common/checks.h"
#include "block.cuh"

namespace deqfast {
namespace {

template <class T>
struct PicardParams {
  T* z;         // (B, D)
  const T* fz;  // (B, D)
  T* best;      // (B, D)
  int64_t dim;
  Monitor<T> monitor;
  StopRule<T> rule;
  T damping;
};

template <class T, int N>
__global__ void __launch_bounds__(kThreads, 4) picard_kernel(const PicardParams<T> p) {
  __shared__ T partials[kWarps][2];
  __shared__ T totals[2];
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  T* z = p.z + row * p.dim;
  const T* fz = p.fz + row * p.dim;
  T sums[2] = {};
  for (int64_t d = threadIdx.x * N; d < p.dim; d += kThreads * N) {
    const auto f = load<T, N>(fz + d), old = load<T, N>(z + d);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T g = f.value[i] - old.value[i];
      sums[0] += g * g;
      sums[1] += f.value[i] * f.value[i];
    }
  }
  block_sums(sums, partials, totals);
  const Verdict verdict =
      settle(p.monitor, row, totals[0], totals[1], p.rule, z, p.best + row * p.dim, p.dim);
  if (!verdict.advance || p.rule.last) return;
  for (int64_t d = threadIdx.x * N; d < p.dim; d += kThreads * N) {
    auto f = load<T, N>(fz + d);
    if (p.damping != T(1)) {
      const auto old = load<T, N>(z + d);
#pragma unroll
      for (int i = 0; i < N; ++i) f.value[i] = old.value[i] + p.damping * (f.value[i] - old.value[i]);
    }
    store(z + d, f);
  }
}

template <class T>
void launch(const PicardParams<T>& params, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const unsigned grid = grid_of(params.monitor.batch, "picard_step");
  if (aligned<N>(params.dim, params.z, params.fz, params.best)) {
    picard_kernel<T, N><<<grid, kThreads, 0, stream>>>(params);
  } else {
    picard_kernel<T, 1><<<grid, kThreads, 0, stream>>>(params);
  }
  check_launch("picard_step");
}

void picard_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor gain,
                 Tensor active, int64_t k, bool last, double tol, bool absolute, double stall_floor, double damping) {
  const Checker checker{"picard_step", z};
  checker.check_state(fz, best, status, iterations, residual, gain, active);
  if (z.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    launch(PicardParams<T>{z.mutable_data_ptr<T>(), fz.const_data_ptr<T>(), best.mutable_data_ptr<T>(), z.size(1),
                           monitor_of<T>(status, iterations, residual, gain, active),
                           {k, static_cast<T>(tol), absolute, static_cast<T>(stall_floor), last},
                           static_cast<T>(damping)},
           current_stream(z));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) { m.impl("picard_step", TORCH_BOX(&picard_step)); }

}  // namespace deqfast
