// Group normalisation on the CPU: sweeps over pieces of samples that are normalised independently.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "../common/norm.h"
#include "grain.h"
#include "simd.h"

namespace deqfast {

// `rows` times `cols` contiguous elements: a sample in channels_last (its rows are pixels), else one group of a sample
// (its rows are channels). Results per channel or group are contiguous over all pieces.
struct Piece {
  int64_t rows, cols, channels, groups;

  explicit Piece(const NormShape& s)
      : rows(s.channels_last ? s.pixels : s.channels / s.groups),
        cols(s.channels_last ? s.channels : s.pixels),
        channels(s.channels_last ? s.channels : s.channels / s.groups),
        groups(s.channels_last ? s.groups : 1) {}

  int64_t size() const { return rows * cols; }
};

inline int64_t pieces(const NormShape& s) { return s.channels_last ? s.batch : s.batch * s.groups; }

// Arrays of one value per channel, each padded to whole vectors.
template <class T>
class ChannelArrays {
 public:
  ChannelArrays(int64_t channels, int count)
      : stride_((channels + Simd<T>::lanes - 1) / Simd<T>::lanes * Simd<T>::lanes), values_(stride_ * count) {}
  T* operator[](int i) { return values_.data() + i * stride_; }
  void clear() { std::fill(values_.begin(), values_.end(), T(0)); }

