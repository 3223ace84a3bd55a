// What the CPU solver kernels share: the end of sweep 1 and the choice of threads.
#pragma once

#include "../common/monitor.h"
#include "simd.h"

namespace deqfast {

// Judge one sample and carry the verdict out on its rows: keep the best iterate or return to it, leave the count of
// running samples.
template <class T>
DEQFAST_INLINE Verdict settle(const Monitor<T>& monitor, int64_t row, T res_sq, T f_sq, const StopRule<T>& rule, T* z,
                              T* best, int64_t dim) {
  const Verdict verdict = judge(monitor, row, res_sq, f_sq, rule);
  if (verdict.improved) memcpy(best, z, dim * sizeof(T));
  if (verdict.broken) memcpy(z, best, dim * sizeof(T));
  if (!verdict.advance) __atomic_fetch_sub(monitor.active, 1, __ATOMIC_RELAXED);
  return verdict;
}

// Below about 16,000 elements a thread costs more than it saves.
inline int64_t rows_per_thread(int64_t dim) { return dim < 16384 ? 16384 / (dim > 0 ? dim : 1) : 1; }

}  // namespace deqfast
