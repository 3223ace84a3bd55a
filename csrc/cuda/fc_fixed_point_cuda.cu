// fc_fixed_point on a GPU: the whole solve of z = act(W z + c) in one launch.
//
// A team of blocks holds W in shared memory for the whole launch, each block some rows of W (columns of f), stored
// [k][column]. It solves tiles of `Rows` samples one after another, each until its own samples are done. A single block
// needs no exchange. In a larger team every block writes its columns of f and its part of the norms to a
// double-buffered workspace. One barrier of the team follows per iteration. Then every block sums the parts in one
// order, and so comes to the same verdict. Several teams run concurrently, with a fixed assignment of tiles.
//
// The size of a team depends only on D, the dtypes and the GPU, never on the batch, and neither do a sample's bits.
//
// Cost per iteration and block with N columns: Rows D N multiply-adds at 128 per cycle, and D N weights from shared
// memory at 128 bytes per cycle; on an H200 with D = 256 in float32 (teams of 2, tiles of 2 samples for B = 128) 512
// and 1024 cycles, 0.6 us, next to about 1.5 us for the team's barrier. Tensor cores would lower the former only.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <mutex>
#include <type_traits>

#include "../common/fc_ops.h"
#include "../common/fc_fits.h"
#include "block.cuh"
#include "convert.cuh"

namespace deqfast {
namespace {

constexpr const char* kOp = "fc_fixed_point";
constexpr int64_t kMaxDim = 2048;
constexpr int kMostRows = 16;            // of a tile
constexpr int kQuad = 4;                 // columns of f per lane
constexpr int kPass = 32 * kQuad;        // columns that a warp computes together
constexpr int kTileBytes = 32 * 1024;    // of z for the largest tile
constexpr int kAlignment = 64;           // bytes; of the longest vector, 16 samples of z
// Numbers of a range of columns of f - z and f: sums of squares, norms of the rule.
enum Measure { kResSq, kFSq, kRes, kF, kMeasures };
constexpr int kReservedBytes = 2 * 1024;  // for the records of the judge
constexpr int kMaxDevices = 64;

// The distribution of W. `lanes` lanes of a warp share the columns of a pass; the others of the 32 take other k.
struct Plan {
  int columns, team, lanes, most_rows;
};

template <class T, class H>
struct FcParams {
  const H* weight;     // (D, D)
  const T* c;          // (B, D)
  const T* z0;         // (B, D)
  T* value;            // (B, D)
  Monitor<T> monitor;  // of the results; its progress is not used
  StopRule<T> rule;    // its k and last are set by the kernel
  int64_t max_iter, activation;
  int dim, batch, teams;
  bool whole;          // rows of W can be read by kQuad elements
  Plan plan;
  T* exchange;         // (teams, 2, D, Rows): f
  T* norms;            // (teams, 2, team, Rows, kMeasures)
  unsigned* arrivals;  // (teams,)
};

// Dynamic shared memory of a block.
template <class T, class H>
struct Slice {
  H* weight;         // (D, columns)
  T* z;              // (D, Rows)
  T* f;              // (columns, Rows)
  T* partials;       // (kWarps, chunk, width of a pass)
  int first, valid;  // the block's first column of f, and how many of its columns exist
};

// The records of the tile's samples, the same in every block of the team.
template <class T, int Rows>
struct Records {
  int8_t status[Rows];
  int32_t iterations[Rows];
  T residual[2 * Rows], progress[kProgress * Rows], measures[Rows][kMeasures];
  bool improved[Rows];
};

static_assert(sizeof(Records<double, kMostRows>) <= kReservedBytes, "the records of a tile must fit the reserve");

__host__ __device__ constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
__host__ __device__ constexpr int chunk_of(int rows) { return rows < 4 ? rows : 4; }

// Offsets in bytes of z, f and the partial sums after the weight, and the total.
struct Layout {
  int64_t z, f, partials, total;
};

__host__ __device__ inline Layout layout_of(int dim, int columns, int rows, int weight_size, int state_size) {
  const int width = columns < kPass ? columns : kPass;
  Layout l;
  l.z = round_up(static_cast<int64_t>(dim) * columns * weight_size, kAlignment);
  l.f = l.z + round_up(static_cast<int64_t>(dim) * rows * state_size, kAlignment);
  l.partials = l.f + round_up(static_cast<int64_t>(columns) * rows * state_size, kAlignment);
  l.total = l.partials + static_cast<int64_t>(kWarps) * chunk_of(rows) * width * state_size;
  return l;
}

template <class T>
__device__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

template <class T>
__device__ T warp_max(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = larger(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// W's rows first .. first + columns, transposed. A lane reads four neighbours of a row, two lanes a sector of 32 bytes
// in float32. The lanes of a store differ in the column, which avoids bank conflicts.
template <class T, class H>
__device__ void load_weight(const FcParams<T, H>& p, const Slice<T, H>& s) {
  const int columns = p.plan.columns, pairs = (p.dim + 2 * kQuad - 1) / (2 * kQuad);
  for (int e = threadIdx.x; e < columns * pairs * 2; e += kThreads) {
    const int j = e / 2 % columns, k = (e / (2 * columns) * 2 + e % 2) * kQuad;
    const H* row = p.weight + static_cast<int64_t>(s.first + j) * p.dim;
    Pack<H, kQuad> w = {};
    if (j < s.valid && p.whole && k < p.dim) {
      w = load<H, kQuad>(row + k);
    } else if (j < s.valid) {
      for (int i = 0; i < kQuad && k + i < p.dim; ++i) w.value[i] = row[k + i];
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (k + i < p.dim) s.weight[(k + i) * columns + j] = w.value[i];
    }
  }
}

// The lane's sums over its k of W z, for four columns from `column` on; zero if it has none.
template <class T, class H, int Rows>
__device__ void multiply(const FcParams<T, H>& p, const Slice<T, H>& s, int column, bool taken,
                         T (&sums)[Rows][kQuad]) {
  constexpr int unrolled = Rows <= 4 ? 4 : 2;  // concurrent loads
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = p.plan.lanes, groups = 32 / lanes;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) sums[r][i] = T(0);
  }
  if (taken) {
#pragma unroll unrolled
    for (int k = warp * groups + lane / lanes; k < p.dim; k += kWarps * groups) {
      const auto w = load<H, kQuad>(s.weight + k * p.plan.columns + column);
      const auto z = load<T, Rows>(s.z + k * Rows);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) sums[r][i] += z.value[r] * convert<T>(w.value[i]);
      }
    }
  }
  for (int offset = 16; offset >= lanes; offset /= 2) {
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) sums[r][i] += __shfl_xor_sync(0xffffffffu, sums[r][i], offset);
    }
  }
}

