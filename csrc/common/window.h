// The window of secant pairs: ring-buffer slots, the window matrix N and its small solve.
// Shared by the CPU and CUDA kernels; `deqfast/ops/steps/reference.py` (solve_window) is the specification.
#pragma once

#include "monitor.h"

namespace deqfast {

// `left` holds differences of the residual (Y) for these methods, steps (S) for the others.
DEQFAST_HD inline bool left_is_y(int64_t method) { return method == kBroydenBad || method == kAndersonII; }

// Pair i is made by step i and lies in slot i % history. At iteration k its slot `next` receives step k. The window
// holds the newest `most` pairs.
struct Window {
  int64_t k;
  int history;
  int most;

  DEQFAST_HD int size() const { return k < most ? static_cast<int>(k) : most; }
  DEQFAST_HD int next() const { return static_cast<int>(k % history); }
  DEQFAST_HD int newest() const { return static_cast<int>((k - 1) % history); }
  DEQFAST_HD int slot(int age) const {  // age < size()
    const int back = newest() - age;
    return back < 0 ? back + history : back;
  }
};

template <class T>
DEQFAST_HD T inverse_length(T square) {
  return is_sound(square) ? T(1) / sqrt(square) : T(0);
}

// The threads that solve one window together: one on the CPU, a warp on a GPU.
struct OneLane {
  static constexpr int index = 0, count = 1;
  DEQFAST_HD void sync() const {}
};

// The window matrix (history + 2, history), of any distance between its rows; its last two are |left|^2 and |y|^2.
template <class T>
struct Gram {
  T* entries;
  int stride;

  DEQFAST_HD T& at(int i, int j) const { return entries[i * stride + j]; }
};

// The distance of rows of n elements in memory that the lanes share: odd for a warp, whose lanes would else meet in a
// bank where each reads a row of its own.
template <class Lanes>
DEQFAST_HD constexpr int row_stride(int n) {
  return Lanes::count == 1 ? n : n | 1;
}

// Enter the newest pair in the window matrix: its column L^T y, its row, and the squares of its lengths. `ly` and `ls`
// (Anderson I) are L^T y and L^T s by slot; `old_row` is what the row held before, DF^T s (Anderson I). The lanes share
// all arrays.
template <class T, class Dot, class Lanes>
DEQFAST_HD void enter_pair(const Gram<T>& gram, const T* old_row, const Dot* ly, const Dot* ls, T s_sq, T y_sq,
                           const Window& window, int64_t method, T beta, const Lanes& lanes) {
  const int n = window.size(), m = window.history, newest = window.newest();
  for (int j = lanes.index; j < n; j += lanes.count) {
    if (left_is_y(method)) {
      gram.at(newest, j) = static_cast<T>(ly[j]);
    } else if (method == kAndersonI) {
      gram.at(newest, j) = (old_row[j] - static_cast<T>(ls[j])) / beta;
    }
  }
  lanes.sync();  // row and column share their diagonal entry, which is the column's
  for (int j = lanes.index; j < n; j += lanes.count) gram.at(j, newest) = static_cast<T>(ly[j]);
  if (lanes.index == 0) {
    gram.at(m, newest) = left_is_y(method) ? y_sq : s_sq;
    gram.at(m + 1, newest) = y_sq;
  }
  lanes.sync();
}

// row -= factor * pivot, in columns [begin, end). The rows differ: what of them is still to be loaded waits for no store.
template <class T>
DEQFAST_HD void eliminate(T* __restrict__ row, const T* __restrict__ pivot, T factor, int begin, int end) {
#ifdef __CUDACC__
#pragma unroll 8
#endif
  for (int j = begin; j < end; ++j) row[j] -= factor * pivot[j];
}

// Number of T in `work` that solve_window needs for n pairs.
template <class Lanes>
DEQFAST_HD constexpr int solve_workspace(int n) {
  return n * row_stride<Lanes>(n) + 2 * n;
}

// N gamma = t by elimination without pivoting from the newest pair to the oldest, on the equilibrated matrix. The first
// pivot under kPivotFloor drops its pair and all older ones. Gamma is zero where nothing is left or it overflows.
// t and gamma are indexed by slot. The lanes share all arrays; gamma is complete for all of them on return.
// `Transposed`: N^T gamma = t.
template <bool Transposed = false, class Entry, class T, class Lanes>
DEQFAST_HD void solve_window(const Gram<Entry>& gram, const T* t, T* gamma, T* work, const Window& window, int64_t method,
                             T ridge, const Lanes& lanes) {
  const int n = window.size(), stride = row_stride<Lanes>(n);
  const Gram<T> a{work, stride};  // n x n, newest first
  T* b = work + n * stride;       // right-hand side, then solution
  T* column_scale = b + n;
  const int left_sq = window.history, row_sq = left_sq + Transposed, column_sq = left_sq + !Transposed;
  for (int j = lanes.index; j < n; j += lanes.count) {
    column_scale[j] = inverse_length(gram.at(column_sq, window.slot(j)));
  }
  lanes.sync();
  for (int i = lanes.index; i < n; i += lanes.count) {
    const int slot = window.slot(i);
    const T scale = inverse_length(gram.at(row_sq, slot));
    for (int j = 0; j < n; ++j) {
      const bool zero = method == kBroydenBad && (Transposed ? i > j : j > i);
      const int other = window.slot(j);
      a.at(i, j) = zero ? T(0) : (Transposed ? gram.at(other, slot) : gram.at(slot, other)) * scale * column_scale[j];
    }
    if (method == kAndersonI || method == kAndersonII) a.at(i, i) += a.at(i, i) < 0 ? -ridge : ridge;
    b[i] = t[slot] * scale;
  }
  lanes.sync();

  int kept = 0;
  while (kept < n && fabs(a.at(kept, kept)) >= static_cast<T>(kPivotFloor)) {
    for (int i = kept + 1 + lanes.index; i < n; i += lanes.count) {
      const T factor = a.at(i, kept) / a.at(kept, kept);
      eliminate(&a.at(i, 0), &a.at(kept, 0), factor, kept + 1, n);
      b[i] -= factor * b[kept];
    }
    ++kept;
    lanes.sync();
  }
  for (int j = kept - 1; j >= 0; --j) {
    const T value = b[j] / a.at(j, j);
    lanes.sync();
    for (int i = lanes.index; i < j; i += lanes.count) b[i] -= a.at(i, j) * value;
    if (lanes.index == 0) b[j] = value;
    lanes.sync();
  }
  bool finite = true;
  for (int i = 0; i < kept; ++i) finite = finite && fabs(b[i] * column_scale[i]) <= Limits<T>::max;
  for (int i = lanes.index; i < n; i += lanes.count) {
    gamma[window.slot(i)] = finite && i < kept ? b[i] * column_scale[i] : T(0);
  }
  lanes.sync();
}

}  // namespace deqfast