 private:
  int64_t stride_;
  std::vector<T> values_;
};

template <class T>
DEQFAST_INLINE Vec<T> first_lanes(Vec<T> v, int64_t count) {
  T lanes[Simd<T>::lanes];
  store(lanes, v, Simd<T>::lanes);
  return load(lanes, count);
}

// The sum of all lanes, in pairs.
template <class T, int N>
DEQFAST_INLINE T tree_sum(Register<T, N> v) {
  if constexpr (N * sizeof(T) > 16) {
    Register<T, N / 2> half[2];
    memcpy(half, &v, sizeof v);
    return tree_sum<T, N / 2>(half[0] + half[1]);
  } else if constexpr (N == 4) {
    return (v[0] + v[1]) + (v[2] + v[3]);
  } else {
    return v[0] + v[1];
  }
}

template <class T>
DEQFAST_INLINE T tree_sum(Vec<T> v) {
  for (int n = kParts / 2; n > 0; n /= 2) {
    for (int i = 0; i < n; ++i) v.part[i] += v.part[i + n];
  }
  return tree_sum<T, Vec<T>::width>(v.part[0]);
}

// NaN stays NaN.
template <class T>
DEQFAST_INLINE Vec<T> relu(Vec<T> v) {
  return select(v < T(0), T(0), v);
}

// The gradient before a relu; NaN stays NaN, as in torch.
template <class T>
DEQFAST_INLINE Vec<T> masked(Vec<T> grad, Vec<T> before_relu) {
  return select(before_relu <= T(0), T(0), grad);
}

// The values of the channels at c: a vector if channels are adjacent, else the one channel of the row.
template <bool kLast, class T, class Count>
DEQFAST_INLINE auto at(const T* values, int64_t c, Count count) {
  if constexpr (kLast) {
    return load(values + c, count);
  } else {
    return values[c];
  }
}

// Terms that a lane adds up before their sum joins a total in double precision. A long sum of equal terms, such as the
// zeros of a relu less their mean, rounds in one direction.
constexpr int64_t kRun = 64;

// Calls body(d, c, count, terms) for all vectors of a piece: d is the position of `count` elements, c their channel
// (the first one in channels_last). The sums of `terms` per channel go to the arrays of `sums`.
template <class T, bool kLast, int Terms, class Body>
DEQFAST_INLINE void sweep(const Piece& p, ChannelArrays<T>& sums, const Body& body) {
  constexpr int W = Simd<T>::lanes;
  using Whole = std::integral_constant<int64_t, W>;
  const int64_t whole = p.cols / W * W;
  const Tail<W> rest{p.cols - whole};
  constexpr int kCount = Terms > 0 ? Terms : 1;
  if constexpr (!kLast) {
    for (int64_t row = 0; row < p.rows; ++row) {
      double totals[kCount] = {};
      for (int64_t begin = 0; begin < p.cols; begin += kRun * W) {
        Vec<T> terms[kCount] = {};
        const int64_t end = std::min(begin + kRun * W, whole);
        for (int64_t d = begin; d < end; d += W) body(row * p.cols + d, row, Whole(), terms);
        if (rest > 0 && begin + kRun * W >= p.cols) {
          Vec<T> last[kCount] = {};
          body(row * p.cols + whole, row, rest, last);
          for (int k = 0; k < Terms; ++k) terms[k] += first_lanes<T>(last[k], rest);
        }
        for (int k = 0; k < Terms; ++k) totals[k] += tree_sum<T>(terms[k]);
      }
      for (int k = 0; k < Terms; ++k) sums[k][row] = static_cast<T>(totals[k]);
    }
  } else {
    constexpr int64_t kRows = 4;  // summed in registers
    std::vector<double> totals(p.rows > kRun * kRows ? p.channels * Terms : 0);
    if (Terms > 0) sums.clear();
    for (int64_t row = 0; row < p.rows; row += kRows) {
      const int64_t end = std::min(row + kRows, p.rows);
      const auto column = [&](int64_t c, auto count) DEQFAST_ALWAYS_INLINE {
        Vec<T> terms[kCount] = {};
        for (int64_t r = row; r < end; ++r) body(r * p.cols + c, c, count, terms);
        for (int k = 0; k < Terms; ++k) {
          T* sum = sums[k] + c;  // lanes after the last channel are in the padding
          store(sum, load(sum, W) + terms[k], W);
        }
      };
      for (int64_t c = 0; c < whole; c += W) column(c, Whole());
      if (rest > 0) column(whole, rest);
      if (!totals.empty() && (end % (kRun * kRows) == 0 || end == p.rows)) {
        for (int k = 0; k < Terms; ++k) {
          double* total = totals.data() + k * p.channels;
          for (int64_t c = 0; c < p.channels; ++c) {
            total[c] += sums[k][c];
            sums[k][c] = end == p.rows ? static_cast<T>(total[c]) : T(0);
          }
        }
      }
    }
  }
}

// Means over groups of the sums that a sweep formed per channel, times `weight` if given.
template <class T>
DEQFAST_INLINE void group_means(const Piece& p, const T* sums, const T* weight, T* means) {
  const int64_t size = p.channels / p.groups;
  for (int64_t g = 0; g < p.groups; ++g) {
    Vec<T> total = {};
    for (int64_t c = g * size; c < (g + 1) * size; c += Simd<T>::lanes) {
      const int64_t count = (g + 1) * size - c;
      total += weight ? load(sums + c, count) * load(weight + c, count) : load(sums + c, count);
    }
    means[g] = tree_sum<T>(total) / static_cast<T>(p.size() / p.groups);
  }
}

// Expand one value per group to one per channel.
template <class T>
DEQFAST_INLINE void spread(const Piece& p, const T* values, T* per_channel) {
  const int64_t size = p.channels / p.groups;
  for (int64_t g = 0; g < p.groups; ++g) std::fill_n(per_channel + g * size, size, values[g]);
}

// Statistics of value(d, c, count) in a first pass and of again(d, c, count) in a second; mean_c and rstd_c receive
// them per channel.
template <class T, bool kLast, class Value, class Again>
DEQFAST_INLINE void statistics(const Piece& p, T eps, ChannelArrays<T>& sums, T* mean_c, T* rstd_c, T* mean, T* rstd,
                               const Value& value, const Again& again) {
  sweep<T, kLast, 1>(p, sums, [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_ALWAYS_INLINE {
    terms[0] += value(d, c, count);
  });
  group_means<T>(p, sums[0], nullptr, mean);
  spread(p, mean, mean_c);
  sweep<T, kLast, 1>(p, sums, [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_ALWAYS_INLINE {
    const Vec<T> centred = again(d, c, count) - at<kLast>(mean_c, c, count);
    terms[0] += centred * centred;
  });
  group_means<T>(p, sums[0], nullptr, rstd);
  for (int64_t g = 0; g < p.groups; ++g) rstd[g] = T(1) / std::sqrt(rstd[g] + eps);
  spread(p, rstd, rstd_c);
}

// The gradient of the input of a normalisation, from the gradient of weight * normal + bias.
template <class T, bool kLast>
class NormBackward {
 public:
  // sums: of grad * normal and of grad, per channel; arrays: scratch memory of the piece, three from `first` on.
  DEQFAST_INLINE NormBackward(const Piece& p, ChannelArrays<T>& sums, const T* weight, const T* rstd_c,
                              ChannelArrays<T>& arrays, int first)
      : weight_(weight), rstd_c_(rstd_c), slope_c_(arrays[first]), mean_c_(arrays[first + 1]) {
    T* means = arrays[first + 2];
    group_means(p, sums[0], weight, means);
    spread(p, means, arrays[first]);
    group_means(p, sums[1], weight, means);
    spread(p, means, arrays[first + 1]);
  }

  template <class Count>
  DEQFAST_INLINE Vec<T> operator()(Vec<T> grad, Vec<T> normal, int64_t c, Count count) const {
    const Vec<T> centred =
        grad * at<kLast>(weight_, c, count) - at<kLast>(mean_c_, c, count) - normal * at<kLast>(slope_c_, c, count);
    return centred * at<kLast>(rstd_c_, c, count);
  }

 private:
  const T *weight_, *rstd_c_, *slope_c_, *mean_c_;
};

// Copy the sums of a piece to its place in the gradients of weight and bias (2, B, C).
template <class T>
void put_affine(const NormShape& s, const Piece& p, int64_t piece, ChannelArrays<T>& sums, T* grad_affine) {
  for (int k = 0; k < 2; ++k) {
    memcpy(grad_affine + k * s.batch * s.channels + piece * p.channels, sums[k], p.channels * sizeof(T));
  }
}

// Computes an op on several threads by its run_pieces(params, begin, end, channels last: std::bool_constant).
struct NormKernels {
  using BFloat16 = deqfast::BFloat16;
  static constexpr bool native = true;

  template <class Params>
  static void run(const Params& params, const Tensor&) {
    if (params.shape.channels_last) {
      launch(params, std::true_type());
    } else {
      launch(params, std::false_type());
    }
  }

 private:
  template <class Params, class Last>
  static void launch(const Params& params, Last last) {
    constexpr int64_t passes = 4;  // about
    torch::stable::parallel_for(0, pieces(params.shape), grain_of(passes * Piece(params.shape).size()),
                                [&](int64_t begin, int64_t end) { run_pieces(params, begin, end, last); });
  }
};

}  // namespace deqfast
