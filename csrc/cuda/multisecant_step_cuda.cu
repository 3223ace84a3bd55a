// multisecant_step on a GPU: z <- z + alpha (beta g - DF gamma), N gamma = L^T g. One launch with a block per sample
// does both sweeps and the small solve between them. If samples are few and long, two launches with several blocks per
// sample do, and each block does the small solve by itself. See ../cpu/multisecant_step.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <type_traits>

#include "../common/halves.h"
#include "block.cuh"
#include "convert.cuh"
#include "window.cuh"

namespace deqfast {
namespace {

// What the kernels are compiled for:
//   T, H      types of the state and of the history
//   kMaxDots  most pairs whose dots with the new step sweep 2 takes; 0 for methods that need none
//   kWithLs   whether sweep 1 takes L^T s, for Anderson I
//   kVector   elements of a load: 16 bytes, or one element if rows do not start on 16 bytes

// The sums of sweep 1: four squares, then L^T g, L^T y and, for Anderson I, L^T s, of n pairs each.
enum Sum { kResSq, kFSq, kSSq, kYSq, kDots };
constexpr int kMaxSums = kDots + 3 * kMaxGpuHistory;
constexpr int kLeft = kMaxSums + 2;  // per block of a shared sample: the sums, and the norms of the rule

template <class T, class H>
__device__ Norms<T> norms_of_columns(const MultisecantParams<T, H>& p, int64_t row, const Columns& columns,
                                     const T* totals) {
  const BlockVectors<T> vectors{p.z + row * p.dim, p.fz + row * p.dim, columns.begin, columns.end};
  return norms_of(p.rule, {totals[kResSq], totals[kFSq]}, vectors);
}

template <class T, class H>
__device__ int sums_of(const MultisecantParams<T, H>& p, const Window& window) {
  return kDots + (p.method == kAndersonI ? 3 : 2) * window.size();
}

// A tile of g, y and s in the registers of the block: kPacks loads of kVector elements per thread.
template <class T, int kVector, int kPacks>
struct Tile {
  T g[kPacks][kVector], y[kPacks][kVector], s[kPacks][kVector];
};

template <class T, int kVector>
constexpr int kLoads = kVector == 1 ? 32 / sizeof(T) : 64 / sizeof(T) / kVector;

// Form g on a tile, and complete the newest pair there. All loads are issued before the first one is waited for.
template <class T, class H, int kVector, int kPacks>
__device__ void load_tile(const MultisecantParams<T, H>& p, const Window& window, int64_t row, int64_t begin,
                          int64_t end, Tile<T, kVector, kPacks>& tile, T (&squares)[kDots]) {
  const bool with_pair = window.size() > 0, store_y = left_is_y(p.method);
  const int64_t newest = (row * p.history + (with_pair ? window.newest() : 0)) * p.dim;
  Pack<T, kVector> f[kPacks], z[kPacks], before[kPacks];
  Pack<H, kVector> kept[kPacks];
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int64_t d = begin + (c * blockDim.x + threadIdx.x) * kVector, at = row * p.dim + d;
    f[c] = load_if<T, kVector>(d < end, p.fz + at);
    z[c] = load_if<T, kVector>(d < end, p.z + at);
    before[c] = load_if<T, kVector>(d < end && with_pair, p.f_prev + at);
    kept[c] = load_if<H, kVector>(d < end && with_pair, p.left + newest + d);
  }
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int64_t d = begin + (c * blockDim.x + threadIdx.x) * kVector;
    Pack<H, kVector> df;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const T g = f[c].value[i] - z[c].value[i], delta = with_pair ? f[c].value[i] - before[c].value[i] : T(0);
      const T s = convert<T>(kept[c].value[i]);
      df.value[i] = convert<H>(p.beta * delta + (T(1) - p.beta) * s);
      T y = delta - s;
      if (store_y) {
        kept[c].value[i] = convert<H>(y);
        y = convert<T>(kept[c].value[i]);
      }
      tile.g[c][i] = g;
      tile.y[c][i] = y;
      tile.s[c][i] = s;
      squares[kResSq] += g * g;
      squares[kFSq] += f[c].value[i] * f[c].value[i];
      squares[kSSq] += s * s;
      squares[kYSq] += y * y;
    }
    if (d >= end || !with_pair) continue;
    store_global(p.df + newest + d, df);
    if (store_y) store_global(p.left + newest + d, kept[c]);
  }
}

