// What a sweep over the rows of a sample's history does, tile by tile: dot products and linear combinations.
#pragma once

#include <algorithm>

#include "simd.h"

namespace deqfast {

DEQFAST_INLINE void accumulate(double* to, Vec<double> v) {
  store(to, load(to, Simd<double>::lanes) + v, Simd<double>::lanes);
}

// By slot, each a vector of partial sums; the memory is another's.
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

// out_v[r] += rows[r] . v, for R rows and the vectors x and (if `Two`) y, over one tile; x and y are whole vectors.
template <int R, bool Two, class T, class H>
DEQFAST_INLINE void dot_block(const H* rows, int64_t stride, const T* x, const T* y, int64_t count, double* out_x,
                              double* out_y) {
  constexpr int W = Simd<T>::lanes;
  Vec<T> sum_x[R] = {}, sum_y[R] = {};
  for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
    const Vec<T> vx = load(x + d, W), vy = Two ? load(y + d, W) : vx;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec<T> row = load<T>(rows + r * stride + d, lanes);
      sum_x[r] += row * vx;
      if (Two) sum_y[r] += row * vy;
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    accumulate(out_x + r * Sums::W, widened(sum_x[r]));
    if (Two) accumulate(out_y + r * Sums::W, widened(sum_y[r]));
  }
}

// Several rows at once: the sums of one alone would wait for each other.
template <bool Two, class T, class H>
DEQFAST_INLINE void dot_rows(const H* rows, int64_t stride, int n, const T* x, const T* y, int64_t count,
                             double* out_x, double* out_y) {
  int r = 0;
  const auto dot = [&](auto size) DEQFAST_ALWAYS_INLINE {
    constexpr int R = decltype(size)::value;
    for (; r + R <= n; r += R) {
      dot_block<R, Two>(rows + r * stride, stride, x, y, count, out_x + r * Sums::W, out_y + r * Sums::W);
    }
  };
  dot(std::integral_constant<int, 6>());
  dot(std::integral_constant<int, 4>());
  dot(std::integral_constant<int, 2>());
  dot(std::integral_constant<int, 1>());
}

// x -= sum_r weight[r] rows[r] over one tile.
template <int R, class T, class H>
DEQFAST_INLINE void combine_block(const H* rows, int64_t stride, const T* weight, int64_t count, T* x) {
  constexpr int W = Simd<T>::lanes;
  for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
    Vec<T> v = load(x + d, W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v -= weight[r] * load<T>(rows + r * stride + d, lanes);
    store(x + d, v, W);
  });
}

template <class T, class H>
DEQFAST_INLINE void combine_rows(const H* rows, int64_t stride, int n, const T* weight, int64_t count, T* x) {
  int r = 0;
  const auto combine = [&](auto size) DEQFAST_ALWAYS_INLINE {
    constexpr int R = decltype(size)::value;
    for (; r + R <= n; r += R) combine_block<R>(rows + r * stride, stride, weight + r, count, x);
  };
  combine(std::integral_constant<int, 6>());
  combine(std::integral_constant<int, 4>());
  combine(std::integral_constant<int, 2>());
  combine(std::integral_constant<int, 1>());
}

}  // namespace deqfast
