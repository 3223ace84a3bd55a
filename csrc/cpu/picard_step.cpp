// picard_step on the CPU: z <- z + damping (f(z) - z), residuals, status and best iterate of every running sample.
#include <torch/csrc/stable/library.h>

#include "bound.h"
#include "halves.h"
#include "loops.h"

namespace deqfast {
namespace {

template <class T>
struct PicardStep : SampleStep {
  static constexpr int W = Simd<T>::lanes;
  struct Sample {
    Verdict verdict = {};
    explicit Sample(const PicardStep&) {}
  };

  const PicardParams<T>& a;

  explicit PicardStep(const PicardParams<T>& a) : SampleStep(a.monitor.batch, a.dim), a(a) {}
  int rows() const { return 1; }
  int slots(int part) const { return part == kSweep1 ? kJudgedSlots : 0; }
  bool runs(int64_t row) const { return a.monitor.status[row] == kRunning; }

  DEQFAST_INLINE void sweep1(int64_t row, Chunk chunk, Sums sums) const {
    const T *z = a.z + row * dim + chunk.begin, *fz = a.fz + row * dim + chunk.begin;
    Vec<T> res_sq[2] = {}, f_sq[2] = {};
    for (int64_t d = 0, i = 0; d < chunk.count; d += W, ++i) {
      const Vec<T> f = load(fz + d, chunk.count - d), g = f - load(z + d, chunk.count - d);
      res_sq[i & 1] += g * g;
      f_sq[i & 1] += f * f;
    }
    sums.add(kResSq, res_sq[0] + res_sq[1]);
    sums.add(kFSq, f_sq[0] + f_sq[1]);
  }

  void solve(int64_t row, Sums sums, Sample& sample) const {
    sample.verdict = judge_sums(a.monitor, row, sums, a.rule, Vectors<T>{a.z + row * dim, a.fz + row * dim, dim});
  }

  void put_sums(int64_t, Sums sums, T* to) const {
    for (int slot = 0; slot < kJudgedSlots; ++slot) to[slot] = static_cast<T>(sums.total(slot));
  }
  void take_sums(int64_t, const T*, Sample&) const {}

  DEQFAST_INLINE void sweep2(int64_t row, Chunk chunk, const Sample& sample, Sums) const {
    T* z = a.z + row * dim + chunk.begin;
    const T* fz = a.fz + row * dim + chunk.begin;
    keep_best(sample.verdict, z, a.best + row * dim + chunk.begin, chunk.count);
    if (!sample.verdict.advance || a.rule.last) return;
    if (a.damping == T(1)) {
      memcpy(z, fz, chunk.count * sizeof(T));
      return;
    }
    for (int64_t d = 0; d < chunk.count; d += W) {
      const Vec<T> old = load(z + d, chunk.count - d);
      store(z + d, old + a.damping * (load(fz + d, chunk.count - d) - old), chunk.count - d);
    }
  }
};

struct Kernels : OnHost, Halves<PicardStep> {
  template <class T>
  static void run(const PicardParams<T>& params, const Tensor&) {
    share_out(PicardStep{params});
  }
};

struct PicardLoop {
  static constexpr const char* name = "picard_loop";
  static constexpr size_t numbers = 1;  // damping
  static constexpr int64_t parts = 0;
  static constexpr bool brief_history = false;
  static int64_t more_values(const Checker&, int64_t, int64_t, int64_t) { return 0; }
  static int64_t more_counts(int64_t) { return 0; }
  static void check(int64_t, int64_t, int64_t, Numbers) {}

  static void step(View values, View counts, View status, View, View fz, int64_t max_iter, Numbers numbers) {
    dispatch_state(fz.dtype(), [&](auto zero) {
      using T = decltype(zero);
      const LoopState<T> state(values, counts, status, fz.size(0), fz.size(1));
      const PicardParams<T> p{state.params(fz, max_iter, numbers.rule()), static_cast<T>(numbers.own(0))};
      share_out(PicardStep{p});
    });
  }
};

using Bound = Bind<&picard_step<Binding<Kernels>>, Kernels>;

}  // namespace

DEQFAST_LOOP(picard_loop, PicardLoop)

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("picard_step", TORCH_BOX(&Flat<&picard_step<Kernels>>::Op::call));
  m.impl("picard_sums", TORCH_BOX(&picard_sums<Kernels>));
  m.impl("picard_apply", TORCH_BOX(&picard_apply<Kernels>));
  m.impl("picard_step_bind", TORCH_BOX(&Flat<&Bound::call>::Op::call));
  m.impl("picard_loop", TORCH_BOX(&loop_op<PicardLoop>));
}

}  // namespace deqfast
