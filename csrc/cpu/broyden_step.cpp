// broyden_step on the CPU: Broyden's method from its steps only, z <- z + p with p = (g + sum_i c_i s_{i+1}) / (1 -
// c_{k-1}). Both sweeps read the steps; the second finds them in the cache if they fit there.
#include <torch/csrc/stable/library.h>

#include "bound.h"
#include "halves.h"
#include "loops.h"

namespace deqfast {
namespace {

constexpr int kTile = 1024;  // elements: each row is read a page at a time

template <class T>
struct BroydenStep : SampleStep {
  static constexpr int W = Simd<T>::lanes, sg = kJudgedSlots;
  struct Sample {
    Verdict verdict = {};
    int first = 0;               // step with which the history begins
    double scale = 1.0;
    std::vector<double> c;   // coefficients
    std::vector<T> weight;   // negative weights of the steps that are added to g

    explicit Sample(const BroydenStep& step) : c(step.n), weight(step.n) {}
  };

  const BroydenParams<T>& a;
  const int n, ss;  // steps; where the sums S^T s of the newest step begin, after S^T g

  explicit BroydenStep(const BroydenParams<T>& a)
      : SampleStep(a.monitor.batch, a.dim),
        a(a),
        n(a.rule.last ? 0 : static_cast<int>(a.rule.k)),  // only the residual counts in the last step
        ss(sg + n) {}
  int rows() const { return n + 1; }
  int slots(int part) const { return part == kSweep1 ? ss + n : 0; }
  bool runs(int64_t row) const { return a.monitor.status[row] == kRunning; }
  T* steps(int64_t row) const { return a.steps + row * a.rows * dim; }

  // g of one tile, and a copy of the newest step that ends in whole vectors.
  DEQFAST_INLINE void form_tile(int64_t at, const T* newest, int64_t count, T* g, T* s, Sums sums) const {
    const T *fz = a.fz + at, *z = a.z + at;
    Vec<T> res_sq = {}, f_sq = {};
    for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
      const Vec<T> f = load(fz + d, lanes), res = f - load(z + d, lanes);
      res_sq += res * res;
      f_sq += f * f;
      store(g + d, res, W);
      if (newest) store(s + d, load(newest + d, lanes), W);
    });
    sums.add(kResSq, res_sq);
    sums.add(kFSq, f_sq);
  }