// f = act(W z + c) for the block's columns of the tile that starts at sample `row`. Ends with a barrier.
template <class T, class H, int Rows>
__device__ void evaluate(const FcParams<T, H>& p, const Slice<T, H>& s, int64_t row) {
  constexpr int chunk = chunk_of(Rows);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = p.plan.lanes;
  const int stride = min(p.plan.columns, kPass), quad = lane % lanes * kQuad;
  for (int start = 0; start < p.plan.columns; start += kPass) {
    const int width = min(kPass, p.plan.columns - start);
    T sums[Rows][kQuad];
    multiply<T, H, Rows>(p, s, start + quad, quad < width, sums);
#pragma unroll
    for (int r0 = 0; r0 < Rows; r0 += chunk) {
      if (lane < lanes && quad < width) {
#pragma unroll
        for (int r = 0; r < chunk; ++r) {
          Pack<T, kQuad> pack;
#pragma unroll
          for (int i = 0; i < kQuad; ++i) pack.value[i] = sums[r0 + r][i];
          store(s.partials + (warp * chunk + r) * stride + quad, pack);
        }
      }
      __syncthreads();
      for (int e = threadIdx.x; e < chunk * width; e += kThreads) {
        const int r = e / width, j = e % width, column = start + j;
        T total = s.partials[r * stride + j];
        for (int w = 1; w < kWarps; ++w) total += s.partials[(w * chunk + r) * stride + j];
        const int64_t sample = row + r0 + r;
        const bool exists = sample < p.batch && column < s.valid;
        const T offset = exists ? p.c[sample * p.dim + s.first + column] : T(0);
        s.f[column * Rows + r0 + r] = activate(total + offset, p.activation);
      }
      __syncthreads();
    }
  }
}

