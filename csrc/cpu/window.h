// The small solve on the CPU; `deqfast/ops/steps/reference.py` (solve_window) is the specification.
#pragma once

#include "../common/window.h"

namespace deqfast {

// Number of elements T in `work` that solve_window needs for n pairs.
constexpr int solve_workspace(int n) { return n * n + 2 * n; }

// N gamma = t by elimination without pivoting from the newest pair to the oldest, on the equilibrated matrix. The first
// pivot below kPivotFloor drops its pair and all older ones. Gamma is zero if no pair is left or it overflows.
// t and gamma are indexed by slot. `Transposed`: N^T gamma = t.
template <bool Transposed = false, class Entry, class T>
void solve_window(const Gram<Entry>& gram, const T* t, T* gamma, T* work, const Window& window, int64_t method,
                  T ridge) {
  const int n = window.size();
  const Gram<T> a{work, n};  // n x n, newest first
  T* b = work + n * n;       // right-hand side, then solution
  T* column_scale = b + n;
  const int left_sq = window.history, row_sq = left_sq + Transposed, column_sq = left_sq + !Transposed;
  for (int j = 0; j < n; ++j) column_scale[j] = inverse_length(gram.at(column_sq, window.slot(j)));
  for (int i = 0; i < n; ++i) {
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

  int kept = 0;
  for (; kept < n && std::fabs(a.at(kept, kept)) >= static_cast<T>(kPivotFloor); ++kept) {
    for (int i = kept + 1; i < n; ++i) {
      const T factor = a.at(i, kept) / a.at(kept, kept);
      for (int j = kept + 1; j < n; ++j) a.at(i, j) -= factor * a.at(kept, j);
      b[i] -= factor * b[kept];
    }
  }
  bool finite = true;
  for (int j = kept - 1; j >= 0; --j) {
    b[j] /= a.at(j, j);
    for (int i = 0; i < j; ++i) b[i] -= a.at(i, j) * b[j];
    finite = finite && std::fabs(b[j] * column_scale[j]) <= Limits<T>::max;
  }
  for (int i = 0; i < n; ++i) gamma[window.slot(i)] = finite && i < kept ? b[i] * column_scale[i] : T(0);
}

}  // namespace deqfast
