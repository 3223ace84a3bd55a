// Operations of a sweep over the rows of a sample's history, tile by tile: dot products and linear combinations.
#pragma once

#include <algorithm>

#include "simd.h"

namespace deqfast {

DEQFAST_INLINE void accumulate(double* to, Vec<double> v) {
  store(to, load(to, Simd<double>::lanes) + v, Simd<double>::lanes);
}

// Sums by slot, each a vector of partial sums; it does not own the memory.
struct Sums {
  static constexpr int W = Simd<double>::lanes;
  double* lanes;

  double* at(int slot) const { return lanes + slot * W; }
  double total(int slot) const { return sum<double>(load(at(slot), W)); }
  void clear(int slots) const { std::fill(lanes, at(slots), 0.0); }
  template <class V>
  DEQFAST_INLINE void add(int slot, V v) const {
    accumulate(at(slot), widened(v));
  }
  DEQFAST_INLINE void add(Sums other, int slots) const {
    for (int slot = 0; slot < slots; ++slot) accumulate(at(slot), load(other.at(slot), W));
  }
};

// Call body(r, R) for blocks of R <= `Most` of the n rows: the sums of a single row would wait for each other.
template <int Most, class Body>
DEQFAST_INLINE void for_row_blocks(int n, const Body& body) {
  int r = 0;
  const auto blocks_of = [&](auto size) DEQFAST_ALWAYS_INLINE {
    if constexpr (size <= Most) {
      for (; r + size <= n; r += size) body(r, size);
    }
  };
  blocks_of(std::integral_constant<int, 6>());
  blocks_of(std::integral_constant<int, 4>());
  blocks_of(std::integral_constant<int, 2>());
  blocks_of(std::integral_constant<int, 1>());
}

// out_v[r] += rows[r] . v over `count` elements, for R rows and the vectors x and (if `Two`) y, which are whole
// vectors. Each read takes `Lanes` elements: whole vectors, or the one Tail.
template <int R, bool Two, class T, class H, class Lanes>
DEQFAST_INLINE void dot_block(const H* rows, int64_t stride, const T* x, const T* y, int64_t count, Lanes lanes,
                              double* out_x, double* out_y) {
  constexpr int W = Simd<T>::lanes;
  Vec<T> sum_x[R] = {}, sum_y[R] = {};
  for (int64_t d = 0; d < count; d += W) {
    const Vec<T> vx = load(x + d, W), vy = Two ? load(y + d, W) : vx;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> row = load<T>(rows + r * stride + d, lanes);
      sum_x[r] += row * vx;
      if (Two) sum_y[r] += row * vy;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    accumulate(out_x + r * Sums::W, widened(sum_x[r]));
    if (Two) accumulate(out_y + r * Sums::W, widened(sum_y[r]));
  }
}

// The dots of n rows with x and y over one tile.
template <bool Two, int Most = 6, class T, class H>
DEQFAST_INLINE void dot_rows(const H* rows, int64_t stride, int n, const T* x, const T* y, int64_t count,
                             double* out_x, double* out_y) {
  constexpr int W = Simd<T>::lanes;
  const int64_t whole = count / W * W;
  for_row_blocks<Most>(n, [&](int r, auto size) DEQFAST_ALWAYS_INLINE {
    dot_block<size, Two>(rows + r * stride, stride, x, y, whole, std::integral_constant<int64_t, W>(),
                         out_x + r * Sums::W, out_y + r * Sums::W);
  });
  for (int r = 0; r < n && whole < count; ++r) {
    dot_block<1, Two>(rows + r * stride + whole, stride, x + whole, y + whole, 1, Tail<W>{count - whole},
                      out_x + r * Sums::W, out_y + r * Sums::W);
  }
}

// x -= sum_r weight[r] rows[r] over `count` elements of R rows, `Lanes` elements per read.
template <int R, class T, class H, class Lanes>
DEQFAST_INLINE void combine_block(const H* rows, int64_t stride, const T* weight, int64_t count, Lanes lanes, T* x) {
  constexpr int W = Simd<T>::lanes;
  for (int64_t d = 0; d < count; d += W) {
    Vec<T> v = load(x + d, W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v -= weight[r] * load<T>(rows + r * stride + d, lanes);
    store(x + d, v, W);
  }
}

// The same for n rows over one tile.
template <int Most = 6, class T, class H>
DEQFAST_INLINE void combine_rows(const H* rows, int64_t stride, int n, const T* weight, int64_t count, T* x) {
  constexpr int W = Simd<T>::lanes;
  const int64_t whole = count / W * W;
  for_row_blocks<Most>(n, [&](int r, auto size) DEQFAST_ALWAYS_INLINE {
    combine_block<size>(rows + r * stride, stride, weight + r, whole, std::integral_constant<int64_t, W>(), x);
  });
  for (int r = 0; r < n && whole < count; ++r) {
    combine_block<1>(rows + r * stride + whole, stride, weight + r, 1, Tail<W>{count - whole}, x + whole);
  }
}

}  // namespace deqfast