// Copy `count` elements, by 16 bytes if both addresses allow it. Data written by other blocks is read past L1.
template <bool OfTeam, class T>
__device__ void copy(T* to, const T* from, int count, bool wide) {
  constexpr int N = sizeof(uint4) / sizeof(T);
  const auto move = [](auto* target, const auto* source) { *target = OfTeam ? __ldcg(source) : *source; };
  const int words = wide ? count / N : 0;
  for (int e = threadIdx.x; e < words; e += kThreads) {
    move(reinterpret_cast<uint4*>(to) + e, reinterpret_cast<const uint4*>(from) + e);
  }
  for (int e = words * N + threadIdx.x; e < count; e += kThreads) move(to + e, from + e);
}

// Every block of the team has arrived `target` times in all. Data that they wrote before can be read afterwards, past
// L1. cooperative_groups has barriers of a block, a cluster and the whole grid. A team is a part of the grid, and
// continues when its own samples are done. A cluster holds at most 16 blocks, and exists on sm_90 only.
__device__ inline void team_barrier(unsigned* arrivals, unsigned target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(arrivals, 1u);
    while (static_cast<int>(*static_cast<volatile unsigned*>(arrivals) - target) < 0) __nanosleep(20);
    __threadfence();
  }
  __syncthreads();
}

// Two vectors of one sample for a warp, whose elements i of 0 .. count are `at(i)`.
template <class T, class At>
struct WarpVectors {
  At at;
  int count;

  __device__ Norms<T> largest() const {
    Norms<T> x = {};
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const Norms<T> v = at(i);
      x = {larger(x.res, magnitude(v.res)), larger(x.f, magnitude(v.f))};
    }
    return {warp_max(x.res), warp_max(x.f)};
  }
  __device__ Norms<T> squares_over(const Norms<T>& scale) const {
    Norms<T> x = {};
    for (int i = threadIdx.x % 32; i < count; i += 32) {
      const Norms<T> v = at(i);
      x = {x.res + v.res / scale.res * (v.res / scale.res), x.f + v.f / scale.f * (v.f / scale.f)};
    }
    return {warp_sum(x.res), warp_sum(x.f)};
  }
};

// Sums of squares and norms, to `to` (kMeasures), of the vectors whose elements are `at(i)`; `squares(i)` are theirs.
template <class T, class Squares, class At>
__device__ void measure_vectors(const StopRule<T>& rule, int count, const Squares& squares, const At& at, T* to) {
  Norms<T> sums = {};
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const Norms<T> v = squares(i);
    sums = {sums.res + v.res, sums.f + v.f};
  }
  sums = {warp_sum(sums.res), warp_sum(sums.f)};
  const Norms<T> norms = norms_of(rule, sums, WarpVectors<T, At>{at, count});
  if (threadIdx.x % 32 == 0) {
    to[kResSq] = sums.res;
    to[kFSq] = sums.f;
    to[kRes] = norms.res;
    to[kF] = norms.f;
  }
}

// The numbers of the block's columns of every sample's f - z and f, to `to` (Rows, kMeasures).
template <class T, class H, int Rows>
__device__ void measure(const Slice<T, H>& s, const StopRule<T>& rule, T* to) {
  for (int r = threadIdx.x / 32; r < Rows; r += kWarps) {
    const auto at = [&](int j) {
      const T f = s.f[j * Rows + r];
      return Norms<T>{f - s.z[(s.first + j) * Rows + r], f};
    };
    const auto squares = [&](int j) {
      const Norms<T> v = at(j);
      return Norms<T>{v.res * v.res, v.f * v.f};
    };
    measure_vectors(rule, s.valid, squares, at, to + r * kMeasures);
  }
}

