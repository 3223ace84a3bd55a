// multisecant_step on the CPU: Broyden and Anderson in pair form, z <- z + alpha (beta g - DF gamma), N gamma = L^T g.
// A sample's two sweeps follow each other, so that its history is read from memory once per matrix and step.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "../common/steps.h"
#include "rows.h"

namespace deqfast {
namespace {

constexpr int kTile = 512;  // elements: the rows of a tile of twenty pairs stay in the first-level cache

// Dot products of one sample, indexed by slot.
template <class T>
struct Scratch {
  std::vector<double> lg, ly, ls, ds;  // L^T g, L^T y, L^T s, DF^T s
  std::vector<T> t, gamma, work;

  explicit Scratch(int n) : lg(n), ly(n), ls(n), ds(n), t(n), gamma(n), work(solve_workspace(n)) {}
};

// out_v[r] += rows[r] . v, for R rows and the vectors x and (if `Two`) y, over one tile.
template <int R, bool Two, class T, class H>
DEQFAST_INLINE void dot_block(const H* rows, int64_t stride, const T* x, const T* y, int64_t count, double* out_x,
                              double* out_y) {
  Vec<T> sum_x[R] = {}, sum_y[R] = {};
  for (int64_t d = 0; d < count; d += Simd<T>::lanes) {
    const Vec<T> vx = load(x + d, Simd<T>::lanes);
    const Vec<T> vy = Two ? load(y + d, Simd<T>::lanes) : vx;
    for (int r = 0; r < R; ++r) {
      const Vec<T> row = load<T>(rows + r * stride + d, count - d);
      sum_x[r] += row * vx;
      if (Two) sum_y[r] += row * vy;
    }
  }
  for (int r = 0; r < R; ++r) {
    out_x[r] += sum<T>(sum_x[r]);
    if (Two) out_y[r] += sum<T>(sum_y[r]);
  }
}

template <bool Two, class T, class H>
DEQFAST_INLINE void dot_rows(const H* rows, int64_t stride, int n, const T* x, const T* y, int64_t count,
                             double* out_x, double* out_y) {
  // Several rows at once: the sums of one alone would wait for each other.
  int r = 0;
  for (; r + 4 <= n; r += 4) {
    dot_block<4, Two>(rows + r * stride, stride, x, y, count, out_x + r, Two ? out_y + r : nullptr);
  }
  if (r + 2 <= n) {
    dot_block<2, Two>(rows + r * stride, stride, x, y, count, out_x + r, Two ? out_y + r : nullptr);
    r += 2;
  }
  if (r < n) dot_block<1, Two>(rows + r * stride, stride, x, y, count, out_x + r, Two ? out_y + r : nullptr);
}

// x -= sum_r weight[r] rows[r] over one tile.
template <int R, class T, class H>
DEQFAST_INLINE void combine_block(const H* rows, int64_t stride, const T* weight, int64_t count, T* x) {
  for (int64_t d = 0; d < count; d += Simd<T>::lanes) {
    Vec<T> v = load(x + d, Simd<T>::lanes);
    for (int r = 0; r < R; ++r) v -= weight[r] * load<T>(rows + r * stride + d, count - d);
    store(x + d, v, Simd<T>::lanes);
  }
}

template <class T, class H>
DEQFAST_INLINE void combine_rows(const H* rows, int64_t stride, int n, const T* weight, int64_t count, T* x) {
  int r = 0;
  for (; r + 4 <= n; r += 4) combine_block<4>(rows + r * stride, stride, weight + r, count, x);
  if (r + 2 <= n) {
    combine_block<2>(rows + r * stride, stride, weight + r, count, x);
    r += 2;
  }
  if (r < n) combine_block<1>(rows + r * stride, stride, weight + r, count, x);
}

template <class T>
struct SweepSums {
  Vec<T> res_sq = {}, f_sq = {}, s_sq = {}, y_sq = {};
};

// Sweep 1: form g, complete the newest pair, take every dot with the left history.
template <class T, class H>
DEQFAST_INLINE SweepSums<T> sweep_left(const MultisecantParams<T, H>& a, int64_t row, Scratch<T>& scratch) {
  constexpr int W = Simd<T>::lanes;
  const int n = a.pairs();
  const int64_t history = static_cast<int64_t>(a.window.history) * a.dim * row;
  H* left = a.left + history;
  H* left_new = left + (n ? a.window.newest() * a.dim : 0);
  H* df_new = a.df + history + (n ? a.window.newest() * a.dim : 0);
  const bool store_y = left_is_y(a.method);
  alignas(64) T g[kTile], s[kTile], y[kTile];
  SweepSums<T> sums;
  std::fill(scratch.lg.begin(), scratch.lg.end(), 0.0);
  std::fill(scratch.ly.begin(), scratch.ly.end(), 0.0);
  std::fill(scratch.ls.begin(), scratch.ls.end(), 0.0);
  for (int64_t tile = 0; tile < a.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, a.dim - tile), at = row * a.dim + tile;
    for (int64_t d = 0; d < count; d += W) {
      const int64_t rest = count - d;
      const Vec<T> f = load(a.fz + at + d, rest), res = f - load(a.z + at + d, rest);
      sums.res_sq += res * res;
      sums.f_sq += f * f;
      store(g + d, res, W);
      if (n == 0) continue;
      const Vec<T> delta = f - load(a.f_prev + at + d, rest), step = load<T>(left_new + tile + d, rest);
      Vec<T> change = delta - step;
      store(df_new + tile + d, a.beta * delta + (T(1) - a.beta) * step, rest);
      if (store_y) {
        change = round_to<T, H>(change);
        store(left_new + tile + d, change, rest);
      }
      sums.s_sq += step * step;
      sums.y_sq += change * change;
      store(s + d, step, W);
      store(y + d, change, W);
    }
    dot_rows<true>(left + tile, a.dim, n, g, y, count, scratch.lg.data(), scratch.ly.data());
    if (a.method == kAndersonI) {
      dot_rows<false>(left + tile, a.dim, n, s, s, count, scratch.ls.data(), static_cast<double*>(nullptr));
    }
  }
  return sums;
}

// Enter the newest pair in the window matrix and solve for gamma.
template <class T, class H>
DEQFAST_INLINE void solve_sample(const MultisecantParams<T, H>& a, int64_t row, const SweepSums<T>& sums,
                                 Scratch<T>& scratch) {
  const int n = a.window.size(), m = a.window.history, newest = a.window.newest();
  T* gram = a.gram + row * (m + 2) * m;
  enter_pair(gram, gram + newest * m, scratch.ly.data(), scratch.ls.data(), static_cast<T>(sum<T>(sums.s_sq)),
             static_cast<T>(sum<T>(sums.y_sq)), a.window, a.method, a.beta, OneLane());
  for (int j = 0; j < n; ++j) scratch.t[j] = static_cast<T>(scratch.lg[j]);
  solve_window(gram, scratch.t.data(), scratch.gamma.data(), scratch.work.data(), a.window, a.method, a.ridge,
               OneLane());
}

// Sweep 2: take the step, store it as the next pair's, and take its dots with DF where the method needs them.
template <class T, class H>
DEQFAST_INLINE void sweep_right(const MultisecantParams<T, H>& a, int64_t row, Scratch<T>& scratch) {
  constexpr int W = Simd<T>::lanes;
  const int n = a.window.size(), m = a.window.history, next = a.window.next();
  const H* df = a.df + static_cast<int64_t>(m) * a.dim * row;
  H* left_next = a.left + (static_cast<int64_t>(m) * row + next) * a.dim;
  const bool needs_dots = n > 0 && !left_is_y(a.method);
  alignas(64) T x[kTile];
  std::fill(scratch.ds.begin(), scratch.ds.end(), 0.0);
  for (int64_t tile = 0; tile < a.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, a.dim - tile), at = row * a.dim + tile;
    for (int64_t d = 0; d < count; d += W) {
      store(x + d, a.beta * (load(a.fz + at + d, count - d) - load(a.z + at + d, count - d)), W);
    }
    combine_rows(df + tile, a.dim, n, scratch.gamma.data(), count, x);
    for (int64_t d = 0; d < count; d += W) {
      const int64_t rest = count - d;
      const Vec<T> old = load(a.z + at + d, rest), now = old + round_to<T, H>(a.alpha * load(x + d, W));
      const Vec<T> taken = round_to<T, H>(now - old);
      store(a.z + at + d, now, rest);
      store(left_next + tile + d, taken, rest);
      store(x + d, taken, W);
    }
    if (needs_dots) dot_rows<false>(df + tile, a.dim, n, x, x, count, scratch.ds.data(), static_cast<double*>(nullptr));
  }
  if (!needs_dots) return;
  T* gram_row = a.gram + (row * (m + 2) + next) * m;
  for (int j = 0; j < n; ++j) gram_row[j] = static_cast<T>(scratch.ds[j]);
}

