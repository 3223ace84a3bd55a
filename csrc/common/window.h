// The window of secant pairs: ring-buffer slots and the window matrix N. Shared by the CPU and CUDA kernels.
//
// They do not share the solve of N gamma = t. The CPU eliminates below the diagonal and substitutes back, in memory. A
// warp keeps a row per lane in registers and eliminates above the diagonal too (Gauss-Jordan), because substitution
// would leave all lanes idle except one. The two round differently.
#pragma once

#include "monitor.h"

namespace deqfast {

// `left` holds differences of the residual (Y) for these methods, steps (S) for the others.
DEQFAST_HD inline bool left_is_y(int64_t method) { return method == kBroydenBad || method == kAndersonII; }

// Pair i is made by step i and is in slot i % history. At iteration k its slot `next` receives step k. The window is
// the newest `most` pairs.
struct Window {
  int history, pairs, at;  // slots, the size, and the slot of step k

  Window() = default;
  DEQFAST_HD Window(int64_t k, int history, int most)
      : history(history), pairs(k < most ? static_cast<int>(k) : most), at(static_cast<int>(k % history)) {}
  DEQFAST_HD int size() const { return pairs; }
  DEQFAST_HD int next() const { return at; }
  DEQFAST_HD int newest() const { return at == 0 ? history - 1 : at - 1; }
  DEQFAST_HD int slot(int age) const {  // age < size()
    const int back = newest() - age;
    return back < 0 ? back + history : back;
  }
};

template <class T>
DEQFAST_HD T inverse_length(T square) {
  return is_sound(square) ? T(1) / sqrt(square) : T(0);
}

// The threads that work on one window matrix together: one on the CPU, a warp on a GPU.
struct OneLane {
  static constexpr int index = 0, count = 1;
  DEQFAST_HD void sync() const {}
};

// The window matrix (history + 2, history), with any distance between its rows; its last two are |left|^2 and |y|^2.
template <class T>
struct Gram {
  T* entries;
  int stride;

  DEQFAST_HD T& at(int i, int j) const { return entries[i * stride + j]; }
};

// Enter the newest pair in the window matrix: its column L^T y, its row, and the squares of its lengths. `ly` and `ls`
// (Anderson I) are L^T y and L^T s by slot; `old_row` is the former content of the row, DF^T s (Anderson I). The lanes
// share all arrays.
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
  lanes.sync();  // row and column share their diagonal entry, which comes from the column
  for (int j = lanes.index; j < n; j += lanes.count) gram.at(j, newest) = static_cast<T>(ly[j]);
  if (lanes.index == 0) {
    gram.at(m, newest) = left_is_y(method) ? y_sq : s_sq;
    gram.at(m + 1, newest) = y_sq;
  }
  lanes.sync();
}

}  // namespace deqfast
