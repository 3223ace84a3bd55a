// Common parts of the solvers' steps on the CPU: the judgement between the sweeps, and its consequences.
#pragma once

#include "../common/monitor.h"
#include "samples.h"

namespace deqfast {

// What the kernels of all steps here are.
struct OnHost {
  static constexpr bool kOnHost = true;
};

// The first slots of a solver step's first sweep: |f(z) - z|^2 and |f(z)|^2.
constexpr int kResSq = 0, kFSq = 1, kJudgedSlots = 2;

// f(z) - z and f(z) of a sample.
template <class T>
struct Vectors {
  static constexpr int W = Simd<T>::lanes;
  const T *z, *fz;
  int64_t dim;

  DEQFAST_INLINE Norms<T> largest() const {
    Norms<Vec<T>> largest = {};
    for_elements([&](Vec<T> g, Vec<T> f) DEQFAST_ALWAYS_INLINE {
      g = magnitudes(g);
      f = magnitudes(f);
      largest = {select(g > largest.res, g, largest.res), select(f > largest.f, f, largest.f)};
    });
    Norms<T> result = {};
    for (int i = 0; i < W; ++i) result = {larger(result.res, largest.res[i]), larger(result.f, largest.f[i])};
    return result;
  }

  DEQFAST_INLINE Norms<T> squares_over(const Norms<T>& scale) const {
    Norms<Vec<double>> sums = {};  // of a whole sample, not of a chunk: float would lose digits
    for_elements([&](Vec<T> g, Vec<T> f) DEQFAST_ALWAYS_INLINE {
      g /= scale.res;
      f /= scale.f;
      sums = {sums.res + widened(g * g), sums.f + widened(f * f)};
    });
    return {static_cast<T>(sum<double>(sums.res)), static_cast<T>(sum<double>(sums.f))};
  }

 private:
  static DEQFAST_INLINE Vec<T> magnitudes(Vec<T> x) {
    const Vec<T> size = select(x < T(0), -x, x);
    return select(size <= Limits<T>::max, size, Limits<T>::infinity);
  }
  template <class Body>
  DEQFAST_INLINE void for_elements(const Body& body) const {
    for (int64_t d = 0; d < dim; d += W) {
      const Vec<T> f = load(fz + d, dim - d);
      body(f - load(z + d, dim - d), f);
    }
  }
};

template <class T>
DEQFAST_INLINE Verdict judge_sums(const Monitor<T>& monitor, int64_t row, Sums sums, const StopRule<T>& rule,
                                  const Vectors<T>& vectors) {
  const Norms<T> squares{static_cast<T>(sums.total(kResSq)), static_cast<T>(sums.total(kFSq))};
  const Verdict verdict = judge(monitor, row, norms_of(rule, squares, vectors), rule);
  if (!verdict.advance) __atomic_fetch_sub(monitor.active, 1, __ATOMIC_RELAXED);
  return verdict;
}

// Keep a chunk of the best iterate or return to it.
template <class T>
DEQFAST_INLINE void keep_best(const Verdict& verdict, T* z, T* best, int64_t count) {
  if (verdict.improved) memcpy(best, z, count * sizeof(T));
  if (verdict.broken) memcpy(z, best, count * sizeof(T));
}

}  // namespace deqfast