template <class T, class H>
DEQFAST_INLINE void multisecant_rows(const MultisecantParams<T, H>& a, int64_t begin, int64_t end) {
  Scratch<T> scratch(a.window.size());
  for (int64_t row = begin; row < end; ++row) {
    if (a.monitor.status[row] != kRunning) continue;
    const SweepSums<T> sums = sweep_left(a, row, scratch);
    const Verdict verdict = settle(a.monitor, row, static_cast<T>(sum<T>(sums.res_sq)),
                                   static_cast<T>(sum<T>(sums.f_sq)), a.rule, a.z + row * a.dim, a.best + row * a.dim,
                                   a.dim);
    if (!verdict.advance || a.rule.last) continue;
    if (a.window.size()) solve_sample(a, row, sums, scratch);
    sweep_right(a, row, scratch);
  }
}

DEQFAST_CLONES void run(const MultisecantParams<float, float>& a, int64_t begin, int64_t end) {
  multisecant_rows(a, begin, end);
}
DEQFAST_CLONES void run(const MultisecantParams<float, BFloat16>& a, int64_t begin, int64_t end) {
  multisecant_rows(a, begin, end);
}
DEQFAST_CLONES void run(const MultisecantParams<double, double>& a, int64_t begin, int64_t end) {
  multisecant_rows(a, begin, end);
}

