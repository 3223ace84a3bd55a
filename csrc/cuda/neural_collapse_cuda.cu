// class_means and within_class_scatter on a GPU: in double for double features, else in float, except for sums over
// more rows than a block's, which are in double. See ../cpu/neural_collapse.cpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <type_traits>

#include "../common/grouped.h"
#include "block.cuh"

namespace deqfast {
namespace {

template <class H>
using Wide = std::conditional_t<std::is_same_v<H, double>, double, float>;

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

// --- class means

constexpr int kMaxGridY = 65535;

// Sums of h - first row of the class over a chunk of rows and 32 * N columns; a warp takes every eighth row. Rows that
// belong to no class, which only a direct call of the op can have, are left out.
template <class H, int N>
__global__ void __launch_bounds__(kThreads, 4) class_sums_kernel(const Grouped<H> g, Wide<H>* partials) {
  using T = Wide<H>;
  __shared__ T sums[kWarps][N][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t chunk = blockIdx.x, end = min((chunk + 1) * kChunkRows, g.count);
  for (int64_t column = blockIdx.y * int64_t(32 * N); column < g.dim; column += gridDim.y * int64_t(32 * N)) {
    const int64_t d = column + lane * N;
    int64_t begin = chunk * kChunkRows;
    for (int64_t k = g.class_of(begin); k < g.classes && begin < end; ++k) {
      const int64_t stop = min(end, g.offsets[k + 1]);
      if (stop <= begin) continue;
      T sum[N] = {};
      if (d < g.dim) {
        const Pack<H, N> first = load<H, N>(g.row(g.offsets[k]) + d);
#pragma unroll 4
        for (int64_t i = begin + warp; i < stop; i += kWarps) {
          const Pack<H, N> h = load<H, N>(g.row(i) + d);
#pragma unroll
          for (int n = 0; n < N; ++n) sum[n] += widen(h.value[n]) - widen(first.value[n]);
        }
      }
#pragma unroll
      for (int n = 0; n < N; ++n) sums[warp][n][lane] = sum[n];
      __syncthreads();
      for (int v = threadIdx.x; v < 32 * N; v += kThreads) {
        T total = sums[0][v % N][v / N];
        for (int w = 1; w < kWarps; ++w) total += sums[w][v % N][v / N];
        if (column + v < g.dim) partials[(chunk + k) * g.dim + column + v] = total;
      }
      __syncthreads();
      begin = stop;
    }
  }
}

// local = sum / count + (first row of the class - first row of all); -shift for a class without rows.
template <class H>
__global__ void __launch_bounds__(kThreads, 4)
    class_means_kernel(const Grouped<H> g, const Wide<H>* partials, double* local, double* shift) {
  const int64_t k = blockIdx.x, begin = g.offsets[k], end = min(g.offsets[k + 1], g.count);
  for (int64_t d = blockIdx.y * int64_t(kThreads) + threadIdx.x; d < g.dim; d += gridDim.y * int64_t(kThreads)) {
    const double first_of_all = widen(g.row(0)[d]);
    double mean = -first_of_all;
    if (end > begin) {
      double sum = 0;
      for (int64_t chunk = begin / kChunkRows; chunk <= (end - 1) / kChunkRows; ++chunk) {
        sum += partials[(chunk + k) * g.dim + d];
      }
      mean = sum / static_cast<double>(end - begin) + (static_cast<double>(widen(g.row(begin)[d])) + mean);
    }
    local[k * g.dim + d] = mean;
    if (k == 0) shift[d] = first_of_all;
  }
}

// --- within-class scatter

// high + low = means to the last bits of two floats.
__global__ void __launch_bounds__(kThreads, 4) split_kernel(const double* means, int64_t size, float* high, float* low) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  high[i] = static_cast<float>(means[i]);
  low[i] = static_cast<float>(means[i] - high[i]);
}

// Directions (D, R) as T (D, padded), with zeros beyond the last.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    pad_kernel(const double* directions, int64_t count, int64_t padded, int64_t size, T* to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= size) return;
  const int64_t d = i / padded, j = i % padded;
  to[i] = j < count ? static_cast<T>(directions[d * count + j]) : T(0);
}

template <class H>
struct ScatterParams {
  Grouped<H> grouped;
  const Wide<H>* high;        // (K, D): class means
  const float* low;           // (K, D): rounding error of `high`; not for double
  const Wide<H>* directions;  // (D, padded)
  Wide<H>* partials;          // (blocks, padded): sums of squares
  int64_t padded;             // directions, a multiple of a block's
};

// The work of a block: the projections of `rows` rows on `columns` directions, `depth` features at a time. A thread has
// thread_rows x thread_columns of them, its rows `row_threads` apart and its columns in groups of `group`.
template <class T, int Rows, int Columns, int ThreadRows, int ThreadColumns>
struct Tile {
  static constexpr int rows = Rows, columns = Columns, thread_rows = ThreadRows, thread_columns = ThreadColumns;
  static constexpr int vector = 16 / sizeof(T), depth = 128 / sizeof(T);
  static constexpr int pitch = depth + vector;  // rows in shared memory start at different banks
  static constexpr int row_threads = Rows / ThreadRows, column_threads = Columns / ThreadColumns;
  static constexpr int group = ThreadColumns < vector ? ThreadColumns : vector;
  static_assert(row_threads * column_threads == kThreads && column_threads < 32);
};

template <class Tile, class T>
struct ScatterMemory {
  alignas(16) T deviations[Tile::rows][Tile::pitch];
  alignas(16) T directions[Tile::depth][Tile::columns];
  T squares[kWarps][Tile::columns];
  int64_t row[Tile::rows], mean[Tile::rows];  // where they begin; row < 0: none
};

// Loads of a thread from a tile of features and of directions: all are issued before the first one is waited for.
template <class Tile, int N, class H>
struct Prefetched {
  using T = Wide<H>;
  static constexpr int V = Tile::vector, row_packs = Tile::depth / N, column_packs = Tile::columns / V;
  static constexpr int kRows = Tile::rows * row_packs / kThreads;
  static constexpr int kDirections = (Tile::depth * column_packs + kThreads - 1) / kThreads;
  static_assert(Tile::rows * row_packs % kThreads == 0);

