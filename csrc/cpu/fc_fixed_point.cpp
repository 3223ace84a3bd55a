// fc_fixed_point on the CPU: the whole solve of z = act(W z + c), block of samples by block of samples.
//
// W is packed once into panels of a few vectors of output columns, [k][column], so that a vector runs over columns and
// a panel streams from the cache. A block iterates until its last sample is done. Finished samples leave the block, and
// the others move up. Every sum runs over k in panels of kDepth in one order, so that a sample's bits depend neither on
// its block nor on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "../common/fc_ops.h"
#include "activations.h"
#include "grain.h"
#include "judged.h"

namespace deqfast {
namespace {

constexpr int64_t kBlock = 16;   // samples
constexpr int64_t kDepth = 256;  // k per partial sum: short sums lose few bits

// The tile of sums has kVectors vectors for each of kRows rows. With the weights it fits in 32 registers of a whole or
// a quarter vector, or in 16 of half a vector.
constexpr int kRows = kParts == 1 ? 8 : 6, kVectors = kParts == 1 ? 2 : 1;

struct FreeAligned {
  void operator()(void* p) const { operator delete(p, std::align_val_t(64)); }
};
template <class T>
using Buffer = std::unique_ptr<T[], FreeAligned>;

template <class T>
Buffer<T> make_buffer(int64_t count) {
  return Buffer<T>(static_cast<T*>(operator new(count * sizeof(T), std::align_val_t(64))));
}

template <class T>
struct FcArgs {
  const T* weight;  // packed
  const T* c;       // (B, D)
  T* value;         // (B, D): the start, then the best iterate
  Monitor<T> monitor;
  StopRule<T> rule;  // its k and last are set here
  int64_t dim, stride, max_iter, activation;  // stride: dim rounded up to whole panels
};

// The running samples of a block: row i of z and f belongs to sample first + index[i].
template <class T>
struct Block {
  T* z;
  T* f;
  int64_t index[kBlock];
  int64_t first, running;
};

// f = W z for Rows samples and one panel of kVectors vectors of columns, the sums in registers.
template <class T, int Rows>
DEQFAST_INLINE void multiply_tile(const FcArgs<T>& a, const T* z, T* f, const T* panel) {
  constexpr int W = Simd<T>::lanes;
  for (int64_t begin = 0; begin < a.dim; begin += kDepth) {
    const int64_t end = begin + kDepth < a.dim ? begin + kDepth : a.dim;
    Vec<T> sums[Rows][kVectors] = {};
    for (int64_t k = begin; k < end; ++k) {
      Vec<T> w[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) w[v] = load(panel + (k * kVectors + v) * W, W);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const T factor = z[r * a.stride + k];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] += factor * w[v];
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        T* to = f + r * a.stride + v * W;
        store(to, begin ? load(to, W) + sums[r][v] : sums[r][v], W);
      }
    }
  }
}

// f = act(W z + c) of the rows from `row` on, in groups of Rows, then of half as many.
template <class T, int Rows>
DEQFAST_INLINE void multiply_rows(const FcArgs<T>& a, const Block<T>& b, int64_t row, int64_t column) {
  constexpr int64_t columns = kVectors * Simd<T>::lanes;
  const T* panel = a.weight + column * a.dim;
  for (; row + Rows <= b.running; row += Rows) {
    multiply_tile<T, Rows>(a, b.z + row * a.stride, b.f + row * a.stride + column, panel);
    for (int r = 0; r < Rows; ++r) {
      T* f = b.f + (row + r) * a.stride;
      const T* c = a.c + (b.first + b.index[row + r]) * a.dim;
      for (int64_t j = column; j < column + columns && j < a.dim; j += Simd<T>::lanes) {
        const Vec<T> sum = load(f + j, Simd<T>::lanes) + load(c + j, a.dim - j);
        store(f + j, activate(sum, a.activation), Simd<T>::lanes);
      }
    }
  }
  if constexpr (Rows > 1) multiply_rows<T, Rows / 2>(a, b, row, column);
}