// out = alpha (beta v - L gamma), N^T gamma = DF^T v, for one sample.
template <class T, class H>
DEQFAST_INLINE void transposed_row(const TransposedParams<T, H>& p, int64_t row, Scratch<T>& scratch) {
  constexpr int W = Simd<T>::lanes;
  const Window window = p.window(row);
  const int64_t history = static_cast<int64_t>(p.history) * p.dim * row, at = row * p.dim;
  alignas(64) T x[kTile];
  const auto load_tile = [&](int64_t tile, int64_t count, T scale) {
    for (int64_t d = 0; d < count; d += W) store(x + d, scale * load(p.v + at + tile + d, count - d), W);
  };
  std::fill(scratch.gamma.begin(), scratch.gamma.end(), T(0));  // of slots outside the window
  if (window.size() > 0) {
    std::fill(scratch.lg.begin(), scratch.lg.end(), 0.0);
    for (int64_t tile = 0; tile < p.dim; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, p.dim - tile);
      load_tile(tile, count, T(1));
      for (int age = 0; age < window.size(); ++age) {
        const int slot = window.slot(age);
        dot_rows<false>(p.df + history + slot * p.dim + tile, p.dim, 1, x, x, count, scratch.lg.data() + slot,
                        static_cast<double*>(nullptr));
      }
    }
    for (int j = 0; j < p.history; ++j) scratch.t[j] = static_cast<T>(scratch.lg[j]);
    solve_window<true>(p.gram + row * (p.history + 2) * p.history, scratch.t.data(), scratch.gamma.data(),
                       scratch.work.data(), window, p.method, p.ridge, OneLane());
  }
  for (int64_t tile = 0; tile < p.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, p.dim - tile);
    load_tile(tile, count, p.beta);
    for (int age = 0; age < window.size(); ++age) {
      const int slot = window.slot(age);
      combine_rows(p.left + history + slot * p.dim + tile, p.dim, 1, scratch.gamma.data() + slot, count, x);
    }
    for (int64_t d = 0; d < count; d += W) store(p.out + at + tile + d, p.alpha * load(x + d, W), count - d);
  }
}

template <class T, class H>
DEQFAST_INLINE void transposed_rows(const TransposedParams<T, H>& p, int64_t begin, int64_t end) {
  Scratch<T> scratch(p.history);
  for (int64_t row = begin; row < end; ++row) transposed_row(p, row, scratch);
}

DEQFAST_CLONES void run(const TransposedParams<float, float>& p, int64_t begin, int64_t end) {
  transposed_rows(p, begin, end);
}
DEQFAST_CLONES void run(const TransposedParams<float, BFloat16>& p, int64_t begin, int64_t end) {
  transposed_rows(p, begin, end);
}
DEQFAST_CLONES void run(const TransposedParams<double, double>& p, int64_t begin, int64_t end) {
  transposed_rows(p, begin, end);
}

constexpr int64_t kMaxHistory = 1 << 15;

void multisecant_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor gain,
                      Tensor active, Tensor f_prev, Tensor left, Tensor df, Tensor gram, int64_t k, bool last,
                      double tol, bool absolute, double stall_floor, int64_t method, double alpha, double beta,
                      double ridge) {
  with_multisecant_params<BFloat16>(
      z, fz, best, status, iterations, residual, gain, active, f_prev, left, df, gram, k, last, tol, absolute,
      stall_floor, method, alpha, beta, ridge, kMaxHistory, [](const auto& params) {
        const int64_t grain = rows_per_thread(params.dim * (params.window.size() + 1));
        torch::stable::parallel_for(0, params.monitor.batch, grain,
                                    [&](int64_t begin, int64_t end) { run(params, begin, end); });
      });
}

Tensor multisecant_transposed(Tensor v, Tensor left, Tensor df, Tensor gram, Tensor newest, Tensor count,
                              int64_t method, double alpha, double beta, double ridge) {
  return with_transposed_params<BFloat16>(
      v, left, df, gram, newest, count, method, alpha, beta, ridge, kMaxHistory, [](const auto& params) {
        torch::stable::parallel_for(0, params.batch, rows_per_thread(params.dim * (params.history + 1)),
                                    [&](int64_t begin, int64_t end) { run(params, begin, end); });
      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("multisecant_step", TORCH_BOX(&multisecant_step));
  m.impl("multisecant_transposed", TORCH_BOX(&multisecant_transposed));
}

}  // namespace deqfast