// The same for whole samples, from the parts of the `team` blocks, in the warp that judges the sample.
template <class T, int Rows>
__device__ void gather_norms(const T* parts, int team, const StopRule<T>& rule, Records<T, Rows>& records) {
  for (int r = threadIdx.x / 32; r < Rows; r += kWarps) {
    const auto two = [&](int rank, int which) {
      const T* of_rank = parts + (rank * Rows + r) * kMeasures + which;
      return Norms<T>{__ldcg(of_rank), __ldcg(of_rank + 1)};
    };
    const auto squares = [&](int rank) { return two(rank, kResSq); };
    const auto at = [&](int rank) { return two(rank, kRes); };
    measure_vectors(rule, team, squares, at, records.measures[r]);
  }
}

// Judge the tile's running samples; return whether any takes another step. Ends with a barrier.
template <class T, int Rows>
__device__ bool judge_tile(Records<T, Rows>& records, const StopRule<T>& rule) {
  bool advance = false;
  for (int r = threadIdx.x / 32; r < Rows; r += kWarps) {
    if (threadIdx.x % 32 != 0) continue;
    records.improved[r] = false;
    if (records.status[r] != kRunning) continue;
    const Monitor<T> monitor{records.status, records.iterations, records.residual, records.progress, nullptr, Rows};
    const T* measures = records.measures[r];
    const Verdict verdict = judge(monitor, r, Norms<T>{measures[kRes], measures[kF]}, rule);
    records.improved[r] = verdict.improved;
    advance = advance || verdict.advance;
  }
  return __syncthreads_or(advance);
}

template <class T, class H, int Rows>
__device__ void keep_best(const FcParams<T, H>& p, const Slice<T, H>& s, const Records<T, Rows>& records,
                          int64_t row) {
  for (int r = threadIdx.x / 32; r < Rows; r += kWarps) {
    if (!records.improved[r]) continue;
    T* to = p.value + (row + r) * p.dim + s.first;
    for (int j = threadIdx.x % 32; j < s.valid; j += 32) to[j] = s.z[(s.first + j) * Rows + r];
  }
}

// Initialise the tile: z from z0, the records, and z0 as the value so far.
template <class T, class H, int Rows>
__device__ void start_tile(const FcParams<T, H>& p, const Slice<T, H>& s, Records<T, Rows>& records, int64_t row) {
  __syncthreads();  // the last tile is no longer read
  for (int e = threadIdx.x; e < p.dim * Rows; e += kThreads) {
    const int r = e / p.dim, k = e % p.dim;
    s.z[k * Rows + r] = row + r < p.batch ? p.z0[(row + r) * p.dim + k] : T(0);
  }
  for (int r = threadIdx.x; r < Rows; r += kThreads) {
    records.status[r] = row + r < p.batch ? kRunning : kConverged;
    records.improved[r] = row + r < p.batch;
    records.residual[r] = records.residual[Rows + r] = Limits<T>::infinity;
    for (int i = 0; i < kProgress; ++i) records.progress[i * Rows + r] = Limits<T>::infinity;
  }
  __syncthreads();
  keep_best(p, s, records, row);
}

template <class T, class H, int Rows>
__device__ void solve_tile(const FcParams<T, H>& p, const Slice<T, H>& s, Records<T, Rows>& records, int64_t row,
                           unsigned& step) {
  const int team = blockIdx.x / p.plan.team, rank = blockIdx.x % p.plan.team, size = p.dim * Rows;
  const bool wide = size * sizeof(T) % sizeof(uint4) == 0;  // then every buffer of the team starts on 16 bytes
  StopRule<T> rule = p.rule;
  for (rule.k = 0; rule.k < p.max_iter; ++rule.k, ++step) {
    rule.last = rule.k + 1 == p.max_iter;
    evaluate<T, H, Rows>(p, s, row);
    T* shared_f = nullptr;
    if (p.plan.team == 1) {
      measure<T, H, Rows>(s, rule, &records.measures[0][0]);
    } else {
      const int64_t buffer = 2 * team + step % 2;
      shared_f = p.exchange + buffer * size;
      T* parts = p.norms + buffer * p.plan.team * Rows * kMeasures;
      copy<false>(shared_f + s.first * Rows, s.f, s.valid * Rows, wide);
      measure<T, H, Rows>(s, rule, parts + rank * Rows * kMeasures);
      team_barrier(p.arrivals + team, (step + 1) * p.plan.team);
      gather_norms<T, Rows>(parts, p.plan.team, rule, records);
    }
    const bool advance = judge_tile<T, Rows>(records, rule);
    keep_best(p, s, records, row);
    if (!advance) {
      ++step;
      return;
    }
    __syncthreads();
    if (p.plan.team == 1) {
      copy<false>(s.z, s.f, size, true);
    } else {
      copy<true>(s.z, shared_f, size, wide);
    }
    __syncthreads();
  }
}

