// Group normalisation on a GPU: one block of threads per group of a sample, in channels_last.
//
// The groups of a sample are independent of each other, so that there are B * groups blocks. A group is a strip of
// neighbouring channels; its packs of N channels are the columns, its pixels the rows of a grid on which a thread keeps
// to one column (to several of them where there are more columns than threads). With K > 0 a thread holds its at most
// K packs in registers and every pass after the first reads nothing; with K = 0 every pass reads the group again.
#pragma once

#include "../common/norm.h"
#include "block.cuh"
#include "convert.cuh"

namespace deqfast {

// Elements of a group that a thread holds at most, and for small groups: fewer registers let more blocks run.
template <class T>
constexpr int kHeld = 128 / sizeof(T);
template <class T>
constexpr int kHeldOfSmall = 32 / sizeof(T);

template <int N>
struct Group {
  int64_t offset;   // of the first element
  int64_t channel;  // the first one, counted through all samples
  int first, size, stride, pixels;
  int cols, width, rows, col, row;

  __device__ explicit Group(const NormShape& s) {
    const int64_t sample = blockIdx.x / s.groups;
    size = static_cast<int>(s.channels / s.groups);
    first = static_cast<int>(blockIdx.x % s.groups) * size;
    stride = static_cast<int>(s.channels);
    pixels = static_cast<int>(s.pixels);
    offset = sample * s.pixels * s.channels + first;
    channel = sample * s.channels + first;
    cols = size / N;
    width = cols < kThreads ? cols : kThreads;
    rows = kThreads / width;
    col = threadIdx.x % width;
    row = threadIdx.x / width;
    if (row >= rows) row = 1 << 30;  // has no pixel
  }

  template <class T>
  __device__ T count() const {
    return static_cast<T>(pixels) * static_cast<T>(size);
  }
};

// Calls body(slot, offset in the group) for the thread's packs, between begin(channel in the group) and end(channel).
template <int K, int N, class Begin, class Body, class End>
__device__ void sweep(const Group<N>& g, const Begin& begin, const Body& body, const End& end) {
  if constexpr (K > 0) {
    begin(g.col * N);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int pixel = g.row + k * g.rows;
      if (pixel < g.pixels) body(k, pixel * g.stride + g.col * N);
    }
    end(g.col * N);
  } else {
    for (int col = g.col; col < g.cols; col += kThreads) {
      begin(col * N);
      for (int pixel = g.row; pixel < g.pixels; pixel += g.rows) body(0, pixel * g.stride + col * N);
      end(col * N);
    }
  }
}

struct Nothing {
  __device__ void operator()(int) const {}
};

template <class T, class X, int N>
__device__ void load_values(const X* from, T (&values)[N]) {
  const auto pack = load<X, N>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = convert<T>(pack.value[i]);
}

template <class T, class X, int N>
__device__ void store_values(X* to, const T (&values)[N]) {
  Pack<X, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.value[i] = convert<X>(values[i]);
  store(to, pack);
}

// Totals over the block, for all threads.
template <class T, int Count>
__device__ void block_totals(BlockSums<T, Count>& sums, T (&values)[Count]) {
  sums.clear(Count);
#pragma unroll
  for (int v = 0; v < Count; ++v) sums.add(v, values[v]);
  sums.finish(Count);
#pragma unroll
  for (int v = 0; v < Count; ++v) values[v] = sums.totals[v];
}

template <class T>
__device__ T block_total(BlockSums<T, 1>& sums, T value) {
  T values[1] = {value};
  block_totals(sums, values);
  return values[0];
}

template <class T>
__device__ T relu(T x) {
  return x < T(0) ? T(0) : x;  // NaN stays NaN
}

template <class T>
__device__ T inverse_deviation(T squares, T count, T eps) {
  return T(1) / sqrt(squares / count + eps);
}

// What the gradient through a normalisation needs: sums per channel over the pixels, and means over the group.
template <class T, int N>
struct AffineSums {
  T weight[N], bias[N];  // sums of grad * normal and of grad over the thread's pixels of one column
  T means[2] = {};       // of weight * grad * normal and weight * grad

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < N; ++i) weight[i] = bias[i] = T(0);
  }

  __device__ void add(int i, T grad, T normal) {
    weight[i] += grad * normal;
    bias[i] += grad;
  }

  // Add the rows of a column in a tree, enter the sums at `to` and, `plane` further, and take them up in the means.
  // By all threads of the block where a column has several rows.
  __device__ void finish(const Group<N>& g, T (*buffer)[kThreads], const T (&factor)[N], T* to, int64_t plane) {
    if (g.rows > 1) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        buffer[i][threadIdx.x] = weight[i];
        buffer[N + i][threadIdx.x] = bias[i];
      }
      __syncthreads();
      int step = 1;
      while (2 * step < g.rows) step *= 2;
      for (; step > 0; step /= 2) {
        if (g.row < step && g.row + step < g.rows) {
#pragma unroll
          for (int i = 0; i < 2 * N; ++i) buffer[i][threadIdx.x] += buffer[i][threadIdx.x + step * g.width];
        }
        __syncthreads();
      }
    }
    if (g.row != 0) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T weight_sum = g.rows > 1 ? buffer[i][threadIdx.x] : weight[i];
      const T bias_sum = g.rows > 1 ? buffer[N + i][threadIdx.x] : bias[i];
      to[i] = weight_sum;
      to[plane + i] = bias_sum;
      means[0] += factor[i] * weight_sum;
      means[1] += factor[i] * bias_sum;
    }
  }

  // After all columns, by all threads.
  __device__ void finish_means(BlockSums<T, 2>& sums, T count) {
    block_totals(sums, means);
    means[0] /= count;
    means[1] /= count;
  }

  // The gradient before the normalisation from that behind weight * normal + bias.
  __device__ T before(T grad, T normal, T factor, T rstd) const {
    return (grad * factor - means[1] - normal * means[0]) * rstd;
  }
};

inline unsigned groups_grid(const NormShape& s, const char* op) {
  STD_TORCH_CHECK(s.pixels * s.channels <= std::numeric_limits<int32_t>::max(), op, ": `y` has too large samples: ",
                  s.pixels * s.channels, " elements");
  STD_TORCH_CHECK(s.batch * s.groups <= std::numeric_limits<int32_t>::max(), op,
                  ": `y` has too many groups: ", s.batch * s.groups);
  return static_cast<unsigned>(s.batch * s.groups);
}

// Calls launch(N, K: std::integral_constant): packs of N elements where alignment allows, held in registers where a
// group fits.
template <class T, int N, class Launch, class... Pointers>
void with_packs(const NormShape& s, const Launch& launch, Pointers... pointers) {
  using std::integral_constant;
  constexpr int most = kHeld<T> / N, few = kHeldOfSmall<T> / N;
  const int64_t size = s.channels / s.groups, cols = size / N;
  const auto fits = [&](int packs) { return cols <= kThreads && s.pixels <= packs * (kThreads / cols); };
  if (!aligned<N>(size, pointers...)) {
    launch(integral_constant<int, 1>(), integral_constant<int, 0>());
  } else if (fits(few)) {
    launch(integral_constant<int, N>(), integral_constant<int, few>());
  } else if (fits(most)) {
    launch(integral_constant<int, N>(), integral_constant<int, most>());
  } else {
    launch(integral_constant<int, N>(), integral_constant<int, 0>());
  }
}

}  // namespace deqfast
