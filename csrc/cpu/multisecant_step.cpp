// multisecant_step on the CPU: Broyden and Anderson in pair form, z <- z + alpha (beta g - DF gamma), N gamma = L^T g.
// Either sweep reads one matrix of the history.
#include <torch/csrc/stable/library.h>

#include "halves.h"
#include "loops.h"
#include "window.h"

namespace deqfast {
namespace {

// Elements of a tile: the rows of twenty pairs stay in the second-level cache between a combination and its dots.
constexpr int kTile = 512;

// Slots of the first sweep's sums before the dots: |s|^2 and |y|^2 of the newest pair.
constexpr int kSSq = kJudgedSlots, kYSq = kSSq + 1, kSlots = kYSq + 1;

// g of one tile, and, if there are `Pairs`, the newest pair completed: its change y of g and the change of f.
template <bool Pairs, bool StoreY, class T, class H>
DEQFAST_INLINE void form_tile(const MultisecantParams<T, H>& a, int64_t at, H* left_new, H* df_new, int64_t count, T* g,
                              T* s, T* y, Sums sums) {
  constexpr int W = Simd<T>::lanes;
  const T *fz = a.fz + at, *z = a.z + at, *f_prev = a.f_prev + at, beta = a.beta;
  Vec<T> res_sq = {}, f_sq = {}, s_sq = {}, y_sq = {};
  for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
    const Vec<T> f = load(fz + d, lanes), res = f - load(z + d, lanes);
    res_sq += res * res;
    f_sq += f * f;
    store(g + d, res, W);
    if (!Pairs) return;
    const Vec<T> delta = f - load(f_prev + d, lanes), step = load<T>(left_new + d, lanes);
    Held<T, H>(beta * delta + (T(1) - beta) * step).put(df_new + d, lanes);
    Vec<T> change = delta - step;
    if (StoreY) {
      const Held<T, H> held(change);
      held.put(left_new + d, lanes);
      change = held.value();
    }
    s_sq += step * step;
    y_sq += change * change;
    store(s + d, step, W);
    store(y + d, change, W);
  });
  sums.add(kResSq, res_sq);
  sums.add(kFSq, f_sq);
  sums.add(kSSq, s_sq);
  sums.add(kYSq, y_sq);
}

template <class T, class H>
struct MultisecantStep : SampleStep {
  static constexpr int W = Simd<T>::lanes;
  struct Sample {
    Verdict verdict = {};
    std::vector<T> t, gamma, work;
    std::vector<double> dots;

    explicit Sample(const MultisecantStep& step)
        : t(step.n), gamma(step.n), work(solve_workspace(step.n)), dots(3 * step.n) {}
  };

  const MultisecantParams<T, H>& a;
  const Window window;
  const int n, lg, ly, ls;  // pairs; where the sums L^T g, L^T y and L^T s begin

  explicit MultisecantStep(const MultisecantParams<T, H>& a)
      : SampleStep(a.monitor.batch, a.dim), a(a), window(a.window(0)), n(window.size()), lg(kSlots), ly(lg + n), ls(ly + n) {}
  int rows() const { return n + 1; }
  int slots(int part) const {
    if (part == kSweep1) return a.method == kAndersonI ? ls + n : ls;
    return needs_dots() ? n : 0;
  }
  bool runs(int64_t row) const { return a.monitor.status[row] == kRunning; }
  bool needs_dots() const { return n > 0 && !left_is_y(a.method); }  // of the new step with DF
  int64_t history(int64_t row) const { return static_cast<int64_t>(a.history) * dim * row; }
  Gram<T> gram_of(int64_t row) const { return {a.gram + row * (a.history + 2) * a.history, a.history}; }