  Pack<H, N> h[kRows];
  Pack<T, V> directions[kDirections];

  __device__ static int row_of(int u) { return (u * kThreads + threadIdx.x) / row_packs; }
  __device__ static int feature_of(int u) { return (u * kThreads + threadIdx.x) % row_packs * N; }

  __device__ void fetch(const ScatterParams<H>& p, int64_t column, int64_t first_direction,
                        const ScatterMemory<Tile, T>& memory) {
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t row = memory.row[row_of(u)], d = column + feature_of(u);
      h[u] = load_if<H, N>(row >= 0 && d < p.grouped.dim, p.grouped.features + row + d);
    }
#pragma unroll
    for (int u = 0; u < kDirections; ++u) {
      const int v = u * kThreads + threadIdx.x, c = v / column_packs, j = v % column_packs * V;
      const bool inside = c < Tile::depth && column + c < p.grouped.dim;
      directions[u] = load_if<T, V>(inside, p.directions + (column + c) * p.padded + first_direction + j);
    }
  }

  // (h - high) - low, and the directions. Near its class mean h - high is exact.
  __device__ void enter(const ScatterParams<H>& p, int64_t column, ScatterMemory<Tile, T>& memory) const {
    constexpr bool split = std::is_same_v<T, float>;
    Pack<T, N> high[kRows], low[split ? kRows : 1];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      const int64_t at = memory.mean[row_of(u)] + column + feature_of(u);
      const bool inside = memory.row[row_of(u)] >= 0 && column + feature_of(u) < p.grouped.dim;
      high[u] = load_if<T, N>(inside, p.high + at);
      if constexpr (split) low[u] = load_if<T, N>(inside, p.low + at);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        T deviation = widen(h[u].value[n]) - high[u].value[n];
        if constexpr (split) deviation -= low[u].value[n];
        memory.deviations[row_of(u)][feature_of(u) + n] = deviation;
      }
    }
#pragma unroll
    for (int u = 0; u < kDirections; ++u) {
      const int v = u * kThreads + threadIdx.x;
      if (v < Tile::depth * column_packs) {
        store(&memory.directions[v / column_packs][v % column_packs * V], directions[u]);
      }
    }
  }
};

// Blocks per multiprocessor, as the registers allow. With two, 50,000 rows take two waves: 82 us on an H100 in
// bfloat16.
template <class Tile, int N>
constexpr int kResident = Tile::columns <= 16 && N > 1 ? 3 : 2;

