// multisecant_step on the CPU: Broyden and Anderson in pair form, z <- z + alpha (beta g - DF gamma), N gamma = L^T g.
// A sample's two sweeps follow each other, so that its history is read from memory once per matrix and step.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../common/steps.h"
#include "rows.h"
#include "sweeps.h"

namespace deqfast {
namespace {

// Elements of a tile: the rows of twenty pairs stay in the second-level cache between a combination and its dots.
constexpr int kTile = 512;

// Dot products of one sample, indexed by slot.
template <class T>
struct Scratch {
  Sums lg, ly, ls, ds;  // L^T g, L^T y, L^T s, DF^T s
  std::vector<T> t, gamma, work;
  std::vector<double> dots;  // one of the sums, added up

  explicit Scratch(int n) : lg(n), ly(n), ls(n), ds(n), t(n), gamma(n), work(solve_workspace(n)), dots(3 * n) {}
};

template <class T>
struct SweepSums {
  Vec<T> res_sq = {}, f_sq = {}, s_sq = {}, y_sq = {};
};

// g of one tile, and, if there are `Pairs`, the newest pair completed: its change y of g and the change of f.
template <bool Pairs, bool StoreY, class T, class H>
DEQFAST_INLINE void form_tile(const MultisecantParams<T, H>& a, int64_t at, H* left_new, H* df_new, int64_t count, T* g,
                              T* s, T* y, SweepSums<T>& sums) {
  constexpr int W = Simd<T>::lanes;
  const T *fz = a.fz + at, *z = a.z + at, *f_prev = a.f_prev + at, beta = a.beta;
  SweepSums<T> total = sums;  // a copy that can stay in registers
  for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
    const Vec<T> f = load(fz + d, lanes), res = f - load(z + d, lanes);
    total.res_sq += res * res;
    total.f_sq += f * f;
    store(g + d, res, W);
    if (!Pairs) return;
    const Vec<T> delta = f - load(f_prev + d, lanes), step = load<T>(left_new + d, lanes);
    Held<T, H>(beta * delta + (T(1) - beta) * step).put(df_new + d, lanes);
    Vec<T> change = delta - step;
    if (StoreY) {
      const Held<T, H> held(change);
      held.put(left_new + d, lanes);
      change = held.value();
    }
    total.s_sq += step * step;
    total.y_sq += change * change;
    store(s + d, step, W);
    store(y + d, change, W);
  });
  sums = total;
}

// Sweep 1: form g, complete the newest pair, take every dot with the left history.
template <bool Pairs, bool StoreY, class T, class H>
DEQFAST_INLINE SweepSums<T> sweep_left(const MultisecantParams<T, H>& a, int64_t row, Scratch<T>& scratch) {
  const int n = a.window.size();
  const int64_t history = static_cast<int64_t>(a.window.history) * a.dim * row;
  H *left = a.left + history, *left_new = left, *df_new = a.df + history;
  if (Pairs) {
    left_new += a.window.newest() * a.dim;
    df_new += a.window.newest() * a.dim;
  }
  alignas(64) T g[kTile], s[kTile], y[kTile];
  SweepSums<T> sums;
  scratch.lg.clear();
  scratch.ly.clear();
  scratch.ls.clear();
  for (int64_t tile = 0; tile < a.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, a.dim - tile);
    form_tile<Pairs, StoreY>(a, row * a.dim + tile, left_new + tile, df_new + tile, count, g, s, y, sums);
    if (!Pairs) continue;
    dot_rows<true>(left + tile, a.dim, n, g, y, count, scratch.lg, scratch.ly);
    if (a.method == kAndersonI) dot_rows<false>(left + tile, a.dim, n, s, s, count, scratch.ls, scratch.ls);
  }
  return sums;
}

template <class T, class H>
DEQFAST_INLINE SweepSums<T> sweep_left(const MultisecantParams<T, H>& a, int64_t row, Scratch<T>& scratch) {
  if (a.pairs() == 0) return sweep_left<false, false>(a, row, scratch);
  return left_is_y(a.method) ? sweep_left<true, true>(a, row, scratch) : sweep_left<true, false>(a, row, scratch);
}

// Enter the newest pair in the window matrix and solve for gamma.
template <class T, class H>
DEQFAST_INLINE void solve_sample(const MultisecantParams<T, H>& a, int64_t row, const SweepSums<T>& sums,
                                 Scratch<T>& scratch) {
  const int n = a.window.size(), m = a.window.history, newest = a.window.newest();
  T* gram = a.gram + row * (m + 2) * m;
  double *lg = scratch.dots.data(), *ly = lg + n, *ls = ly + n;
  for (int j = 0; j < n; ++j) {
    lg[j] = scratch.lg.total(j);
    ly[j] = scratch.ly.total(j);
    if (a.method == kAndersonI) ls[j] = scratch.ls.total(j);
  }
  enter_pair(gram, gram + newest * m, ly, ls, static_cast<T>(sum<T>(sums.s_sq)), static_cast<T>(sum<T>(sums.y_sq)),
             a.window, a.method, a.beta, OneLane());
  for (int j = 0; j < n; ++j) scratch.t[j] = static_cast<T>(lg[j]);
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
  scratch.ds.clear();
  for (int64_t tile = 0; tile < a.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, a.dim - tile);
    T* z = a.z + row * a.dim + tile;
    const T *fz = a.fz + row * a.dim + tile, alpha = a.alpha, beta = a.beta;
    for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
      store(x + d, beta * (load(fz + d, lanes) - load(z + d, lanes)), W);
    });
    combine_rows(df + tile, a.dim, n, scratch.gamma.data(), count, x);
    for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
      const Vec<T> old = load(z + d, lanes), now = old + Held<T, H>(alpha * load(x + d, W)).value();
      const Held<T, H> taken(now - old);
      store(z + d, now, lanes);
      taken.put(left_next + tile + d, lanes);
      store(x + d, taken.value(), W);
    });
    if (needs_dots) dot_rows<false>(df + tile, a.dim, n, x, x, count, scratch.ds, scratch.ds);
  }
  if (!needs_dots) return;
  T* gram_row = a.gram + (row * (m + 2) + next) * m;
  for (int j = 0; j < n; ++j) gram_row[j] = static_cast<T>(scratch.ds.total(j));
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
    scratch.lg.clear();
    for (int64_t tile = 0; tile < p.dim; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, p.dim - tile);
      load_tile(tile, count, T(1));
      for (int age = 0; age < window.size(); ++age) {
        const int slot = window.slot(age);
        double* to = scratch.lg.at(slot);
        dot_block<1, false>(p.df + history + slot * p.dim + tile, p.dim, x, x, count, to, to);
      }
    }
    for (int j = 0; j < p.history; ++j) scratch.t[j] = static_cast<T>(scratch.lg.total(j));
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
