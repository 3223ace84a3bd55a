// class_means and within_class_scatter on the CPU, in double throughout. Only the shapes determine how work is split,
// and every piece has a place of its own for its partial sums. So the result does not depend on the number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../common/grouped.h"
#include "grain.h"
#include "simd.h"

namespace deqfast {
namespace {

constexpr int kLanes = Simd<double>::lanes;
constexpr int64_t kTile = 1024;  // columns whose class sums stay in the innermost cache

void check_rows(const char* op, const Tensor& features, const Tensor& rows, const Tensor& offsets) {
  const int64_t *row = rows.const_data_ptr<int64_t>(), *offset = offsets.const_data_ptr<int64_t>();
  const int64_t count = rows.size(0), classes = offsets.size(0) - 1, limit = features.size(0);
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(row[i] >= 0 && row[i] < limit, op, ": `rows` must be in [0, ", limit, "), got ", row[i]);
  }
  bool grouped = offset[0] == 0 && offset[classes] == count;
  for (int64_t k = 0; k < classes; ++k) grouped = grouped && offset[k] <= offset[k + 1];
  STD_TORCH_CHECK(grouped, op, ": `offsets` must grow from 0 to ", count, ", the number of `rows`");
}

// --- class means

template <class H>
struct MeansParams {
  Grouped<H> grouped;
  double* partials;  // (chunks + K, D): sums of h - first row of the class
  int64_t tiles;     // of columns
};

template <int R, class H>
DEQFAST_INLINE void add_rows(const Grouped<H>& g, int64_t i, const H* first, double* sums, int64_t begin, int64_t end) {
  const H* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = g.row(i + r);
  for_vectors<kLanes>(end - begin, [&](int64_t i, auto lanes) DEQFAST_ALWAYS_INLINE {
    const int64_t d = begin + i;
    const Vec<double> shift = load_double(first + d, lanes);
    Vec<double> total = load(sums + d, lanes);
    for (int r = 0; r < R; ++r) total += load_double(rows[r] + d, lanes) - shift;
    store(sums + d, total, lanes);
  });
}

template <class H>
DEQFAST_INLINE void sum_tile(const MeansParams<H>& p, int64_t chunk, int64_t begin, int64_t end) {
  const Grouped<H>& g = p.grouped;
  int64_t i = chunk * kChunkRows;
  const int64_t stop = std::min(i + kChunkRows, g.count);
  for (int64_t k = g.class_of(i); i < stop; ++k) {
    const int64_t last = std::min(stop, g.offsets[k + 1]);
    if (i == last) continue;
    const H* first = g.row(g.offsets[k]);
    double* sums = p.partials + (chunk + k) * g.dim;
    std::fill(sums + begin, sums + end, 0.0);
    for (; i + 4 <= last; i += 4) add_rows<4>(g, i, first, sums, begin, end);
    for (; i < last; ++i) add_rows<1>(g, i, first, sums, begin, end);
  }
}

template <class H>
DEQFAST_INLINE void sum_tiles(const MeansParams<H>& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t column = item % p.tiles * kTile;
    sum_tile(p, item / p.tiles, column, std::min(column + kTile, p.grouped.dim));
  }
}

// The mean of class k relative to the shift: a class without rows has the mean zero.
template <class H>
void finish_class(const MeansParams<H>& p, int64_t k, const double* shift, double* local) {
  const Grouped<H>& g = p.grouped;
  const int64_t begin = g.offsets[k], end = g.offsets[k + 1];
  const double count = static_cast<double>(end - begin);
  for (int64_t d = 0; d < g.dim; d += kLanes) {
    const int64_t left = g.dim - d;
    Vec<double> mean = -load(shift + d, left);
    if (end > begin) {
      Vec<double> sum = {};
      for (int64_t chunk = begin / kChunkRows; chunk <= (end - 1) / kChunkRows; ++chunk) {
        sum += load(p.partials + (chunk + k) * g.dim + d, left);
      }
      mean = sum / count + (load_double(g.row(begin) + d, left) + mean);  // small differences of rows first
    }
    store(local + d, mean, left);
  }
}

// --- within-class scatter

constexpr int kGroup = 6;             // rows whose projections on one panel stay in registers
constexpr int64_t kBlockRows = 48;    // rows that share a sweep over the directions
constexpr int64_t kBlockDepth = 256;  // columns of a block that are centred at a time

template <class H>
struct ScatterParams {
  Grouped<H> grouped;
  const double* means;   // (K, D)
  const double* panels;  // (panels, D, kLanes): the directions, kLanes at a time, zeros beyond the last
  double* partials;      // (blocks, panels, kLanes): sums of squares
  int64_t panel_count;
};

struct Scratch {
  std::vector<double> deviations;  // (kBlockRows, kBlockDepth)
  std::vector<double> sums;        // (panels, kBlockRows, kLanes)

  explicit Scratch(int64_t panels) : deviations(kBlockRows * kBlockDepth), sums(panels * kBlockRows * kLanes) {}
};