// Sweep 1 over the columns [begin, end): the sums over them, complete for all threads on return.
template <class T, class H, bool kWithLs, int kVector>
__device__ void sweep_left(const MultisecantParams<T, H>& p, const Window& window, int64_t row, const Columns& columns,
                           BlockSums<T, kMaxSums>& sums) {
  constexpr int kPacks = kLoads<T, kVector>;
  constexpr int kRows = kVector == 1 ? 2 : 8 / kPacks;  // rows of the history whose loads are concurrent
  const H* left = p.left + row * p.history * p.dim;
  T squares[kDots] = {};
  sums.clear(sums_of(p, window));
  for (int64_t begin = columns.begin; begin < columns.end; begin += blockDim.x * kVector * kPacks) {
    Tile<T, kVector, kPacks> tile;
    load_tile(p, window, row, begin, columns.end, tile, squares);
    const int n = window.size();
    for (int j = 0; j < n; j += kRows) {
      Pack<H, kVector> pairs[kRows][kPacks];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const H* from = left + min(j + r, n - 1) * p.dim;  // loads a row twice, with unused sums, rather than branch
#pragma unroll
        for (int c = 0; c < kPacks; ++c) {
          const int64_t d = begin + (c * blockDim.x + threadIdx.x) * kVector;
          pairs[r][c] = load_if<H, kVector>(d < columns.end, from + d);
        }
      }
      T lg[kRows] = {}, ly[kRows] = {}, ls[kRows] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kPacks; ++c) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const T l = convert<T>(pairs[r][c].value[i]);
            lg[r] += l * tile.g[c][i];
            ly[r] += l * tile.y[c][i];
            if constexpr (kWithLs) ls[r] += l * tile.s[c][i];
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (j + r >= n) break;
        sums.add(kDots + j + r, lg[r]);
        sums.add(kDots + n + j + r, ly[r]);
        if constexpr (kWithLs) sums.add(kDots + 2 * n + j + r, ls[r]);
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kDots; ++v) sums.add(v, squares[v]);
  sums.finish(sums_of(p, window));
}

// Sweep 2: keep the iterate if it is the best, take the step, store it as the next pair's, and add up its dots with DF
// for the methods that need them. gamma is in shared memory.
template <class T, class H, int kMaxDots, int kVector>
__device__ void sweep_right(const MultisecantParams<T, H>& p, const Window& window, int64_t row, const Columns& columns,
                            bool improved, const T* gamma, T (&dots)[kMaxDots + 1]) {
  constexpr int kRows = 8;  // rows of the history whose loads are concurrent
  const H* df = p.df + row * p.history * p.dim;
  T* z = p.z + row * p.dim;
  for (int64_t d = columns.begin + threadIdx.x * kVector; d < columns.end; d += blockDim.x * kVector) {
    Pack<H, kVector> pairs[kRows];
    const auto load_rows = [&](int first) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        pairs[r] = load_if<H, kVector>(first + r < window.size(), df + (first + r) * p.dim + d);
      }
    };
    const auto f = load<T, kVector>(p.fz + row * p.dim + d), old = load<T, kVector>(z + d);
    load_rows(0);  // before the store, which waits for `old`
    if (improved) store_global(p.best + row * p.dim + d, old);
    T x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = p.beta * (f.value[i] - old.value[i]);
    for (int first = 0; first < window.size(); first += kRows) {
      if (first > 0) load_rows(first);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const T weight = first + r < window.size() ? gamma[first + r] : T(0);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] -= weight * convert<T>(pairs[r].value[i]);
      }
    }
    Pack<T, kVector> now;
    Pack<H, kVector> taken;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      now.value[i] = old.value[i] + convert<T>(convert<H>(p.alpha * x[i]));
      taken.value[i] = convert<H>(now.value[i] - old.value[i]);
    }
    store_global(z + d, now);
    store_global(p.left + (row * p.history + window.next()) * p.dim + d, taken);
    // A window of one round is still in registers. Longer ones are read again, now from the cache.
#pragma unroll
    for (int first = 0; first < kMaxDots; first += kRows) {
      if (first >= window.size()) break;
      if constexpr (kMaxDots > kRows) load_rows(first);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) dots[first + r] += convert<T>(pairs[r].value[i]) * convert<T>(taken.value[i]);
      }
    }
  }
}

// Shared memory of the small solve.
template <class T>
struct SmallSolve {
  T gram[(kMaxGpuHistory | 1) * (kMaxGpuHistory + 2)];
  T t[kMaxGpuHistory];
  T gamma[kMaxGpuHistory];

  // Rows are an odd distance apart, so that lanes that read a row each use different banks.
  __device__ Gram<T> matrix(int history) { return {gram, history | 1}; }

  // Begin to copy the window matrix of the sample, (history + 2, history); `wait_for_copies` completes it.
  __device__ void fetch(const T* whole, int history) {
    const Gram<T> to = matrix(history);
    for (int i = threadIdx.x; i < (history + 2) * history; i += blockDim.x) {
      copy_to_shared(&to.at(i / history, i % history), whole + i);
    }
  }
};

