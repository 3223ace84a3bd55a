// Group normalisation on a GPU: one block of threads per group of a sample, in channels_last.
//
// The groups of a sample are independent, so that there are B * groups blocks. A group is a strip of adjacent channels.
// Its packs of N channels are the columns and its pixels the rows of a grid, in which a thread keeps to one column, or
// to several if there are more columns than threads. With K > 0 a thread keeps its at most K packs in registers, and
// passes after the first read nothing. With K = 0 every pass reads the group again.
//
// Each warp of a block has a fixed cost, for any number of elements. Small groups therefore have blocks of few threads.
#pragma once

#include "../common/norm.h"
#include "block.cuh"
#include "convert.cuh"

namespace deqfast {

// Threads of a block for a group that fits their registers. On an H100 32 and 128 took 0.96 to 1.07 times as long, with
// neither always faster.
constexpr int kFewThreads = 64;

// The most elements of a group that a thread holds: of a large one, of a small one, of one for few threads.
template <class T>
constexpr int kHeld = 128 / sizeof(T);
template <class T>
constexpr int kHeldOfSmall = 32 / sizeof(T);
template <class T>
constexpr int kHeldOfFew = 4096 / sizeof(T) / kFewThreads;

// The layout of a block of `threads` on a group with `cols` columns, computed by the host, which divides faster.
struct Layout {
  unsigned groups;
  int size, stride, pixels;  // channels of a group and of a sample; pixels
  int cols, width, rows;
  unsigned reciprocal;  // thread * reciprocal >> 16 is thread / width, for up to 256 threads

  Layout(const NormShape& s, int n, int threads) {
    groups = static_cast<unsigned>(s.groups);
    size = static_cast<int>(s.channels / s.groups);
    stride = static_cast<int>(s.channels);
    pixels = static_cast<int>(s.pixels);
    cols = size / n;
    width = cols < threads ? cols : threads;
    rows = threads / width;
    reciprocal = static_cast<unsigned>((65536 + width - 1) / width);
  }
};

template <int N, int Threads>
struct Group {
  int64_t offset;   // of the first element
  int64_t channel;  // the first one, counted through all samples
  int first, size, stride, pixels;
  int cols, width, rows, col, row;

  __device__ explicit Group(const Layout& g) {
    const unsigned sample = blockIdx.x / g.groups;
    size = g.size;
    first = static_cast<int>(blockIdx.x - sample * g.groups) * size;
    stride = g.stride;
    pixels = g.pixels;
    offset = static_cast<int64_t>(sample) * pixels * stride + first;
    channel = static_cast<int64_t>(sample) * stride + first;
    cols = g.cols;
    width = g.width;
    rows = g.rows;
    row = static_cast<int>(threadIdx.x * g.reciprocal >> 16);
    col = static_cast<int>(threadIdx.x) - row * width;
    if (row >= rows) row = 1 << 30;  // has no pixel
  }

  template <class T>
  __device__ T count() const {
    return static_cast<T>(pixels) * static_cast<T>(size);
  }
  __device__ bool has(int k) const { return row + k * rows < pixels; }
  __device__ int at(int k) const { return (row + k * rows) * stride + col * N; }  // of slot k, in the group
};

struct Nothing {
  template <class... Arguments>
  __device__ void operator()(Arguments...) const {}
};

// Terms that a thread adds up before their sum joins a total in double precision. A long sum of equal terms, such as
// the zeros of a relu less their mean, rounds in one direction.
constexpr int kRun = 64;

// Calls body(slot, offset in the group) for the thread's packs, between begin(channel in the group) and end(channel).
// With K = 0 it calls settle() after each `kRun` packs of a column, and after the last.
template <int K, int N, int Threads, class Begin, class Body, class End, class Settle = Nothing>
__device__ void sweep(const Group<N, Threads>& g, const Begin& begin, const Body& body, const End& end,
                      const Settle& settle = {}) {
  if constexpr (K > 0) {
    begin(g.col * N);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (g.has(k)) body(k, g.at(k));
    }
    end(g.col * N);
  } else {
    for (int col = g.col; col < g.cols; col += Threads) {
      begin(col * N);
      for (int pixel = g.row; pixel < g.pixels;) {
        for (int n = 0; n < kRun && pixel < g.pixels; ++n, pixel += g.rows) body(0, pixel * g.stride + col * N);
        settle();
      }
      end(col * N);
    }
  }
}

// The packs of a thread that holds its part of a group. All loads are concurrent. Slots without a pixel load the last
// one, because loads under conditions would be waited for one after the other.
template <class X, int K, int N, int Threads>
__device__ void load_slots(const Group<N, Threads>& g, const X* from, Pack<X, N> (&packs)[K]) {
  const X* first = from + g.offset + g.col * N;
#pragma unroll
  for (int k = 0; k < K; ++k) packs[k] = load<X, N>(first + min(g.row + k * g.rows, g.pixels - 1) * g.stride);
}

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