  // Form g, complete the newest pair, and take every dot with the left history. One loop for all methods, so that the
  // dots are compiled once.
  DEQFAST_INLINE void sweep1(int64_t row, Chunk chunk, Sums sums) const {
    H *left = a.left + history(row), *df = a.df + history(row);
    const bool pairs = n > 0;
    const int64_t newest = pairs ? window.newest() * dim : 0;
    alignas(64) T g[kTile], s[kTile], y[kTile];
    for (int64_t tile = chunk.begin, end = chunk.begin + chunk.count; tile < end; tile += kTile) {
      const int64_t at = row * dim + tile, count = std::min<int64_t>(kTile, end - tile);
      H *left_new = left + newest + tile, *df_new = df + newest + tile;
      if (!pairs) {
        form_tile<false, false>(a, at, left_new, df_new, count, g, s, y, sums);
        continue;
      }
      if (left_is_y(a.method)) {
        form_tile<true, true>(a, at, left_new, df_new, count, g, s, y, sums);
      } else {
        form_tile<true, false>(a, at, left_new, df_new, count, g, s, y, sums);
      }
      dot_rows<true>(left + tile, dim, n, g, y, count, sums.at(lg), sums.at(ly));
      if (a.method == kAndersonI) dot_rows<false>(left + tile, dim, n, s, s, count, sums.at(ls), sums.at(ls));
    }
  }

  // Judge; enter the newest pair in the window matrix and solve for gamma.
  void solve(int64_t row, Sums sums, Sample& sample) const {
    sample.verdict = judge_sums(a.monitor, row, sums, a.rule, Vectors<T>{a.z + row * dim, a.fz + row * dim, dim});
    if (!sample.verdict.advance || n == 0) return;
    const Gram<T> gram = gram_of(row);
    for (int slot = kSlots; slot < slots(kSweep1); ++slot) sample.dots[slot - kSlots] = sums.total(slot);
    const double *lg = sample.dots.data(), *ly = lg + n, *ls = ly + n;
    enter_pair(gram, &gram.at(window.newest(), 0), ly, ls, static_cast<T>(sums.total(kSSq)),
               static_cast<T>(sums.total(kYSq)), window, a.method, a.beta, OneLane());
    for (int j = 0; j < n; ++j) sample.t[j] = static_cast<T>(lg[j]);
    solve_window(gram, sample.t.data(), sample.gamma.data(), sample.work.data(), window, a.method, a.ridge);
  }

  void put_sums(int64_t row, Sums sums, T* to) const {
    const SumsOfPairs at(n, a.method);
    const auto total = [&](int slot) { return static_cast<T>(sums.total(slot)); };
    for (int slot = 0; slot < kJudgedSlots; ++slot) to[slot] = total(slot);
    for (int j = 0; j < n; ++j) {
      to[at.g + j] = total(lg + j);
      to[at.y + j] = total(ly + j);
    }
    to[at.squares] = total(left_is_y(a.method) ? kYSq : kSSq);
    to[at.squares + 1] = total(kYSq);
    if (left_is_y(a.method)) return;
    const T* dots = &gram_of(row).at(window.newest(), 0);  // of the newest step with DF, over this part
    for (int j = 0; j < n; ++j) {
      to[at.row + j] = a.method == kAndersonI ? (dots[j] - total(ls + j)) / a.beta : dots[j];
    }
  }

  void take_sums(int64_t row, const T* from, Sample& sample) const {
    if (n == 0) return;
    const SumsOfPairs at(n, a.method);
    const Gram<T> gram = gram_of(row);
    const T *dots = from + (left_is_y(a.method) ? at.y : at.row), *squares = from + at.squares;
    std::copy(dots, dots + n, &gram.at(window.newest(), 0));
    enter_pair(gram, dots, from + at.y, from + at.y, squares[0], squares[1], window,
               left_is_y(a.method) ? a.method : kBroydenGood, a.beta, OneLane());
    std::copy(from + at.g, from + at.g + n, sample.t.begin());
    solve_window(gram, sample.t.data(), sample.gamma.data(), sample.work.data(), window, a.method, a.ridge);
  }

