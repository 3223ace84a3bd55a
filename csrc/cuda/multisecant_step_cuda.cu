// multisecant_step on a GPU: z <- z + alpha (beta g - DF gamma), N gamma = L^T g, one block per sample, both sweeps and
// the small solve in one launch. See ../cpu/multisecant_step.cpp.
#include <cuda_bf16.h>
#include <torch/csrc/stable/library.h>

#include <type_traits>

#include "../common/checks.h"
#include "block.cuh"

namespace deqfast {
namespace {

constexpr int kMaxHistory = 32;

template <class T, class H>
struct MultisecantParams {
  T* z;             // (B, D)
  const T* fz;      // (B, D)
  T* best;          // (B, D)
  const T* f_prev;  // (B, D)
  H* left;          // (B, M, D)
  H* df;            // (B, M, D)
  T* gram;          // (B, M + 2, M)
  int64_t dim;
  Window window;
  Monitor<T> monitor;
  StopRule<T> rule;
  int64_t method;
  T alpha, beta, ridge;
};

// Torch builds extensions without the implicit conversions of bfloat16.
template <class To, class From>
__device__ To convert(From x) {
  if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

struct WarpLanes {
  int index;
  static constexpr int count = 32;
  __device__ void sync() const { __syncwarp(); }
};

// What the threads of a block share; `Values` dot products are taken in sweep 1.
template <class T, int M, int Values>
struct Shared {
  T partials[kWarps][Values];
  T totals[Values];
  T t[M], gamma[M];
  T work[M * M + 2 * M];
};

// Layout of the sums of sweep 1: |g|^2, |f|^2, |s|^2, |y|^2, then L^T g, L^T y and, for Anderson I, L^T s.
enum Sum { kResSq = 0, kFSq = 1, kSSq = 2, kYSq = 3, kDots = 4 };

// Sweep 1: form g, complete the newest pair, take every dot with the left history.
template <class T, class H, int M, bool WithLs, int N, int Values>
__device__ void sweep_left(const MultisecantParams<T, H>& p, int64_t row, T (&sums)[Values]) {
  const int n = p.rule.last ? 0 : p.window.size();  // without a step to come only the residual counts
  const int newest = n ? p.window.newest() : 0;
  const int64_t history = row * p.window.history * p.dim;
  H* left = p.left + history;
  H* df_new = p.df + history + newest * p.dim;
  const bool store_y = left_is_y(p.method);
  for (int64_t d = threadIdx.x * N; d < p.dim; d += kThreads * N) {
    const auto f = load<T, N>(p.fz + row * p.dim + d), z = load<T, N>(p.z + row * p.dim + d);
    T g[N], s[N], y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] = f.value[i] - z.value[i];
      sums[kResSq] += g[i] * g[i];
      sums[kFSq] += f.value[i] * f.value[i];
    }
    if (n == 0) continue;
    const auto before = load<T, N>(p.f_prev + row * p.dim + d);
    auto kept = load<H, N>(left + newest * p.dim + d);
    Pack<H, N> df;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T delta = f.value[i] - before.value[i];
      s[i] = convert<T>(kept.value[i]);
      df.value[i] = convert<H>(p.beta * delta + (T(1) - p.beta) * s[i]);
      y[i] = delta - s[i];
      if (store_y) {
        kept.value[i] = convert<H>(y[i]);
        y[i] = convert<T>(kept.value[i]);
      }
      sums[kSSq] += s[i] * s[i];
      sums[kYSq] += y[i] * y[i];
    }
    store(df_new + d, df);
    if (store_y) store(left + newest * p.dim + d, kept);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      if (j >= n) break;
      const auto pair = j == newest ? kept : load<H, N>(left + j * p.dim + d);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const T l = convert<T>(pair.value[i]);
        sums[kDots + j] += l * g[i];
        sums[kDots + M + j] += l * y[i];
        if constexpr (WithLs) sums[kDots + 2 * M + j] += l * s[i];
      }
    }
  }
}

// Enter the newest pair in the window matrix and solve for gamma; by the first warp.
template <class T, class H, int M, bool WithLs, int Values>
__device__ void solve_sample(const MultisecantParams<T, H>& p, int64_t row, Shared<T, M, Values>& shared) {
  const int n = p.window.size(), m = p.window.history, newest = p.window.newest();
  const WarpLanes lanes{static_cast<int>(threadIdx.x)};
  T* gram = p.gram + row * (m + 2) * m;
  const T* lg = shared.totals + kDots;
  const T* ly = lg + M;
  if (lanes.index < n) {
    const int j = lanes.index;
    if (left_is_y(p.method)) {
      gram[newest * m + j] = ly[j];
    } else if constexpr (WithLs) {
      gram[newest * m + j] = (gram[newest * m + j] - (ly + M)[j]) / p.beta;
    }
  }
  lanes.sync();  // row and column share their diagonal entry, which is the column's
  if (lanes.index < n) {
    gram[lanes.index * m + newest] = ly[lanes.index];
    shared.t[lanes.index] = lg[lanes.index];
  }
  if (lanes.index == 0) {
    gram[m * m + newest] = left_is_y(p.method) ? shared.totals[kYSq] : shared.totals[kSSq];
    gram[(m + 1) * m + newest] = shared.totals[kYSq];
  }
  lanes.sync();
  solve_window(gram, shared.t, shared.gamma, shared.work, p.window, p.method, p.ridge, lanes);
}