// Rows [begin, end) less their class means, columns [column, column + depth); zeros up to `padded` rows.
template <class H>
DEQFAST_INLINE void centre(const ScatterParams<H>& p, int64_t begin, int64_t end, int64_t padded, int64_t column,
                           int64_t depth, double* deviations) {
  const Grouped<H>& g = p.grouped;
  int64_t k = g.class_of(begin);
  for (int64_t i = begin; i < end; ++i, deviations += kBlockDepth) {
    while (g.offsets[k + 1] <= i) ++k;
    const H* row = g.row(i) + column;
    const double* mean = p.means + k * g.dim + column;
    for_vectors<kLanes>(depth, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
      store(deviations + d, load_double(row + d, lanes) - load(mean + d, lanes), lanes);
    });
  }
  std::fill(deviations, deviations + (padded - (end - begin)) * kBlockDepth, 0.0);
}

DEQFAST_INLINE void project(const double* deviations, const double* panel, int64_t depth, double* sums) {
  Vec<double> total[kGroup];
  for (int r = 0; r < kGroup; ++r) total[r] = load(sums + r * kLanes, kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    const Vec<double> directions = load(panel + d * kLanes, kLanes);
    for (int r = 0; r < kGroup; ++r) total[r] += deviations[r * kBlockDepth + d] * directions;
  }
  for (int r = 0; r < kGroup; ++r) store(sums + r * kLanes, total[r], kLanes);
}

template <class H>
DEQFAST_INLINE void scatter_block(const ScatterParams<H>& p, int64_t block, Scratch& scratch) {
  const int64_t dim = p.grouped.dim, begin = block * kBlockRows, end = std::min(begin + kBlockRows, p.grouped.count);
  const int64_t padded = (end - begin + kGroup - 1) / kGroup * kGroup;
  std::fill(scratch.sums.begin(), scratch.sums.end(), 0.0);
  for (int64_t column = 0; column < dim; column += kBlockDepth) {
    const int64_t depth = std::min(kBlockDepth, dim - column);
    centre(p, begin, end, padded, column, depth, scratch.deviations.data());
    for (int64_t panel = 0; panel < p.panel_count; ++panel) {
      const double* directions = p.panels + (panel * dim + column) * kLanes;
      for (int64_t r = 0; r < padded; r += kGroup) {
        project(scratch.deviations.data() + r * kBlockDepth, directions, depth,
                scratch.sums.data() + (panel * kBlockRows + r) * kLanes);
      }
    }
  }
  for (int64_t panel = 0; panel < p.panel_count; ++panel) {
    Vec<double> squares = {};
    for (int64_t r = 0; r < padded; ++r) {
      const Vec<double> sum = load(scratch.sums.data() + (panel * kBlockRows + r) * kLanes, kLanes);
      squares += sum * sum;
    }
    store(p.partials + (block * p.panel_count + panel) * kLanes, squares, kLanes);
  }
}

template <class H>
DEQFAST_INLINE void scatter_blocks(const ScatterParams<H>& p, int64_t begin, int64_t end) {
  Scratch scratch(p.panel_count);
  for (int64_t block = begin; block < end; ++block) scatter_block(p, block, scratch);
}

// Panel by panel, so that everything read for a group of rows is adjacent.
std::vector<double> pack(const double* from, int64_t dim, int64_t count, int64_t panels) {
  std::vector<double> to(panels * dim * kLanes);
  torch::stable::parallel_for(0, panels, grain_of(dim * kLanes), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t first = panel * kLanes;
        store(to.data() + (panel * dim + d) * kLanes, load(from + d * count + first, count - first), kLanes);
      }
    }
  });
  return to;
}

struct Kernels {
  using Half = deqfast::Half;
  using BFloat16 = deqfast::BFloat16;

  static void check_values(const char* op, const Tensor& features, const Tensor& rows, const Tensor& offsets) {
    check_rows(op, features, rows, offsets);
  }

  template <class H>
  static void means(const Grouped<H>& grouped, double* local, double* shift, const Tensor& features) {
    const int64_t dim = grouped.dim, classes = grouped.classes, chunks = chunks_of(grouped.count);
    const Tensor partials = torch::stable::new_empty(features, {chunks + classes, dim}, ScalarType::Double);
    const MeansParams<H> p{grouped, partials.mutable_data_ptr<double>(), (dim + kTile - 1) / kTile};
    for (int64_t d = 0; d < dim; d += kLanes) store(shift + d, load_double(grouped.row(0) + d, dim - d), dim - d);
    torch::stable::parallel_for(0, chunks * p.tiles, 1, [&](int64_t begin, int64_t end) { sum_tiles(p, begin, end); });
    torch::stable::parallel_for(0, classes, grain_of(dim), [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) finish_class(p, k, shift, local + k * dim);
    });
  }

  template <class H>
  static void scatter(const Grouped<H>& grouped, const double* means, const double* directions, int64_t count,
                      double* within, const Tensor&) {
    const int64_t panels = (count + kLanes - 1) / kLanes, blocks = (grouped.count + kBlockRows - 1) / kBlockRows;
    const std::vector<double> packed = pack(directions, grouped.dim, count, panels);
    std::vector<double> partials(blocks * panels * kLanes);
    const ScatterParams<H> p{grouped, means, packed.data(), partials.data(), panels};
    torch::stable::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) { scatter_blocks(p, begin, end); });
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t j = 0; j < count; ++j) within[j] += partials[block * panels * kLanes + j];
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("class_means", TORCH_BOX(&class_means<Kernels>));
  m.impl("within_class_scatter", TORCH_BOX(&within_class_scatter<Kernels>));
}

}  // namespace deqfast