template <class Tile, int N, class H>
__global__ void __launch_bounds__(kThreads, kResident<Tile, N>) scatter_kernel(const ScatterParams<H> p) {
  using T = Wide<H>;
  constexpr int V = Tile::vector, G = Tile::group;
  __shared__ ScatterMemory<Tile, T> memory;
  const int x = threadIdx.x % Tile::column_threads, y = threadIdx.x / Tile::column_threads;
  const int64_t first_direction = static_cast<int64_t>(blockIdx.y) * Tile::columns;
  for (int r = threadIdx.x; r < Tile::rows; r += kThreads) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * Tile::rows + r;
    memory.row[r] = i < p.grouped.count ? p.grouped.rows[i] * p.grouped.stride : -1;
    memory.mean[r] = i < p.grouped.count ? p.grouped.class_of(i) * p.grouped.dim : 0;
  }
  __syncthreads();
  Prefetched<Tile, N, H> next;
  next.fetch(p, 0, first_direction, memory);
  T sums[Tile::thread_rows][Tile::thread_columns] = {};
  for (int64_t column = 0; column < p.grouped.dim; column += Tile::depth) {
    next.enter(p, column, memory);
    __syncthreads();
    if (column + Tile::depth < p.grouped.dim) next.fetch(p, column + Tile::depth, first_direction, memory);
#pragma unroll
    for (int c = 0; c < Tile::depth; c += V) {
      Pack<T, V> deviation[Tile::thread_rows];
#pragma unroll
      for (int r = 0; r < Tile::thread_rows; ++r) {
        deviation[r] = load<T, V>(&memory.deviations[r * Tile::row_threads + y][c]);
      }
#pragma unroll
      for (int e = 0; e < V; ++e) {
#pragma unroll
        for (int j = 0; j < Tile::thread_columns; j += G) {
          const auto direction = load<T, G>(&memory.directions[c + e][j * Tile::column_threads + x * G]);
#pragma unroll
          for (int r = 0; r < Tile::thread_rows; ++r) {
#pragma unroll
            for (int g = 0; g < G; ++g) sums[r][j + g] += deviation[r].value[e] * direction.value[g];
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < Tile::thread_columns; ++j) {
    T square = 0;
#pragma unroll
    for (int r = 0; r < Tile::thread_rows; ++r) square += sums[r][j] * sums[r][j];
#pragma unroll
    for (int offset = Tile::column_threads; offset < 32; offset *= 2) {
      square += __shfl_xor_sync(0xffffffffu, square, offset);
    }
    const int at = j / G * G * Tile::column_threads + x * G + j % G;
    if (threadIdx.x % 32 < Tile::column_threads) memory.squares[threadIdx.x / 32][at] = square;
  }
  __syncthreads();
  for (int j = threadIdx.x; j < Tile::columns; j += kThreads) {
    T total = memory.squares[0][j];
    for (int w = 1; w < kWarps; ++w) total += memory.squares[w][j];
    p.partials[blockIdx.x * p.padded + first_direction + j] = total;
  }
}

// One block per direction.
template <class T>
__global__ void __launch_bounds__(kThreads, 4)
    add_kernel(const T* partials, int64_t blocks, int64_t padded, double* within) {
  __shared__ BlockSums<double, 1> sums;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < blocks; i += kThreads) sum += partials[i * padded + blockIdx.x];
  sums.clear(1);
  sums.add(0, sum);
  sums.finish(1);
  if (threadIdx.x == 0) within[blockIdx.x] = sums.totals[0];
}

// --- launches

// Call `body` with the number of elements that are loaded together, `N` or 1, as a constant.
template <int N, class H, class F, class... Pointers>
void dispatch_pack(const Grouped<H>& g, const F& body, Pointers... others) {
  if (aligned<N>(g.dim, g.features, others...) && g.stride % N == 0) {
    body(std::integral_constant<int, N>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

inline unsigned blocks_for(int64_t size, int64_t per_block) {
  return static_cast<unsigned>((size + per_block - 1) / per_block);
}

// Number of blocks in the second dimension of a grid. If the grid is too small, blocks continue with further columns.
inline unsigned columns_of(int64_t size, int64_t per_block) {
  return static_cast<unsigned>(std::min<int64_t>((size + per_block - 1) / per_block, kMaxGridY));
}

template <class T>
Tensor workspace_of(const Tensor& like, int64_t count) {
  return workspace(like, count * static_cast<int64_t>(sizeof(T)));
}

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class Tile, class H>
void launch_scatter(ScatterParams<H> p, const Tensor& like, const double* directions, int64_t count, double* within) {
  using T = Wide<H>;
  const int64_t dim = p.grouped.dim;
  const unsigned blocks = blocks_for(p.grouped.count, Tile::rows), panels = blocks_for(count, Tile::columns);
  const cudaStream_t stream = current_stream(like);
  p.padded = static_cast<int64_t>(panels) * Tile::columns;
  const Tensor padded = workspace_of<T>(like, dim * p.padded), partials = workspace_of<T>(like, blocks * p.padded);
  p.partials = data_of<T>(partials);
  const int64_t padded_size = dim * p.padded;
  const unsigned pad_blocks = blocks_for(padded_size, kThreads);
  T* padded_data = data_of<T>(padded);
  pad_kernel<T><<<pad_blocks, kThreads, 0, stream>>>(directions, count, p.padded, padded_size, padded_data);
  p.directions = padded_data;
  // More 16-bit features per load would take the registers of the third block.
  dispatch_pack<Tile::vector>(p.grouped, [&](auto n) {
    constexpr int N = decltype(n)::value;
    STD_TORCH_CHECK(panels <= kMaxGridY, "within_class_scatter: `directions` has too many columns: ", count);
    const dim3 grid(blocks, panels);
    scatter_kernel<Tile, N><<<grid, kThreads, 0, stream>>>(p);
  }, p.high);
  const unsigned outputs = static_cast<unsigned>(count);
  add_kernel<T><<<outputs, kThreads, 0, stream>>>(p.partials, blocks, p.padded, within);
  check_launch("within_class_scatter");
}

struct Kernels {
  using Half = __half;
  using BFloat16 = __nv_bfloat16;

  // Reading them would make the host wait.
  static void check_values(const char*, const Tensor&, const Tensor&, const Tensor&) {}

  template <class H>
  static void means(const Grouped<H>& g, double* local, double* shift, const Tensor& features) {
    const torch::stable::accelerator::DeviceGuard guard(features.get_device_index());
    const int64_t chunks = chunks_of(g.count);
    const Tensor memory = workspace_of<Wide<H>>(features, (chunks + g.classes) * g.dim);
    Wide<H>* partials = data_of<Wide<H>>(memory);
    const cudaStream_t stream = current_stream(features);
    dispatch_pack<16 / sizeof(H)>(g, [&](auto n) {
      constexpr int N = decltype(n)::value;
      const dim3 grid(static_cast<unsigned>(chunks), columns_of(g.dim, 32 * N));
      class_sums_kernel<H, N><<<grid, kThreads, 0, stream>>>(g, partials);
    });
    const dim3 grid(static_cast<unsigned>(g.classes), columns_of(g.dim, kThreads));
    class_means_kernel<H><<<grid, kThreads, 0, stream>>>(g, partials, local, shift);
    check_launch("class_means");
  }

  template <class H>
  static void scatter(const Grouped<H>& g, const double* means, const double* directions, int64_t count,
                      double* within, const Tensor& features) {
    using T = Wide<H>;
    constexpr bool split = std::is_same_v<T, float>;
    const torch::stable::accelerator::DeviceGuard guard(features.get_device_index());
    const int64_t mean_size = g.classes * g.dim;
    ScatterParams<H> p{g, nullptr, nullptr, nullptr, nullptr, 0};
    const Tensor high = workspace_of<float>(features, split ? mean_size : 0);
    const Tensor low = workspace_of<float>(features, split ? mean_size : 0);
    if constexpr (split) {
      const unsigned blocks = blocks_for(mean_size, kThreads);
      const cudaStream_t stream = current_stream(features);
      float *high_data = data_of<float>(high), *low_data = data_of<float>(low);
      split_kernel<<<blocks, kThreads, 0, stream>>>(means, mean_size, high_data, low_data);
      p.high = high_data;
      p.low = low_data;
    } else {
      p.high = means;
    }
    // Twice as many doubles would not stay in registers.
    using Widest = Tile<T, 64, split ? 128 : 64, 4, split ? 8 : 4>;
    if (count <= 16) {
      launch_scatter<Tile<T, 128, 16, 4, 2>>(p, features, directions, count, within);
    } else if (count <= 64) {
      launch_scatter<Tile<T, 64, 64, 4, 4>>(p, features, directions, count, within);
    } else {
      launch_scatter<Widest>(p, features, directions, count, within);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) {
  m.impl("class_means", TORCH_BOX(&class_means<Kernels>));
  m.impl("within_class_scatter", TORCH_BOX(&within_class_scatter<Kernels>));
}

}  // namespace deqfast
