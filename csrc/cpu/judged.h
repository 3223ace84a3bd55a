// What the steps of the solvers share on the CPU: the judgement passed between the sweeps, and what follows from it.
#pragma once

#include "../common/monitor.h"
#include "samples.h"

namespace deqfast {

// The first slots of a solver step's first sweep: |f(z) - z|^2 and |f(z)|^2.
constexpr int kResSq = 0, kFSq = 1, kJudgedSlots = 2;

template <class T>
DEQFAST_INLINE Verdict judge_sums(const Monitor<T>& monitor, int64_t row, Sums sums, const StopRule<T>& rule) {
  const Verdict verdict =
      judge(monitor, row, static_cast<T>(sums.total(kResSq)), static_cast<T>(sums.total(kFSq)), rule);
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