// Enter the newest pair in the fetched window matrix, and solve for gamma, by the first warp. The first of the sample's
// blocks writes the pair's row, column and squares back. Gamma is complete for all threads on return. `entered`: the
// method by which the pair is entered.
template <class T, class H>
__device__ void solve_sample(const MultisecantParams<T, H>& p, const Window& window, int64_t row, const T* old_row,
                             const T* sums, SmallSolve<T>& small, int64_t entered) {
  const int m = p.history, n = window.size(), newest = window.newest(), j = threadIdx.x;
  if (threadIdx.x < 32) {
    const Gram<T> gram = small.matrix(m);
    if (j < n) small.t[j] = sums[kDots + j];
    enter_pair(gram, old_row ? old_row : &gram.at(newest, 0), sums + kDots + n, sums + kDots + 2 * n, sums[kSSq],
               sums[kYSq], window, entered, p.beta, WarpLanes{j});
    T* whole = p.gram + row * (m + 2) * m;
    if (blockIdx.y == 0 && j < n) {
      whole[newest * m + j] = gram.at(newest, j);
      whole[j * m + newest] = gram.at(j, newest);
    }
    if (blockIdx.y == 0 && j < 2) whole[(m + j) * m + newest] = gram.at(m + j, newest);
    solve_window<false, T>({gram.entries, gram.stride}, small.t, small.gamma, window, p.method, p.ridge);
  }
  __syncthreads();
}

// Add up dots over the block; `sums` holds the n totals on return.
template <class T, int kMaxDots>
__device__ void sum_dots(const T (&dots)[kMaxDots + 1], int n, BlockSums<T, kMaxSums>& sums) {
  sums.clear(n);
#pragma unroll
  for (int j = 0; j < kMaxDots; ++j) {
    if (j < n) sums.add(j, dots[j]);
  }
  sums.finish(n);
}

// The most threads for a block with a whole sample. With 128 registers each, 512 of them fill a multiprocessor; sums of
// many rows in bfloat16 or float64, and L^T s in float64, take more registers.
template <class T, class H, int kMaxDots, bool kWithLs>
constexpr int kMost = sizeof(T) + sizeof(H) == 8 || (kMaxDots <= 8 && !(kWithLs && sizeof(T) == 8)) ? kMostThreads
                                                                                                 : kThreads;

template <class T, class H, int kMaxDots, bool kWithLs, int kVector>
__global__ void __launch_bounds__(kMost<T, H, kMaxDots, kWithLs>, 1) multisecant_kernel(const MultisecantParams<T, H> p) {
  __shared__ BlockSums<T, kMaxSums> sums;
  __shared__ SmallSolve<T> small;
  __shared__ Records<T> records;
  __shared__ Window window;
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  if (threadIdx.x == 0) {
    window = p.window(p.monitor.iterations[row]);
    records.fetch(p.monitor, row);
  }
  __syncthreads();
  // Read from shared memory where it is needed: registers are few.
  if (window.size() > 0) small.fetch(p.gram + row * (p.history + 2) * p.history, p.history);
  const Columns columns(p.dim);
  sweep_left<T, H, kWithLs, kVector>(p, window, row, columns, sums);
  wait_for_copies();
  const Norms<T> norms = norms_of_columns(p, row, columns, sums.totals);
  const Verdict verdict = judge_sample(records, p.monitor, row, norms, p.rule);
  if (!verdict.advance) {
    carry_out<kVector>(verdict, p.z + row * p.dim, p.best + row * p.dim, columns.begin, columns.end);
    return;
  }
  if (window.size() > 0) solve_sample<T, H>(p, window, row, nullptr, sums.totals, small, p.method);
  T dots[kMaxDots + 1] = {};
  sweep_right<T, H, kMaxDots, kVector>(p, window, row, columns, verdict.improved, small.gamma, dots);
  const int n = window.size();
  if (kMaxDots == 0 || n == 0) return;
  sum_dots<T, kMaxDots>(dots, n, sums);
  T* gram_row = p.gram + (row * (p.history + 2) + window.next()) * p.history;
  if (threadIdx.x < n) gram_row[threadIdx.x] = sums.totals[threadIdx.x];
}

// Data that the blocks of a sample exchange.
template <class T>
struct Exchange {
  Snapshot<T>* snapshots;  // (B,)
  T* old_rows;             // (B, 32): the row of the window matrix that the newest pair replaces
  T* sums;                 // (B, parts, kLeft)
  T* dots;                 // (B, blocks of the second launch, 32)
  unsigned parts;          // blocks per sample of the first launch
};

