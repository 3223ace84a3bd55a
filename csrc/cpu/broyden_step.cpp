// broyden_step on the CPU: Broyden's method from its steps alone, z <- z + p with
// p = (g + sum_i c_i s_{i+1}) / (1 - c_{k-1}). The second sweep over a sample's steps finds them in the cache if they
// fit there, so that memory is read once per step.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../common/steps.h"
#include "rows.h"
#include "sweeps.h"

namespace deqfast {
namespace {

constexpr int kTile = 1024;  // elements: each row is read a page at a time

template <class T>
struct Scratch {
  Sums sg, ss;            // S^T g, S^T s of the newest step
  std::vector<double> c;  // coefficients
  std::vector<T> weight;  // of the steps that are added to g, negative

  explicit Scratch(int n) : sg(n), ss(n), c(n), weight(n) {}
};

// g of one tile, and a copy of the newest step that ends in whole vectors.
template <class T>
DEQFAST_INLINE void form_tile(const T* fz, const T* z, const T* newest, int64_t count, T* g, T* s, Vec<T>& res_sq,
                              Vec<T>& f_sq) {
  constexpr int W = Simd<T>::lanes;
  Vec<T> res_total = res_sq, f_total = f_sq;  // copies that can stay in registers
  for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
    const Vec<T> f = load(fz + d, lanes), res = f - load(z + d, lanes);
    res_total += res * res;
    f_total += f * f;
    store(g + d, res, W);
    if (newest) store(s + d, load(newest + d, lanes), W);
  });
  res_sq = res_total;
  f_sq = f_total;
}

// Sweep 1: form g, take its dots and those of the newest step with the `n` steps; judge.
template <class T>
DEQFAST_INLINE Verdict sweep_and_judge(const BroydenParams<T>& a, int64_t row, int n, Scratch<T>& scratch) {
  alignas(64) T g[kTile], s[kTile];
  const T* steps = a.steps + row * a.rows * a.dim;
  Vec<T> res_sq = {}, f_sq = {};
  scratch.sg.clear();
  scratch.ss.clear();
  for (int64_t tile = 0; tile < a.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, a.dim - tile), at = row * a.dim + tile;
    const T* newest = n ? steps + (n - 1) * a.dim + tile : nullptr;
    form_tile(a.fz + at, a.z + at, newest, count, g, s, res_sq, f_sq);
    dot_rows<true>(steps + tile, a.dim, n, g, s, count, scratch.sg, scratch.ss);
  }
  return settle(a.monitor, row, static_cast<T>(sum<T>(res_sq)), static_cast<T>(sum<T>(f_sq)), a.rule,
                a.z + row * a.dim, a.best + row * a.dim, a.dim);
}

// Enter the newest step in the Gram matrix and solve for the coefficients by forward recurrence; whether the step they
// give can be taken. The sample's steps begin with number `first`.
template <class T>
DEQFAST_INLINE bool solve_sample(const BroydenParams<T>& a, int64_t row, int n, int first, Scratch<T>& scratch) {
  T* gram = a.gram + row * a.rows * a.rows;
  for (int j = 0; j < n; ++j) gram[(n - 1) * a.rows + j] = static_cast<T>(scratch.ss.total(j));
  bool finite = true;
  for (int j = first; j < n; ++j) {
    const T* of_j = gram + j * a.rows;
    double sum = scratch.sg.total(j);
    for (int i = first; i < j; ++i) {
      if (scratch.c[i] != 0.0) sum += static_cast<double>(of_j[i + 1]) * scratch.c[i];  // a dot may have overflowed
    }
    scratch.c[j] = of_j[j] == T(0) ? 0.0 : sum / static_cast<double>(of_j[j]);
    finite = finite && std::fabs(scratch.c[j]) <= static_cast<double>(Limits<T>::max);
  }
  return finite && std::fabs(1.0 - scratch.c[n - 1]) >= kPivotFloor;
}

// Sweep 2: take the step p = (g + sum_i c_i s_{i+1}) scale over the coefficients from `first` on, and keep it.
template <class T>
DEQFAST_INLINE void sweep_and_step(const BroydenParams<T>& a, int64_t row, int n, int first, double scale,
                                   Scratch<T>& scratch) {
  constexpr int W = Simd<T>::lanes;
  const int count_of_rows = std::max(n - 1 - first, 0);
  for (int i = 0; i < count_of_rows; ++i) scratch.weight[i] = static_cast<T>(-scratch.c[first + i]);
  T* steps = a.steps + row * a.rows * a.dim;
  const T* added = steps + (first + 1) * a.dim;
  const T factor = static_cast<T>(scale);
  alignas(64) T x[kTile];
  for (int64_t tile = 0; tile < a.dim; tile += kTile) {
    const int64_t count = std::min<int64_t>(kTile, a.dim - tile);
    const T* fz = a.fz + row * a.dim + tile;
    T *z = a.z + row * a.dim + tile, *next = steps + n * a.dim + tile;
    for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
      store(x + d, load(fz + d, lanes) - load(z + d, lanes), W);
    });
    combine_rows(added + tile, a.dim, count_of_rows, scratch.weight.data(), count, x);
    for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
      const Vec<T> step = factor * load(x + d, W);
      store(z + d, load(z + d, lanes) + step, lanes);
      store(next + d, step, lanes);
    });
  }
}

template <class T>
DEQFAST_INLINE void broyden_rows(const BroydenParams<T>& a, int64_t begin, int64_t end) {
  const int n = a.rule.last ? 0 : static_cast<int>(a.rule.k);  // without a step to come only the residual counts
  Scratch<T> scratch(n);
  for (int64_t row = begin; row < end; ++row) {
    if (a.monitor.status[row] != kRunning) continue;
    const Verdict verdict = sweep_and_judge(a, row, n, scratch);
    if (!verdict.advance || a.rule.last) continue;
    int first = std::clamp(a.first[row], 0, n);
    if (n && !solve_sample(a, row, n, first, scratch)) first = a.first[row] = n;  // a new start with a Picard step
    sweep_and_step(a, row, n, first, first < n ? 1.0 / (1.0 - scratch.c[n - 1]) : 1.0, scratch);
  }
}

DEQFAST_CLONES void run(const BroydenParams<float>& a, int64_t begin, int64_t end) { broyden_rows(a, begin, end); }
DEQFAST_CLONES void run(const BroydenParams<double>& a, int64_t begin, int64_t end) { broyden_rows(a, begin, end); }

void broyden_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor gain,
                  Tensor active, Tensor steps, Tensor gram, Tensor first, int64_t k, bool last, double tol,
                  bool absolute, double stall_floor) {
  with_broyden_params(z, fz, best, status, iterations, residual, gain, active, steps, gram, first, k, last, tol,
                      absolute, stall_floor, [](const auto& params) {
                        const int64_t grain = rows_per_thread(params.dim * (params.rule.k + 1));
                        torch::stable::parallel_for(0, params.monitor.batch, grain,
                                                    [&](int64_t begin, int64_t end) { run(params, begin, end); });
                      });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) { m.impl("broyden_step", TORCH_BOX(&broyden_step)); }

}  // namespace deqfast