  // Take the step, store it as the next pair's, and take its dots with DF if the method needs them.
  DEQFAST_INLINE void sweep2(int64_t row, Chunk chunk, const Sample& sample, Sums sums) const {
    keep_best(sample.verdict, a.z + row * dim + chunk.begin, a.best + row * dim + chunk.begin, chunk.count);
    if (!sample.verdict.advance || a.rule.last) return;
    const H* df = a.df + history(row);
    H* left_next = a.left + history(row) + window.next() * dim;
    alignas(64) T x[kTile];
    for (int64_t tile = chunk.begin, end = chunk.begin + chunk.count; tile < end; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, end - tile);
      T* z = a.z + row * dim + tile;
      const T *fz = a.fz + row * dim + tile, alpha = a.alpha, beta = a.beta;
      for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
        store(x + d, beta * (load(fz + d, lanes) - load(z + d, lanes)), W);
      });
      combine_rows(df + tile, dim, n, sample.gamma.data(), count, x);
      for_vectors<W>(count, [&](int64_t d, auto lanes) DEQFAST_ALWAYS_INLINE {
        const Vec<T> old = load(z + d, lanes), now = old + Held<T, H>(alpha * load(x + d, W)).value();
        const Held<T, H> taken(now - old);
        store(z + d, now, lanes);
        taken.put(left_next + tile + d, lanes);
        store(x + d, taken.value(), W);
      });
      if (needs_dots()) dot_rows<false>(df + tile, dim, n, x, x, count, sums.at(0), sums.at(0));
    }
  }

  void commit(int64_t row, Sums sums, const Sample& sample) const {
    if (!sample.verdict.advance || a.rule.last || !needs_dots()) return;
    T* gram_row = a.gram + (row * (a.history + 2) + window.next()) * a.history;
    for (int j = 0; j < n; ++j) gram_row[j] = static_cast<T>(sums.total(j));
  }
};

// out = alpha (beta v - L gamma), N^T gamma = DF^T v.
template <class T, class H>
struct TransposedStep : SampleStep {
  static constexpr int W = Simd<T>::lanes;
  struct Sample {
    std::vector<T> t, gamma, work;

    explicit Sample(const TransposedStep& step)
        : t(step.p.history), gamma(step.p.history), work(solve_workspace(step.p.history)) {}
  };

  const TransposedParams<T, H>& p;

  explicit TransposedStep(const TransposedParams<T, H>& p) : SampleStep(p.batch, p.dim), p(p) {}
  int rows() const { return p.history + 1; }
  int slots(int part) const { return part == kSweep1 ? p.history : 0; }
  bool runs(int64_t) const { return true; }
  const H* row_of(const H* rows, int64_t row, int slot) const { return rows + (p.history * row + slot) * dim; }

  DEQFAST_INLINE void load_tile(int64_t from, int64_t count, T scale, T* x) const {
    for (int64_t d = 0; d < count; d += W) store(x + d, scale * load(p.v + from + d, count - d), W);
  }

  DEQFAST_INLINE void sweep1(int64_t row, Chunk chunk, Sums sums) const {
    const Window window = p.window(row);
    if (window.size() <= 0) return;
    alignas(64) T x[kTile];
    for (int64_t tile = chunk.begin, end = chunk.begin + chunk.count; tile < end; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, end - tile);
      load_tile(row * dim + tile, count, T(1), x);
      for (int age = 0; age < window.size(); ++age) {
        const int slot = window.slot(age);
        dot_rows<false, 1>(row_of(p.df, row, slot) + tile, dim, 1, x, x, count, sums.at(slot), sums.at(slot));
      }
    }
  }

  void solve(int64_t row, Sums sums, Sample& sample) const {
    std::fill(sample.gamma.begin(), sample.gamma.end(), T(0));  // in slots outside the window
    for (int j = 0; j < p.history; ++j) sample.t[j] = static_cast<T>(sums.total(j));
    if (p.window(row).size() <= 0) return;  // negative if `newest` is below -1
    const Gram<const T> gram{p.gram + row * (p.history + 2) * p.history, p.history};
    solve_window<true>(gram, sample.t.data(), sample.gamma.data(), sample.work.data(), p.window(row), p.method,
                       p.ridge);
  }

  DEQFAST_INLINE void sweep2(int64_t row, Chunk chunk, const Sample& sample, Sums) const {
    const Window window = p.window(row);
    alignas(64) T x[kTile];
    for (int64_t tile = chunk.begin, end = chunk.begin + chunk.count; tile < end; tile += kTile) {
      const int64_t count = std::min<int64_t>(kTile, end - tile);
      load_tile(row * dim + tile, count, p.beta, x);
      for (int age = 0; age < window.size(); ++age) {
        const int slot = window.slot(age);
        combine_rows<1>(row_of(p.left, row, slot) + tile, dim, 1, sample.gamma.data() + slot, count, x);
      }
      T* out = p.out + row * dim + tile;
      for (int64_t d = 0; d < count; d += W) store(out + d, p.alpha * load(x + d, W), count - d);
    }
  }
};