// Sum of a thread that holds its terms: in blocks of few threads, whose threads have many, as several independent sums.
template <class T, int K, int Threads>
struct PartialSum {
  static constexpr int kSums = Threads < kThreads ? 4 : 1;
  T sums[kSums] = {};

  __device__ void add(int i, T x) { sums[i % kSums] += x; }
  __device__ void settle() {}
  __device__ T total() const {
    T sum = sums[0];
#pragma unroll
    for (int i = 1; i < kSums; ++i) sum += sums[i];
    return sum;
  }
};

// Sum of a thread that reads any number of terms, settled after each `kRun` packs.
template <class T, int Threads>
struct PartialSum<T, 0, Threads> {
  T run = 0;
  double settled = 0;

  __device__ void add(int, T x) { run += x; }
  __device__ void settle() {
    settled += run;
    run = 0;
  }
  __device__ T total() const { return static_cast<T>(settled); }
};

// Totals over the block, for all threads, which add up the sums of the warps in the same order. One barrier each: calls
// alternate between two sets of slots.
template <class T, int Count, int Threads>
struct BlockTotals {
  T slots[2][Threads / 32][Count];

  __device__ void add_up(int turn, T (&values)[Count]) {
#pragma unroll
    for (int v = 0; v < Count; ++v) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) values[v] += __shfl_xor_sync(0xffffffffu, values[v], offset);
      if (threadIdx.x % 32 == 0) slots[turn][threadIdx.x / 32][v] = values[v];
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < Count; ++v) {
      values[v] = slots[turn][0][v];
#pragma unroll
      for (int w = 1; w < Threads / 32; ++w) values[v] += slots[turn][w][v];
    }
  }

  __device__ T add_up(int turn, T value) {
    T values[1] = {value};
    add_up(turn, values);
    return values[0];
  }
};

template <class T>
__device__ T relu(T x) {
  return x < T(0) ? T(0) : x;  // NaN stays NaN
}

template <class T>
__device__ T inverse_deviation(T squares, T count, T eps) {
  return T(1) / sqrt(squares / count + eps);
}

// Terms of the gradient through a normalisation: sums per channel over the pixels, and means over the group.
template <class T, int N, int K>
struct AffineSums {
  T weight[N], bias[N];  // sums of grad * normal and of grad over the thread's pixels of one column
  double settled[K > 0 ? 1 : 2 * N];  // with K = 0: sums of both, of the packs before the present run
  T means[2] = {};       // of weight * grad * normal and weight * grad

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      weight[i] = bias[i] = T(0);
      if constexpr (K == 0) settled[i] = settled[N + i] = 0;
    }
  }

  __device__ void settle() {
    if constexpr (K == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        settled[i] += weight[i];
        settled[N + i] += bias[i];
        weight[i] = bias[i] = T(0);
      }
    }
  }

  __device__ void add(int i, T grad, T normal) {
    weight[i] += grad * normal;
    bias[i] += grad;
  }

  // Add the rows of a column in a tree; store the sums at `to` and, `plane` further, and add them to the means.
  // By all threads of the block if a column has several rows.
  template <int Threads>
  __device__ void finish(const Group<N, Threads>& g, T (*buffer)[Threads], const T (&factor)[N], T* to, int64_t plane) {
    if constexpr (K == 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        weight[i] = static_cast<T>(settled[i]);
        bias[i] = static_cast<T>(settled[N + i]);
      }
    }
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
  template <int Threads>
  __device__ void finish_means(BlockTotals<T, 2, Threads>& totals, int turn, T count) {
    totals.add_up(turn, means);
    means[0] /= count;
    means[1] /= count;
  }

  // The gradient before the normalisation from the gradient after weight * normal + bias.
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

// Calls launch(layout, N, K, threads: std::integral_constant): packs of N elements if alignment allows, kept in
// registers if a group fits.
template <class T, int N, class Launch, class... Pointers>
void with_packs(const NormShape& s, const Launch& launch, Pointers... pointers) {
  using std::integral_constant;
  constexpr int most = kHeld<T> / N, small = kHeldOfSmall<T> / N, few = kHeldOfFew<T> / N;
  const int64_t size = s.channels / s.groups, cols = size / N;
  const auto fits = [&](int packs, int threads) { return cols <= threads && s.pixels <= packs * (threads / cols); };
  const auto with = [&](auto n, auto k, auto threads) { launch(Layout(s, n.value, threads.value), n, k, threads); };
  const integral_constant<int, N> n;
  const integral_constant<int, kThreads> all;
  if (!aligned<N>(size, pointers...)) {
    with(integral_constant<int, 1>(), integral_constant<int, 0>(), all);
  } else if (fits(few, kFewThreads)) {
    with(n, integral_constant<int, few>(), integral_constant<int, kFewThreads>());
  } else if (fits(small, kThreads)) {
    with(n, integral_constant<int, small>(), all);
  } else if (fits(most, kThreads)) {
    with(n, integral_constant<int, most>(), all);
  } else {
    with(n, integral_constant<int, 0>(), all);
  }
}

}  // namespace deqfast