// Several blocks per sample: the sums of sweep 1, ...
template <class T, class H, bool kWithLs, int kVector>
__global__ void __launch_bounds__(kThreads, 2)
    multisecant_left_kernel(const MultisecantParams<T, H> p, const Exchange<T> exchange) {
  __shared__ BlockSums<T, kMaxSums> sums;
  __shared__ Records<T> records;
  __shared__ Window window;
  const int64_t row = blockIdx.x;
  const bool keeps = blockIdx.y == 0 && threadIdx.x == 0, running = p.monitor.status[row] == kRunning;
  if (keeps) exchange.snapshots[row].running = running;
  if (!running) return;
  if (threadIdx.x == 0) window = p.window(p.monitor.iterations[row]);
  if (keeps) records.fetch(p.monitor, row);
  __syncthreads();
  const int n = window.size(), m = p.history;
  if (kWithLs && blockIdx.y == 0 && threadIdx.x < n) {
    const T* gram_row = p.gram + (row * (m + 2) + window.newest()) * m;
    exchange.old_rows[row * kMaxGpuHistory + threadIdx.x] = gram_row[threadIdx.x];
  }
  const Columns columns(p.dim);
  sweep_left<T, H, kWithLs, kVector>(p, window, row, columns, sums);
  const Norms<T> norms = norms_of_columns(p, row, columns, sums.totals);
  T* to = exchange.sums + (row * gridDim.y + blockIdx.y) * kLeft;
  if (threadIdx.x == 0) {
    to[kMaxSums] = norms.res;
    to[kMaxSums + 1] = norms.f;
  }
  for (int v = threadIdx.x; v < sums_of(p, window); v += blockDim.x) to[v] = sums.totals[v];
  if (keeps) {
    wait_for_copies();
    exchange.snapshots[row].records = records;
    exchange.snapshots[row].arrived = 0;
  }
}