template <class T, class H, int Rows>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 2) fc_kernel(const FcParams<T, H> p) {
  extern __shared__ __align__(64) unsigned char memory[];
  __shared__ Records<T, Rows> records;
  const int rank = blockIdx.x % p.plan.team, first = rank * p.plan.columns;
  const Layout layout = layout_of(p.dim, p.plan.columns, Rows, sizeof(H), sizeof(T));
  const Slice<T, H> slice{reinterpret_cast<H*>(memory),
                          reinterpret_cast<T*>(memory + layout.z),
                          reinterpret_cast<T*>(memory + layout.f),
                          reinterpret_cast<T*>(memory + layout.partials),
                          first,
                          min(p.plan.columns, p.dim - first)};
  load_weight(p, slice);
  unsigned step = 0;
  for (int64_t row = blockIdx.x / p.plan.team * Rows; row < p.batch; row += static_cast<int64_t>(p.teams) * Rows) {
    start_tile(p, slice, records, row);
    solve_tile<T, H, Rows>(p, slice, records, row, step);
    for (int r = threadIdx.x; rank == 0 && r < Rows && row + r < p.batch; r += kThreads) {
      p.monitor.status[row + r] = records.status[r];
      p.monitor.iterations[row + r] = records.iterations[r];
      p.monitor.residual[row + r] = records.residual[r];
      p.monitor.residual[p.batch + row + r] = records.residual[Rows + r];
    }
  }
}

void check_cuda(cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, kOp, ": ", cudaGetErrorString(error));
}

int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

// The fewest blocks that hold W and the largest tile; a team of 0 if the GPU has too little shared memory.
Plan plan_for(int device, int64_t dim, int weight_size, int state_size) {
  if (dim > kMaxDim) return {};
  const int shared = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - kReservedBytes;
  const int processors = attribute_of(cudaDevAttrMultiProcessorCount, device);
  int rows = state_size == 8 ? 8 : 16;
  while (rows > 1 && rows * dim * state_size > kTileBytes) rows /= 2;
  int columns = static_cast<int>(round_up(dim, kQuad));
  while (columns > 0 && layout_of(dim, columns, rows, weight_size, state_size).total > shared) columns -= kQuad;
  if (columns == 0) return {};
  int team = static_cast<int>((dim + columns - 1) / columns);
  columns = static_cast<int>(round_up((dim + team - 1) / team, kQuad));
  team = static_cast<int>((dim + columns - 1) / columns);
  if (team > processors) return {};
  int lanes = 1;
  while (lanes < 32 && lanes * kQuad < columns) lanes *= 2;
  return {columns, team, lanes, rows};
}

// The smallest tile with which all teams work concurrently.
int rows_for(const Plan& plan, int64_t batch, int processors) {
  int rows = 1;
  while (rows < plan.most_rows && (batch + rows - 1) / rows > processors / plan.team) rows *= 2;
  return rows;
}

// Let the kernel use all the shared memory that the device gives on request, once.
template <class Kernel>
void allow_shared_memory(Kernel kernel, std::once_flag (&done)[kMaxDevices], int device) {
  STD_TORCH_CHECK(device < kMaxDevices, kOp, ": device ", device, " of at most ", kMaxDevices);
  std::call_once(done[device], [&] {
    const int most = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most - kReservedBytes));
  });
}