// Judge row i of the block; return whether its sample continues.
template <class T>
DEQFAST_INLINE bool settle(const FcArgs<T>& a, const Block<T>& b, int64_t i, const StopRule<T>& rule) {
  constexpr int W = Simd<T>::lanes;
  const T* z = b.z + i * a.stride;
  const T* f = b.f + i * a.stride;
  Vec<T> res_sq[2] = {}, f_sq[2] = {};
  for (int64_t j = 0, n = 0; j < a.dim; j += W, ++n) {
    const Vec<T> value = load(f + j, a.dim - j), g = value - load(z + j, a.dim - j);
    res_sq[n & 1] += g * g;
    f_sq[n & 1] += value * value;
  }
  const int64_t sample = b.first + b.index[i];
  const Norms<T> squares{static_cast<T>(sum<T>(res_sq[0] + res_sq[1])), static_cast<T>(sum<T>(f_sq[0] + f_sq[1]))};
  const Verdict verdict = judge(a.monitor, sample, norms_of(rule, squares, Vectors<T>{z, f, a.dim}), rule);
  if (verdict.improved) memcpy(a.value + sample * a.dim, z, a.dim * sizeof(T));
  return verdict.advance;
}

template <class T>
DEQFAST_INLINE void solve_block(const FcArgs<T>& a, Block<T>& b) {
  StopRule<T> rule = a.rule;
  for (rule.k = 0; rule.k < a.max_iter && b.running > 0; ++rule.k) {
    rule.last = rule.k + 1 == a.max_iter;
    for (int64_t column = 0; column < a.stride; column += kVectors * Simd<T>::lanes) {
      multiply_rows<T, kRows>(a, b, 0, column);
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < b.running; ++i) {
      if (!settle(a, b, i, rule)) continue;
      if (kept != i) memcpy(b.f + kept * a.stride, b.f + i * a.stride, a.dim * sizeof(T));
      b.index[kept++] = b.index[i];
    }
    b.running = kept;
    std::swap(b.z, b.f);
  }
}

template <class T>
DEQFAST_INLINE void solve_samples(const FcArgs<T>& a, int64_t first, int64_t count, T* memory) {
  Block<T> block{memory, memory + kBlock * a.stride, {}, first, count};
  for (int64_t i = 0; i < count; ++i) {
    memcpy(block.z + i * a.stride, a.value + (first + i) * a.dim, a.dim * sizeof(T));
    block.index[i] = i;
  }
  solve_block(a, block);
}

float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
constexpr int64_t kColumns = kVectors * Simd<T>::lanes;  // of a panel

template <class T>
int64_t stride_of(int64_t dim) {
  return (dim + kColumns<T> - 1) / kColumns<T> * kColumns<T>;
}

// Panel by panel, W transposed in squares that stay in the cache; columns after the last are zero.
template <class T, class H>
void pack_weight(const H* weight, int64_t dim, T* packed) {
  constexpr int64_t kSquare = 64, columns = kColumns<T>;
  torch::stable::parallel_for(0, stride_of<T>(dim) / columns, grain_of(dim * columns), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      T* to = packed + panel * columns * dim;
      for (int64_t k0 = 0; k0 < dim; k0 += kSquare) {
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t row = panel * columns + j;
          for (int64_t k = k0; k < k0 + kSquare && k < dim; ++k) {
            to[k * columns + j] = row < dim ? widen(weight[row * dim + k]) : T(0);
          }
        }
      }
    }
  });
}

struct Kernels {
  using BFloat16 = deqfast::BFloat16;

  template <class T, class H>
  static void run(const FcProblem<T, H>& p, const FcOutcome& outcome, const Tensor&) {
    const auto progress = make_buffer<T>(kProgress * p.batch);
    const Monitor<T> monitor = fc_monitor<T>(outcome, progress.get());
    const auto packed = make_buffer<T>(p.dim * stride_of<T>(p.dim));
    pack_weight(p.weight, p.dim, packed.get());
    std::copy_n(p.z0, p.batch * p.dim, p.value);
    std::fill_n(monitor.residual, 2 * p.batch, Limits<T>::infinity);
    std::fill_n(progress.get(), kProgress * p.batch, Limits<T>::infinity);
    std::fill_n(monitor.status, p.batch, int8_t{kRunning});
    const FcArgs<T> args{packed.get(), p.c,        p.value, monitor, p.rule, p.dim, stride_of<T>(p.dim),
                         p.max_iter,   p.activation};
    const int64_t batch = p.batch, blocks = (batch + kBlock - 1) / kBlock;
    // A product takes about an eighth of the time of an element of a pass, and a solve has a handful of iterations.
    const int64_t grain = grain_of(kBlock * args.dim * args.stride);
    torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
      const auto memory = make_buffer<T>(2 * kBlock * args.stride);
      for (int64_t first = begin * kBlock; first < end * kBlock && first < batch; first += kBlock) {
        solve_samples(args, first, batch - first < kBlock ? batch - first : kBlock, memory.get());
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("fc_fixed_point", TORCH_BOX(&Flat<&fc_fixed_point<Kernels>>::Op::call));
}

}  // namespace deqfast