// ... and the step. The last block of a sample to finish adds up the dots, in the order of the blocks.
template <class T, class H, int kMaxDots, int kVector>
__global__ void __launch_bounds__(kThreads, kMaxDots <= 8 ? 2 : 1)
    multisecant_right_kernel(const MultisecantParams<T, H> p, const Exchange<T> exchange) {
  __shared__ BlockSums<T, kMaxSums> sums;
  __shared__ SmallSolve<T> small;
  __shared__ Records<T> records;
  __shared__ Window window;
  __shared__ bool last_to_end;
  const int64_t row = blockIdx.x;
  if (!exchange.snapshots[row].running) return;
  if (threadIdx.x == 0) {
    window = p.window(exchange.snapshots[row].records.iterations);
    records.fetch(exchange.snapshots[row].records);
  }
  __syncthreads();
  const int n = window.size(), m = p.history;
  if (n > 0) small.fetch(p.gram + row * (m + 2) * m, m);
  const T* partials = exchange.sums + row * exchange.parts * kLeft;
  for (int v = threadIdx.x; v < sums_of(p, window); v += blockDim.x) {
    T total = 0;
    for (unsigned part = 0; part < exchange.parts; ++part) {
      total += partials[part * kLeft + v];
    }
    sums.totals[v] = total;
  }
  wait_for_copies();
  __syncthreads();
  const Norms<T> norms = norms_of(p.rule, {sums.totals[kResSq], sums.totals[kFSq]},
                                  PartNorms<T>{partials + kMaxSums, kLeft, exchange.parts});
  const Verdict verdict = judge_sample(records, p.monitor, row, norms, p.rule);
  const Columns columns(p.dim);
  if (!verdict.advance) {
    carry_out<kVector>(verdict, p.z + row * p.dim, p.best + row * p.dim, columns.begin, columns.end);
    return;
  }
  if (n) solve_sample<T, H>(p, window, row, exchange.old_rows + row * kMaxGpuHistory, sums.totals, small, p.method);
  T dots[kMaxDots + 1] = {};
  sweep_right<T, H, kMaxDots, kVector>(p, window, row, columns, verdict.improved, small.gamma, dots);
  if (kMaxDots == 0 || n == 0) return;
  sum_dots<T, kMaxDots>(dots, n, sums);
  T* all = exchange.dots + row * gridDim.y * kMaxGpuHistory;
  if (threadIdx.x < n) all[blockIdx.y * kMaxGpuHistory + threadIdx.x] = sums.totals[threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last_to_end = atomicAdd(&exchange.snapshots[row].arrived, 1u) == gridDim.y - 1;
  __syncthreads();
  if (!last_to_end || threadIdx.x >= n) return;
  __threadfence();
  T total = 0;
  for (unsigned part = 0; part < gridDim.y; ++part) total += all[part * kMaxGpuHistory + threadIdx.x];
  p.gram[(row * (m + 2) + window.next()) * m + threadIdx.x] = total;
}

template <class T, class H, int kMaxDots, bool kWithLs, int kVector>
void launch_kernels(const MultisecantParams<T, H>& params, const Tensor& z) {
  const cudaStream_t stream = current_stream(z);
  const unsigned batch = grid_of(params.monitor.batch, "multisecant_step");
  const auto blocks_of = [&](auto kernel) {
    return blocks_per_sample(kernel, batch, params.dim, z.get_device_index());
  };
  const unsigned parts = blocks_of(&multisecant_left_kernel<T, H, kWithLs, kVector>);
  if (parts == 1) {
    // One block of 256 threads on a multiprocessor has half as many loads under way as two blocks. A long sample
    // without a second block there therefore has twice the threads.
    const bool alone = batch <= processors_of(z.get_device_index()) && params.dim >= kLong;
    const int threads = alone ? kMost<T, H, kMaxDots, kWithLs> : kThreads;
    multisecant_kernel<T, H, kMaxDots, kWithLs, kVector><<<batch, threads, 0, stream>>>(params);
  } else {
    const unsigned blocks = blocks_of(&multisecant_right_kernel<T, H, kMaxDots, kVector>);
    const int64_t samples = batch, snapshots = samples * sizeof(Snapshot<T>);
    const int64_t numbers = samples * (kMaxGpuHistory + parts * kLeft + blocks * kMaxGpuHistory);
    const Tensor memory = workspace(z, snapshots + numbers * sizeof(T));
    char* at = static_cast<char*>(memory.mutable_data_ptr());
    T* rows = reinterpret_cast<T*>(at + snapshots);
    T* sums = rows + samples * kMaxGpuHistory;
    T* dots = sums + samples * parts * kLeft;
    const Exchange<T> exchange{reinterpret_cast<Snapshot<T>*>(at), rows, sums, dots, parts};
    multisecant_left_kernel<T, H, kWithLs, kVector><<<dim3(batch, parts), kThreads, 0, stream>>>(params, exchange);
    multisecant_right_kernel<T, H, kMaxDots, kVector><<<dim3(batch, blocks), kThreads, 0, stream>>>(params, exchange);
  }
  check_launch("multisecant_step");
}

// The registers for the dots of sweep 2 are sized by the window at this iteration, or by the history if only the device
// knows the iteration. Rows that do not start on 16 bytes are slow anyway, and share one kernel.
template <class T, class H, bool kWithLs, int kVector>
void launch_with_dots(const MultisecantParams<T, H>& params, const Tensor& z) {
  const int most = params.rule.k < 0 ? params.history : params.window(0).size();
  if (kVector == 1 || most > 16) {
    launch_kernels<T, H, kMaxGpuHistory, kWithLs, kVector>(params, z);
  } else if (most > 8) {
    launch_kernels<T, H, kVector == 1 ? kMaxGpuHistory : 16, kWithLs, kVector>(params, z);
  } else {
    launch_kernels<T, H, kVector == 1 ? kMaxGpuHistory : 8, kWithLs, kVector>(params, z);
  }
}

template <class T, class H, int kVector>
void launch(const MultisecantParams<T, H>& params, const Tensor& z) {
  if (left_is_y(params.method)) {
    launch_kernels<T, H, 0, false, kVector>(params, z);
  } else if (params.method == kAndersonI) {
    launch_with_dots<T, H, true, kVector>(params, z);
  } else {
    launch_with_dots<T, H, false, kVector>(params, z);
  }
}

// Rows that are parts of samples: the sums of a block's columns, ...
template <class T, class H, bool kWithLs, int kVector>
__global__ void __launch_bounds__(kThreads, 2)
    multisecant_row_sums_kernel(const MultisecantParams<T, H> p, T* partials) {
  __shared__ BlockSums<T, kMaxSums> sums;
  __shared__ Window window;
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  if (threadIdx.x == 0) window = Window(p.rule.k, p.history, p.history);
  __syncthreads();
  sweep_left<T, H, kWithLs, kVector>(p, window, row, Columns(p.dim), sums);
  T* to = partials + (row * gridDim.y + blockIdx.y) * kMaxSums;
  for (int v = threadIdx.x; v < sums_of(p, window); v += blockDim.x) to[v] = sums.totals[v];
}

// ... those of a row, as the op returns them, by a thread for each pair, ...
template <class T, class H>
__global__ void multisecant_row_join_kernel(const MultisecantParams<T, H> p, const T* partials, unsigned parts,
                                            const RowSums<T> own) {
  const int64_t row = blockIdx.x;
  if (p.monitor.status[row] != kRunning) return;
  const Window window(p.rule.k, p.history, p.history);
  const int n = window.size(), j = threadIdx.x, m = p.history;
  const SumsOfPairs at(n, p.method);
  T* to = own.sums + row * own.width;
  const auto total = [&](int v) {
    T sum = 0;
    for (unsigned part = 0; part < parts; ++part) sum += partials[(row * parts + part) * kMaxSums + v];
    return sum;
  };
  if (j < 2) to[j] = total(j == 0 ? kResSq : kFSq);
  if (j < 2) to[at.squares + j] = total(j == 0 && !left_is_y(p.method) ? kSSq : kYSq);
  if (j >= n) return;
  to[at.g + j] = total(kDots + j);
  to[at.y + j] = total(kDots + n + j);
  if (left_is_y(p.method)) return;
  const T dot = p.gram[(row * (m + 2) + window.newest()) * m + j];  // of the newest step with DF, over this part
  to[at.row + j] = p.method == kAndersonI ? (dot - total(kDots + 2 * n + j)) / p.beta : dot;
}

// ... the step, by the sums of all parts and a verdict; the dots of the new step with DF, by block, ...
template <class T, class H, int kMaxDots, int kVector>
__global__ void __launch_bounds__(kThreads, kMaxDots == 0 ? 2 : 1)
    multisecant_row_step_kernel(const MultisecantParams<T, H> p, const RowSums<T> own, T* dots_of_blocks) {
  __shared__ BlockSums<T, kMaxSums> sums;
  __shared__ SmallSolve<T> small;
  __shared__ Window window;
  const int64_t row = blockIdx.x;
  const Verdict verdict = verdict_of(own.verdict[row]);
  const Columns columns(p.dim);
  if (!verdict.advance) {
    carry_out<kVector>(verdict, p.z + row * p.dim, p.best + row * p.dim, columns.begin, columns.end);
    return;
  }
  if (threadIdx.x == 0) window = Window(p.rule.k, p.history, p.history);
  __syncthreads();
  const int n = window.size(), m = p.history, j = threadIdx.x;
  if (n > 0) {
    const SumsOfPairs at(n, p.method);
    const T* from = own.sums + row * own.width;
    const bool y = left_is_y(p.method);
    small.fetch(p.gram + row * (m + 2) * m, m);
    if (j < n) {
      sums.totals[kDots + j] = from[at.g + j];
      sums.totals[kDots + n + j] = from[at.y + j];
    }
    if (j < 2) sums.totals[j == 0 ? kSSq : kYSq] = from[at.squares + j];
    wait_for_copies();
    __syncthreads();
    if (j < n && !y) small.matrix(m).at(window.newest(), j) = from[at.row + j];
    __syncthreads();
    solve_sample<T, H>(p, window, row, nullptr, sums.totals, small, y ? p.method : int64_t(kBroydenGood));
  }
  T dots[kMaxDots + 1] = {};
  sweep_right<T, H, kMaxDots, kVector>(p, window, row, columns, verdict.improved, small.gamma, dots);
  if (kMaxDots == 0 || n == 0) return;
  sum_dots<T, kMaxDots>(dots, n, sums);
  if (j < n) dots_of_blocks[(row * gridDim.y + blockIdx.y) * kMaxGpuHistory + j] = sums.totals[j];
}

// ... and of a row.
template <class T, class H>
__global__ void multisecant_row_dots_kernel(const MultisecantParams<T, H> p, const RowSums<T> own,
                                            const T* dots_of_blocks, unsigned blocks) {
  const int64_t row = blockIdx.x;
  const Window window(p.rule.k, p.history, p.history);
  const int j = threadIdx.x, m = p.history;
  if (!verdict_of(own.verdict[row]).advance || j >= window.size()) return;
  T total = 0;
  for (unsigned block = 0; block < blocks; ++block) total += dots_of_blocks[(row * blocks + block) * kMaxGpuHistory + j];
  p.gram[(row * (m + 2) + window.next()) * m + j] = total;
}

template <class T, class H, bool kWithLs, int kVector>
void launch_sums(const MultisecantParams<T, H>& params, const RowSums<T>& own, const Tensor& z) {
  const unsigned batch = grid_of(params.monitor.batch, "multisecant_sums");
  const auto kernel = &multisecant_row_sums_kernel<T, H, kWithLs, kVector>;
  const unsigned parts = blocks_per_sample(kernel, batch, params.dim, z.get_device_index());
  const cudaStream_t stream = current_stream(z);
  const Tensor memory = workspace(z, int64_t(batch) * parts * kMaxSums * sizeof(T));
  T* partials = static_cast<T*>(memory.mutable_data_ptr());
  multisecant_row_sums_kernel<T, H, kWithLs, kVector><<<dim3(batch, parts), kThreads, 0, stream>>>(params, partials);
  multisecant_row_join_kernel<T, H><<<batch, kMaxGpuHistory, 0, stream>>>(params, partials, parts, own);
  check_launch("multisecant_sums");
}

template <class T, class H, int kMaxDots, int kVector>
void launch_step(const MultisecantParams<T, H>& params, const RowSums<T>& own, const Tensor& z) {
  const unsigned batch = grid_of(params.monitor.batch, "multisecant_apply");
  const auto kernel = &multisecant_row_step_kernel<T, H, kMaxDots, kVector>;
  const unsigned blocks = blocks_per_sample(kernel, batch, params.dim, z.get_device_index());
  const cudaStream_t stream = current_stream(z);
  const Tensor memory = workspace(z, int64_t(batch) * blocks * kMaxGpuHistory * sizeof(T));
  T* dots = static_cast<T*>(memory.mutable_data_ptr());
  multisecant_row_step_kernel<T, H, kMaxDots, kVector><<<dim3(batch, blocks), kThreads, 0, stream>>>(params, own, dots);
  if (kMaxDots > 0 && params.rule.k > 0) {
    multisecant_row_dots_kernel<T, H><<<batch, kMaxGpuHistory, 0, stream>>>(params, own, dots, blocks);
  }
  check_launch("multisecant_apply");
}

// out = alpha (beta v - L gamma), N^T gamma = DF^T v. Several blocks share a long sample: a first launch leaves DF^T v of
// their columns; each block of a second adds these up, solves, and has its own columns. Their number depends only on
// the sample's length, so that its bits do not depend on the batch.
constexpr int64_t kShare = 1024;  // columns of a block; each is read twice for 2 n elements in all
constexpr int kTransposedRows = 8;  // rows of the history whose loads are concurrent

template <class T, class H, int kVector>
__device__ void load_window(const H* history, const Window& window, int first, int64_t dim, int64_t d,
                            Pack<H, kVector> (&pairs)[kTransposedRows]) {
#pragma unroll
  for (int r = 0; r < kTransposedRows; ++r) {
    pairs[r] = load_if<H, kVector>(first + r < window.size(), history + window.slot(first + r) * dim + d);
  }
}

// DF^T v over the columns, by slot; complete for all threads on return.
template <class T, class H, int kVector>
__device__ void transposed_dots(const TransposedParams<T, H>& p, int64_t row, const Columns& columns,
                                BlockSums<T, kMaxGpuHistory>& sums) {
  const H* df = p.df + row * p.history * p.dim;
  const T* v = p.v + row * p.dim;
  const Window window = p.window(row);
  const int n = window.size();
  sums.clear(p.history);
  for (int first = 0; first < n; first += kTransposedRows) {
    T dots[kTransposedRows] = {};
    for (int64_t d = columns.begin + threadIdx.x * kVector; d < columns.end; d += kThreads * kVector) {
      Pack<H, kVector> pairs[kTransposedRows];
      load_window<T, H, kVector>(df, window, first, p.dim, d, pairs);
      const auto x = load<T, kVector>(v + d);
#pragma unroll
      for (int r = 0; r < kTransposedRows; ++r) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) dots[r] += convert<T>(pairs[r].value[i]) * x.value[i];
      }
    }
#pragma unroll
    for (int r = 0; r < kTransposedRows; ++r) {
      if (first + r < n) sums.add(window.slot(first + r), dots[r]);
    }
  }
  sums.finish(p.history);
}

