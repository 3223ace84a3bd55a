// The judgement passed on every sample after every evaluation of f: residuals, best iterate, status.
// Shared by the CPU and CUDA kernels; `deqfast/ops/steps/reference.py` (_judge) is the specification.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "constants.h"

#ifdef __CUDACC__
#define DEQFAST_HD __host__ __device__
#else
#define DEQFAST_HD
#endif

namespace deqfast {

template <class T>
struct Limits;
template <>
struct Limits<float> {
  static constexpr float tiny = FLT_MIN, max = FLT_MAX, infinity = HUGE_VALF;
};
template <>
struct Limits<double> {
  static constexpr double tiny = DBL_MIN, max = DBL_MAX, infinity = HUGE_VAL;
};

template <class T>
struct StopRule {
  int64_t k;      // evaluations of f before this one
  T tol;
  bool absolute;  // tol bounds |f(z) - z| instead of |f(z) - z| / |f(z)|
  T stall_floor;  // relative residual below which a sample may stall; 0: never
  bool last;      // no further evaluation follows, so no step is taken
};

template <class T>
struct Monitor {
  int8_t* status;       // (B,)
  int32_t* iterations;  // (B,)
  T* residual;          // (2, B): relative and absolute residual of the best iterate
  T* gain;              // (2, B): relative residual at the last gain of 5 %, and its iteration
  int32_t* active;      // (1,): samples still running
  int64_t batch;
};

struct Verdict {
  bool improved;  // z is the best iterate so far: keep it
  bool broken;    // f(z) is not finite: go back to the best iterate
  bool advance;   // the sample takes another step
};

// `res_sq` and `f_sq` are |f(z) - z|^2 and |f(z)|^2. The caller decrements `active` when a sample neither advances
// nor is running; that is whenever its status changed.
template <class T>
DEQFAST_HD Verdict judge(const Monitor<T>& m, int64_t row, T res_sq, T f_sq, const StopRule<T>& rule) {
  T* rel_best = m.residual + row;
  T* abs_best = m.residual + m.batch + row;
  T* gain_rel = m.gain + row;
  T* gain_k = m.gain + m.batch + row;
  m.iterations[row] = static_cast<int32_t>(rule.k + 1);

  const T res_abs = sqrt(res_sq), f_norm = sqrt(f_sq);
  if (!(res_abs <= Limits<T>::max && f_norm <= Limits<T>::max)) {
    m.status[row] = kNonfinite;
    return {false, true, false};
  }
  const T quotient = res_abs / (f_norm > Limits<T>::tiny ? f_norm : Limits<T>::tiny);
  const T res_rel = quotient < Limits<T>::max ? quotient : Limits<T>::max;
  const T measure = rule.absolute ? res_abs : res_rel;
  const bool improved = measure < (rule.absolute ? *abs_best : *rel_best);
  if (improved) {
    *rel_best = res_rel;
    *abs_best = res_abs;
  }
  if (res_rel < static_cast<T>(kStallGain) * *gain_rel) {
    *gain_rel = res_rel;
    *gain_k = static_cast<T>(rule.k);
  }
  if (measure <= rule.tol) {
    m.status[row] = kConverged;
  } else if (*rel_best < rule.stall_floor && static_cast<T>(rule.k) - *gain_k >= kStallIterations) {
    m.status[row] = kStalled;
  }
  return {improved, false, m.status[row] == kRunning};
}

}  // namespace deqfast