// Sweep 2: take the step, store it as the next pair's, and sum its dots with DF.
template <class T, class H, int M, int N>
__device__ void sweep_right(const MultisecantParams<T, H>& p, int64_t row, const T* gamma, T (&dots)[M]) {
  const int n = p.window.size();
  const int64_t history = row * p.window.history * p.dim;
  const H* df = p.df + history;
  H* left_next = p.left + history + p.window.next() * p.dim;
  T* z = p.z + row * p.dim;
  for (int64_t d = threadIdx.x * N; d < p.dim; d += kThreads * N) {
    const auto f = load<T, N>(p.fz + row * p.dim + d), old = load<T, N>(z + d);
    T x[N];
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = p.beta * (f.value[i] - old.value[i]);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      if (j >= n) break;
      const auto pair = load<H, N>(df + j * p.dim + d);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] -= gamma[j] * convert<T>(pair.value[i]);
    }
    Pack<T, N> now;
    Pack<H, N> taken;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      now.value[i] = old.value[i] + convert<T>(convert<H>(p.alpha * x[i]));
      taken.value[i] = convert<H>(now.value[i] - old.value[i]);
    }
    store(z + d, now);
    store(left_next + d, taken);
    if (left_is_y(p.method)) continue;
    // Read again, now from the cache: holding DF in registers for this would spill at long histories.
#pragma unroll
    for (int j = 0; j < M; ++j) {
      if (j >= n) break;
      const auto pair = load<H, N>(df + j * p.dim + d);
#pragma unroll
      for (int i = 0; i < N; ++i) dots[j] += convert<T>(pair.value[i]) * convert<T>(taken.value[i]);
    }
  }
}

template <class T, class H, int M, bool WithLs, int N>
__global__ void __launch_bounds__(kThreads, M <= 8 ? 2 : 1) multisecant_kernel(const MultisecantParams<T, H> p) {
  constexpr int Values = kDots + (WithLs ? 3 : 2) * M;
  __shared__ Shared<T, M, Values> shared;
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  {
    T sums[Values] = {};
    sweep_left<T, H, M, WithLs, N>(p, row, sums);
    block_sums(sums, shared.partials, shared.totals);
  }
  const Verdict verdict = settle(p.monitor, row, shared.totals[kResSq], shared.totals[kFSq], p.rule, p.z + row * p.dim,
                                 p.best + row * p.dim, p.dim);
  if (!verdict.advance || p.rule.last) return;
  const int n = p.window.size(), m = p.window.history;
  if (n && threadIdx.x < 32) solve_sample<T, H, M, WithLs>(p, row, shared);
  __syncthreads();
  T dots[M] = {};
  sweep_right<T, H, M, N>(p, row, shared.gamma, dots);
  if (n == 0 || left_is_y(p.method)) return;
  auto* partials = reinterpret_cast<T(*)[M]>(&shared.partials[0][0]);
  block_sums(dots, partials, shared.totals);
  T* gram_row = p.gram + (row * (m + 2) + p.window.next()) * m;
  if (threadIdx.x < n) gram_row[threadIdx.x] = shared.totals[threadIdx.x];
}

template <class T, class H, int M, bool WithLs>
void launch_aligned(const MultisecantParams<T, H>& params, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  const unsigned grid = grid_of(params.monitor.batch, "multisecant_step");
  if (aligned<N>(params.dim, params.z, params.fz, params.best, params.f_prev, params.left, params.df)) {
    multisecant_kernel<T, H, M, WithLs, N><<<grid, kThreads, 0, stream>>>(params);
  } else {
    multisecant_kernel<T, H, M, WithLs, 1><<<grid, kThreads, 0, stream>>>(params);
  }
  check_launch("multisecant_step");
}

template <class T, class H, int M>
void launch_method(const MultisecantParams<T, H>& params, cudaStream_t stream) {
  if (params.method == kAndersonI) {
    launch_aligned<T, H, M, true>(params, stream);
  } else {
    launch_aligned<T, H, M, false>(params, stream);
  }
}

// The registers that hold the dots are sized by the window at this iteration, not by the history.
template <class T, class H>
void launch(const MultisecantParams<T, H>& params, cudaStream_t stream) {
  if (params.window.size() <= 8) {
    launch_method<T, H, 8>(params, stream);
  } else if (params.window.size() <= 16) {
    launch_method<T, H, 16>(params, stream);
  } else {
    launch_method<T, H, kMaxHistory>(params, stream);
  }
}

void multisecant_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor gain,
                      Tensor active, Tensor f_prev, Tensor left, Tensor df, Tensor gram, int64_t k, bool last,
                      double tol, bool absolute, double stall_floor, int64_t method, double alpha, double beta,
                      double ridge) {
  const Checker checker{"multisecant_step", z};
  checker.check_state(fz, best, status, iterations, residual, gain, active);
  const auto history_dtype = checker.check_window(f_prev, left, df, gram, k, method, kMaxHistory);
  if (z.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
  const Window window{k, static_cast<int>(left.size(1))};
  dispatch_history<__nv_bfloat16>(z.scalar_type(), history_dtype, [&](auto state, auto history) {
    using T = decltype(state);
    using H = decltype(history);
    launch(MultisecantParams<T, H>{z.mutable_data_ptr<T>(), fz.const_data_ptr<T>(), best.mutable_data_ptr<T>(),
                                   f_prev.const_data_ptr<T>(), static_cast<H*>(left.mutable_data_ptr()),
                                   static_cast<H*>(df.mutable_data_ptr()), gram.mutable_data_ptr<T>(), z.size(1),
                                   window, monitor_of<T>(status, iterations, residual, gain, active),
                                   {k, static_cast<T>(tol), absolute, static_cast<T>(stall_floor), last}, method,
                                   static_cast<T>(alpha), static_cast<T>(beta), static_cast<T>(ridge)},
           current_stream(z));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) { m.impl("multisecant_step", TORCH_BOX(&multisecant_step)); }

}  // namespace deqfast