  // Form g; take its dots and those of the newest step with the steps.
  DEQFAST_INLINE void sweep1(int64_t row, Chunk chunk, Sums sums) const {
    alignas(64) T g[kTile], s[kTile];
    for (int64_t tile = chunk.begin, end = chunk.begin + chunk.count; tile < end; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, end - tile);
      const T* newest = n ? steps(row) + (n - 1) * dim + tile : nullptr;
      form_tile(row * dim + tile, newest, count, g, s, sums);
      if (n) dot_rows<true>(steps(row) + tile, dim, n, g, s, count, sums.at(sg), sums.at(ss));
    }
  }

  // Enter the newest step in the Gram matrix, and solve for the coefficients by forward recurrence, from the dots of both
  // with the steps. Returns whether the step of these coefficients can be taken.
  template <class Dots>
  bool find_coefficients(int64_t row, const Dots& with_newest, const Dots& with_g, Sample& sample) const {
    T* gram = a.gram + row * a.rows * a.rows;
    for (int j = 0; j < n; ++j) gram[(n - 1) * a.rows + j] = static_cast<T>(with_newest(j));
    bool finite = true;
    for (int j = sample.first; j < n; ++j) {
      const T* of_j = gram + j * a.rows;
      double sum = with_g(j);
      for (int i = sample.first; i < j; ++i) {
        if (sample.c[i] != 0.0) sum += static_cast<double>(of_j[i + 1]) * sample.c[i];  // a dot may have overflowed
      }
      sample.c[j] = of_j[j] == T(0) ? 0.0 : sum / static_cast<double>(of_j[j]);
      finite = finite && std::fabs(sample.c[j]) <= static_cast<double>(Limits<T>::max);
    }
    const T square = gram[(n - 1) * a.rows + n - 1];
    return finite && (square == T(0) || is_sound(square)) && std::fabs(1.0 - sample.c[n - 1]) >= kPivotFloor;
  }

  void solve(int64_t row, Sums sums, Sample& sample) const {
    sample.verdict = judge_sums(a.monitor, row, sums, a.rule, Vectors<T>{a.z + row * dim, a.fz + row * dim, dim});
    if (!sample.verdict.advance || a.rule.last) return;
    const auto dots_from = [&](int slot) { return [=](int j) { return sums.total(slot + j); }; };
    find_weights(row, dots_from(ss), dots_from(sg), sample);
  }

  void put_sums(int64_t, Sums sums, T* to) const {
    for (int slot = 0; slot < kJudgedSlots; ++slot) to[slot] = static_cast<T>(sums.total(slot));
    for (int j = 0; j < n; ++j) {
      to[kJudgedSlots + j] = static_cast<T>(sums.total(ss + j));
      to[kJudgedSlots + n + j] = static_cast<T>(sums.total(sg + j));
    }
  }

  void take_sums(int64_t row, const T* from, Sample& sample) const {
    const auto dots_from = [&](int i) { return [=](int j) { return static_cast<double>(from[i + j]); }; };
    find_weights(row, dots_from(kJudgedSlots), dots_from(kJudgedSlots + n), sample);
  }

  template <class Dots>
  void find_weights(int64_t row, const Dots& with_newest, const Dots& with_g, Sample& sample) const {
    sample.first = std::clamp(a.first[row], 0, n);
    if (n && !find_coefficients(row, with_newest, with_g, sample)) {
      sample.first = a.first[row] = n;  // a new start with a Picard step
    }
    sample.scale = sample.first < n ? 1.0 / (1.0 - sample.c[n - 1]) : 1.0;
    for (int i = sample.first; i + 1 < n; ++i) sample.weight[i] = static_cast<T>(-sample.c[i]);
  }

  // Take the step p = (g + sum_i c_i s_{i+1}) scale over the coefficients from `first` on, and keep it.
  DEQFAST_INLINE void sweep2(int64_t row, Chunk chunk, const Sample& sample, Sums) const {
    keep_best(sample.verdict, a.z + row * dim + chunk.begin, a.best + row * dim + chunk.begin, chunk.count);
    if (!sample.verdict.advance || a.rule.last) return;
    const int added = std::max(n - 1 - sample.first, 0);
    const T *from = steps(row) + (sample.first + 1) * dim, *weight = sample.weight.data() + sample.first;
    const T factor = static_cast<T>(sample.scale);
    alignas(64) T x[kTile];
    for (int64_t tile = chunk.begin, end = chunk.begin + chunk.count; tile < end; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, end - tile);
      const T* fz = a.fz + row * dim + tile;
      T *z = a.z + row * dim + tile, *next = steps(row) + n * dim + tile;
      for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
        store(x + d, load(fz + d, lanes) - load(z + d, lanes), W);
      });
      combine_rows(from + tile, dim, added, weight, count, x);
      for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
        const Vec<T> step = factor * load(x + d, W);
        store(z + d, load(z + d, lanes) + step, lanes);
        store(next + d, step, lanes);
      });
    }
  }
};

struct Kernels : OnHost, Halves<BroydenStep> {
  template <class T>
  static void run(const BroydenParams<T>& params, const Tensor&) {
    share_out(BroydenStep{params});
  }
};

struct BroydenLoop {
  static constexpr const char* name = "broyden_loop";
  static constexpr size_t numbers = 0;
  static constexpr int64_t parts = 1;
  static constexpr bool brief_history = false;
  static int64_t more_values(const Checker& checker, int64_t batch, int64_t, int64_t steps) {
    return checker.elements({batch, steps, steps});
  }
  static int64_t more_counts(int64_t batch) { return batch; }
  static void check(int64_t k, int64_t max_iter, int64_t steps, Numbers) {
    STD_TORCH_CHECK(k < steps || (k == steps && k + 1 == max_iter), name, ": `history` must have room for step ", k,
                    ", got ", steps, " rows");
  }

  static void step(View values, View counts, View status, View history, View fz, int64_t max_iter, Numbers numbers) {
    dispatch_state(fz.dtype(), [&](auto zero) {
      using T = decltype(zero);
      const LoopState<T> state(values, counts, status, fz.size(0), fz.size(1));
      BroydenParams<T> p{state.params(fz, max_iter, numbers.rule())};
      p.steps = history.data<T>();
      p.gram = state.further;
      p.first = state.counts + kPerSample + state.batch;
      p.rows = history.size(2);
      share_out(BroydenStep{p});
    });
  }
};

using Bound = Bind<&broyden_step<Binding<Kernels>>, Kernels>;

}  // namespace

DEQFAST_LOOP(broyden_loop, BroydenLoop)

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("broyden_step", TORCH_BOX(&Flat<&broyden_step<Kernels>>::Op::call));
  m.impl("broyden_sums", TORCH_BOX(&broyden_sums<Kernels>));
  m.impl("broyden_apply", TORCH_BOX(&broyden_apply<Kernels>));
  m.impl("broyden_step_bind", TORCH_BOX(&Flat<&Bound::call>::Op::call));
  m.impl("broyden_loop", TORCH_BOX(&loop_op<BroydenLoop>));
}

}  // namespace deqfast