template <class T, class H, int kVector>
__global__ void __launch_bounds__(kThreads, 2) multisecant_dots_kernel(const TransposedParams<T, H> p, T* parts) {
  __shared__ BlockSums<T, kMaxGpuHistory> sums;
  const int64_t row = blockIdx.x;
  transposed_dots<T, H, kVector>(p, row, Columns(p.dim), sums);
  T* to = parts + (row * gridDim.y + blockIdx.y) * kMaxGpuHistory;
  if (threadIdx.x < p.history) to[threadIdx.x] = sums.totals[threadIdx.x];
}

// parts (B, blocks, 32): what the first launch left, or null if there was none.
template <class T, class H, int kVector>
__global__ void __launch_bounds__(kThreads, 2)
    multisecant_transposed_kernel(const TransposedParams<T, H> p, const T* parts) {
  __shared__ BlockSums<T, kMaxGpuHistory> sums;
  __shared__ SmallSolve<T> small;
  const int64_t row = blockIdx.x;
  const Window window = p.window(row);
  const int n = window.size(), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Columns columns(p.dim);
  if (n) small.fetch(p.gram + row * (p.history + 2) * p.history, p.history);
  if (parts == nullptr) {
    transposed_dots<T, H, kVector>(p, row, columns, sums);
  } else {
    T total = 0;  // each warp adds every eighth part; its lanes have a slot each
    for (unsigned part = warp; part < gridDim.y; part += kWarps) {
      if (lane < p.history) total += parts[(row * gridDim.y + part) * kMaxGpuHistory + lane];
    }
    sums.slots[warp][lane] = total;
    sums.finish(p.history);
  }
  wait_for_copies();
  __syncthreads();
  if (n && threadIdx.x < 32) {
    const Gram<T> gram = small.matrix(p.history);
    solve_window<true, T>({gram.entries, gram.stride}, sums.totals, small.gamma, window, p.method, p.ridge);
  }
  __syncthreads();
  const H* left = p.left + row * p.history * p.dim;
  for (int64_t d = columns.begin + threadIdx.x * kVector; d < columns.end; d += kThreads * kVector) {
    auto x = load<T, kVector>(p.v + row * p.dim + d);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.value[i] *= p.beta;
    for (int first = 0; first < n; first += kTransposedRows) {
      Pack<H, kVector> pairs[kTransposedRows];
      load_window<T, H, kVector>(left, window, first, p.dim, d, pairs);
#pragma unroll
      for (int r = 0; r < kTransposedRows; ++r) {
        if (first + r >= n) break;
        const T weight = small.gamma[window.slot(first + r)];
#pragma unroll
        for (int i = 0; i < kVector; ++i) x.value[i] -= weight * convert<T>(pairs[r].value[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) x.value[i] *= p.alpha;
    store_global(p.out + row * p.dim + d, x);
  }
}

template <class T, class H, int kVector>
void launch_transposed(const TransposedParams<T, H>& params, const Tensor& v) {
  const unsigned batch = grid_of(params.batch, "multisecant_transposed");
  const cudaStream_t stream = current_stream(v);
  const unsigned blocks = params.dim < kLong ? 1 : std::min<int64_t>(params.dim / kShare, 64);
  if (blocks == 1) {
    multisecant_transposed_kernel<T, H, kVector><<<batch, kThreads, 0, stream>>>(params, nullptr);
  } else {
    const Tensor memory = workspace(v, params.batch * blocks * kMaxGpuHistory * sizeof(T));
    T* parts = static_cast<T*>(memory.mutable_data_ptr());
    multisecant_dots_kernel<T, H, kVector><<<dim3(batch, blocks), kThreads, 0, stream>>>(params, parts);
    multisecant_transposed_kernel<T, H, kVector><<<dim3(batch, blocks), kThreads, 0, stream>>>(params, parts);
  }
  check_launch("multisecant_transposed");
}

struct Kernels : OnDevice {
  using BFloat16 = __nv_bfloat16;
  static constexpr int64_t max_history = kMaxGpuHistory;

  template <class T, class H>
  static void run(const MultisecantParams<T, H>& params, const Tensor& z) {
    if (params.monitor.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    constexpr int kVector = 16 / sizeof(H);
    if (aligned<kVector>(params.dim, params.z, params.fz, params.best, params.f_prev, params.left, params.df)) {
      launch<T, H, kVector>(params, z);
    } else {
      launch<T, H, 1>(params, z);
    }
  }
  template <class T, class H>
  static void sums(const MultisecantParams<T, H>& params, const RowSums<T>& own, const Tensor& z) {
    if (params.monitor.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    constexpr int kVector = 16 / sizeof(H);
    const bool fits = aligned<kVector>(params.dim, params.z, params.fz, params.f_prev, params.left, params.df);
    if (params.method == kAndersonI) {
      fits ? launch_sums<T, H, true, kVector>(params, own, z) : launch_sums<T, H, true, 1>(params, own, z);
    } else {
      fits ? launch_sums<T, H, false, kVector>(params, own, z) : launch_sums<T, H, false, 1>(params, own, z);
    }
  }
  template <class T, class H>
  static void apply(const MultisecantParams<T, H>& params, const RowSums<T>& own, const Tensor& z) {
    if (params.monitor.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    constexpr int kVector = 16 / sizeof(H), kDots = kMaxGpuHistory;
    const bool fits = aligned<kVector>(params.dim, params.z, params.fz, params.best, params.left, params.df);
    if (left_is_y(params.method)) {
      fits ? launch_step<T, H, 0, kVector>(params, own, z) : launch_step<T, H, 0, 1>(params, own, z);
    } else {
      fits ? launch_step<T, H, kDots, kVector>(params, own, z) : launch_step<T, H, kDots, 1>(params, own, z);
    }
  }
  template <class T, class H>
  static void run(const TransposedParams<T, H>& params, const Tensor& v) {
    if (params.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(v.get_device_index());
    constexpr int kVector = 16 / sizeof(H);
    if (aligned<kVector>(params.dim, params.v, params.out, params.left, params.df)) {
      launch_transposed<T, H, kVector>(params, v);
    } else {
      launch_transposed<T, H, 1>(params, v);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) {
  m.impl("multisecant_step", TORCH_BOX(&Flat<&multisecant_step<Kernels>>::Op::call));
  m.impl("multisecant_sums", TORCH_BOX(&multisecant_sums<Kernels>));
  m.impl("multisecant_apply", TORCH_BOX(&multisecant_apply<Kernels>));
  m.impl("multisecant_transposed", TORCH_BOX(&Flat<&multisecant_transposed<Kernels>>::Op::call));
}

}  // namespace deqfast
