// The small solve by a warp; `deqfast/ops/steps/reference.py` (solve_window) is the specification.
#pragma once

#include "../common/window.h"

namespace deqfast {

struct WarpLanes {
  int index;
  static constexpr int count = 32;
  __device__ void sync() const { __syncwarp(); }
};

// N gamma = t for at most M pairs by the lanes of a warp, see `solve_window`. Lane i has the row of the i-th newest
// pair in registers, and eliminates its column above the diagonal as well as below (Gauss-Jordan), so that no
// substitution follows. All rows move to the left by one at every step, so that the column to be eliminated is always
// the first.
template <int M, bool Transposed, class T>
__device__ void solve_rows(const Gram<const T>& gram, const T* t, T* gamma, const Window& window, int64_t method,
                           T ridge) {
  constexpr unsigned all = 0xffffffffu;
  const int n = window.size(), newest = window.newest(), m = window.history;
  const int lane = threadIdx.x % 32, slot = window.slot(lane < n ? lane : 0);
  const bool triangular = method == kBroydenBad;
  const int first = Transposed && triangular ? lane : 0, end = !Transposed && triangular && lane < n ? lane + 1 : n;
  const T scale = inverse_length(gram.at(m + Transposed, slot));
  const T column_scale = inverse_length(gram.at(m + !Transposed, slot));
  const T* from = Transposed ? &gram.at(0, slot) : &gram.at(slot, 0);
  T row[M], b = t[slot] * scale;
#pragma unroll
  for (int j = 0; j < M; ++j) {
    const int other = newest - j + (j > newest ? m : 0);  // the slot of the j-th newest pair
    const T column = __shfl_sync(all, column_scale, j);
    row[j] = j >= first && j < end ? from[Transposed ? other * gram.stride : other] * scale * column : T(0);
  }
  T shift = 0;  // ridge on the lane's diagonal entry, added when that is the pivot
  if (method == kAndersonI || method == kAndersonII) {
    shift = gram.at(slot, slot) * scale * column_scale < 0 ? -ridge : ridge;
  }

  int kept = 0;
  T own_pivot = 1;
#pragma unroll 1
  for (; kept < n; ++kept) {
    const bool other = lane != kept;
    if (!other) own_pivot = row[0] + shift;
    const T pivot = __shfl_sync(all, own_pivot, kept), pivot_b = __shfl_sync(all, b, kept);
    if (!(fabs(pivot) >= static_cast<T>(kPivotFloor))) break;
    const T factor = row[0] / pivot;
    if (other) b -= factor * pivot_b;
#pragma unroll
    for (int j = 1; j < M; ++j) {
      const T pivot_entry = __shfl_sync(all, row[j], kept);
      row[j - 1] = other ? row[j] - factor * pivot_entry : row[j];
    }
  }
  const T solution = b / own_pivot * column_scale;
  const bool finite = __all_sync(all, lane >= kept || fabs(solution) <= Limits<T>::max);
  if (lane < n) gamma[slot] = finite && lane < kept ? solution : T(0);
}

// N gamma = t by elimination without pivoting from the newest pair to the oldest, on the equilibrated matrix. The first
// pivot below kPivotFloor drops its pair and all older ones. Gamma is zero if no pair is left or it overflows.
// t and gamma are indexed by slot. All lanes of a warp share the arrays, which are in shared memory. On return gamma is
// complete for all lanes. `Transposed`: N^T gamma = t.
template <bool Transposed = false, class T>
__device__ void solve_window(const Gram<const T>& gram, const T* t, T* gamma, const Window& window, int64_t method,
                             T ridge) {
  if (window.size() <= 8) {
    solve_rows<8, Transposed>(gram, t, gamma, window, method, ridge);
  } else {
    solve_rows<kMaxGpuHistory, Transposed>(gram, t, gamma, window, method, ridge);
  }
  __syncwarp();
}

}  // namespace deqfast