template <class T, class H, int Rows>
void launch_rows(FcParams<T, H> params, const Tensor& c, int processors) {
  const auto kernel = fc_kernel<T, H, Rows>;
  const Plan& plan = params.plan;
  const auto shared = static_cast<size_t>(layout_of(params.dim, plan.columns, Rows, sizeof(H), sizeof(T)).total);
  static std::once_flag allowed[kMaxDevices];
  allow_shared_memory(kernel, allowed, c.get_device_index());
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kThreads, shared));
  params.teams = std::min((params.batch + Rows - 1) / Rows, blocks * processors / plan.team);
  STD_TORCH_CHECK(params.teams > 0, kOp, ": D = ", params.dim, " needs ", plan.team,
                  " blocks at once, and the GPU runs ", blocks * processors);
  params.whole = aligned<kQuad>(params.dim, params.weight);
  const cudaStream_t stream = current_stream(c);
  const auto grid = static_cast<unsigned>(params.teams * plan.team);
  if (plan.team == 1) {
    kernel<<<grid, kThreads, shared, stream>>>(params);
    check_launch(kOp);
    return;
  }
  const int64_t teams = params.teams, f_size = 2 * params.dim * Rows, norms_size = 2 * plan.team * Rows * kMeasures;
  const int64_t elements = teams * (f_size + norms_size);
  const Tensor workspace = torch::stable::new_empty(c, {elements});
  const Tensor arrivals = torch::stable::new_empty(c, {teams}, ScalarType::Int);
  params.exchange = workspace.mutable_data_ptr<T>();
  params.norms = params.exchange + teams * f_size;
  params.arrivals = reinterpret_cast<unsigned*>(arrivals.mutable_data_ptr<int32_t>());
  check_cuda(cudaMemsetAsync(params.arrivals, 0, teams * sizeof(unsigned), stream));
  void* arguments[] = {&params};
  check_cuda(cudaLaunchCooperativeKernel(kernel, dim3(grid), dim3(kThreads), arguments, shared, stream));
}

template <class T, class H>
void launch(const FcParams<T, H>& params, const Tensor& c, int processors) {
  switch (rows_for(params.plan, params.batch, processors)) {
    case 1:
      return launch_rows<T, H, 1>(params, c, processors);
    case 2:
      return launch_rows<T, H, 2>(params, c, processors);
    case 4:
      return launch_rows<T, H, 4>(params, c, processors);
    case 8:
      return launch_rows<T, H, 8>(params, c, processors);
    default:
      if constexpr (std::is_same_v<T, float>) launch_rows<T, H, 16>(params, c, processors);
  }
}

struct Kernels {
  using BFloat16 = __nv_bfloat16;

  template <class T, class H>
  static void run(const FcProblem<T, H>& p, const FcOutcome& outcome, const Tensor& c) {
    if (p.batch == 0) return;
    STD_TORCH_CHECK(p.batch <= std::numeric_limits<int32_t>::max() - kMostRows, kOp, ": `c` has too many rows: ",
                    p.batch);
    const int device = c.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const int processors = attribute_of(cudaDevAttrMultiProcessorCount, device);
    const Plan plan = plan_for(device, p.dim, sizeof(H), sizeof(T));
    STD_TORCH_CHECK(plan.team > 0, kOp, ": D = ", p.dim, " is more than the GPU holds in shared memory (", processors,
                    " blocks), or more than ", kMaxDim);
    launch(FcParams<T, H>{p.weight, p.c, p.z0, p.value, fc_monitor<T>(outcome, nullptr), p.rule, p.max_iter,
                          p.activation, static_cast<int>(p.dim), static_cast<int>(p.batch), 0, false, plan, nullptr,
                          nullptr, nullptr},
           c, processors);
  }
};

}  // namespace

bool fc_fits(int64_t device, int64_t dim, bool short_weight, bool wide_state) {
  const int state_size = wide_state ? 8 : 4;
  return plan_for(static_cast<int>(device), dim, short_weight ? 2 : state_size, state_size).team > 0;
}

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) {
  m.impl("fc_fixed_point", TORCH_BOX(&Flat<&fc_fixed_point<Kernels>>::Op::call));
}

}  // namespace deqfast