struct Kernels : OnHost, Halves<MultisecantStep> {
  using BFloat16 = deqfast::BFloat16;
  static constexpr int64_t max_history = 1 << 15;

  template <class T, class H>
  static void run(const MultisecantParams<T, H>& params, const Tensor&) {
    share_out(MultisecantStep{params});
  }
  template <class T, class H>
  static void run(const TransposedParams<T, H>& params, const Tensor&) {
    share_out(TransposedStep{params});
  }
};

struct MultisecantLoop {
  static constexpr const char* name = "multisecant_loop";
  static constexpr size_t numbers = 4;  // method, alpha, beta, ridge
  static constexpr int64_t parts = 2;
  static constexpr bool brief_history = true;
  static int64_t more_values(const Checker& checker, int64_t batch, int64_t dim, int64_t pairs) {
    return batch * dim + checker.elements({batch, pairs + 2, pairs});
  }
  static int64_t more_counts(int64_t) { return 0; }
  static void check(int64_t, int64_t, int64_t pairs, Numbers numbers) {
    STD_TORCH_CHECK(pairs <= Kernels::max_history, name, ": `history` must hold 1 to ", Kernels::max_history,
                    " pairs, got ", pairs);
    const double method = numbers.own(0);
    STD_TORCH_CHECK(method == 0 || method == 1 || method == 2 || method == 3, name, ": `method` must be 0 to 3, got ",
                    method);
  }

  static void step(View values, View counts, View status, View history, View fz, int64_t max_iter,
                   Numbers numbers) {
    dispatch_history<BFloat16>(fz.dtype(), history.dtype(), [&](auto zero, auto element) {
      using T = decltype(zero);
      using H = decltype(element);
      const LoopState<T> state(values, counts, status, fz.size(0), fz.size(1));
      const Mixing mixing{static_cast<int64_t>(numbers.own(0)), numbers.own(1), numbers.own(2), numbers.own(3)};
      MultisecantParams<T, H> p{state.params(fz, max_iter, numbers.rule()), mixing_params<T>(mixing)};
      p.history = static_cast<int>(history.size(2));
      p.f_prev = state.further;
      p.gram = state.further + state.rows;
      p.left = history.data<H>();
      p.df = p.left + state.rows * p.history;
      share_out(MultisecantStep{p});
      std::memcpy(state.further, p.fz, state.rows * sizeof(T));
    });
  }
};

}  // namespace

DEQFAST_LOOP(multisecant_loop, MultisecantLoop)

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("multisecant_step", TORCH_BOX(&Flat<&multisecant_step<Kernels>>::Op::call));
  m.impl("multisecant_sums", TORCH_BOX(&multisecant_sums<Kernels>));
  m.impl("multisecant_apply", TORCH_BOX(&multisecant_apply<Kernels>));
  m.impl("multisecant_loop", TORCH_BOX(&loop_op<MultisecantLoop>));
  m.impl("multisecant_transposed", TORCH_BOX(&Flat<&multisecant_transposed<Kernels>>::Op::call));
}

}  // namespace deqfast
