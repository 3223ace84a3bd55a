// The judgement of every sample after every evaluation of f: residuals, best iterate, status.
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
  static constexpr float tiny = FLT_MIN, epsilon = FLT_EPSILON, max = FLT_MAX, infinity = HUGE_VALF;
};
template <>
struct Limits<double> {
  static constexpr double tiny = DBL_MIN, epsilon = DBL_EPSILON, max = DBL_MAX, infinity = HUGE_VAL;
};

// The numbers of the stop rule in the order of `StopRule` in deqfast/ops/steps/__init__.py. An op takes each as an
// argument of its own, see flat.h.
struct RuleNumbers {
  double tol;
  double absolute;     // not 0: tol bounds |f(z) - z| instead of |f(z) - z| / (|f(z)| + offset)
  double stall_floor;  // relative residual below which a sample may stall; 0: never
  double offset;
  double maximum;      // not 0: norms are the largest magnitudes, not the Euclidean ones
};

// The stop rule as a kernel applies it to one evaluation.
template <class T>
struct StopRule {
  int64_t k;      // evaluations of f before this one; negative: see `rule_at`
  T tol;
  bool absolute;
  T stall_floor;
  T offset;
  bool maximum;
  bool last;      // no further evaluation follows, so no step is taken
  T reduction;    // largest fraction of the first residual that may be left if |f(z)| has outgrown the start
  T atol;         // |f(z) - z| that counts as small for any first residual
  T rounding;     // unit of f's rounding
};

template <class T>
StopRule<T> rule_of(int64_t k, bool last, const RuleNumbers& numbers) {
  const double reduction = kReductionPerTol * numbers.tol, low = numbers.stall_floor / kRoundingsOfStallFloor;
  const double epsilon = Limits<T>::epsilon;
  StopRule<T> rule;
  rule.k = k;
  rule.last = last;
  rule.tol = static_cast<T>(numbers.tol);
  rule.absolute = numbers.absolute != 0;
  rule.stall_floor = static_cast<T>(numbers.stall_floor);
  rule.offset = static_cast<T>(numbers.offset);
  rule.maximum = numbers.maximum != 0;
  rule.reduction = static_cast<T>(reduction < kReduction ? reduction : kReduction);
  rule.atol = static_cast<T>(rule.absolute ? numbers.tol : numbers.offset * numbers.tol);
  rule.rounding = static_cast<T>(low > epsilon ? low : epsilon);
  return rule;
}

// The rule for a sample that has used this number of evaluations. A negative k is -max_iter: in a loop on the device the
// host knows neither the number nor whether another evaluation follows. Any number is safe: a negative one counts as 0.
template <class T>
DEQFAST_HD StopRule<T> rule_at(StopRule<T> rule, int32_t evaluations) {
  if (rule.k < 0) {
    const int64_t own = evaluations > 0 ? evaluations : 0;
    rule.last = own + 1 >= -rule.k;
    rule.k = own;
  }
  return rule;
}

// Rows of a monitor's progress: the relative residual and the iteration of the last gain of 5 %, |g| of the first
// evaluation, the size of the start, |f(z)| of the best iterate, and the least residual that tol was compared with.
enum Progress { kGain, kGainIteration, kFirstResidual, kStartSize, kBestSize, kLeast, kProgress };

template <class T>
struct Monitor {
  int8_t* status;       // (B,)
  int32_t* iterations;  // (B,)
  T* residual;          // (2, B): relative and absolute residual of the best iterate
  T* progress;          // (kProgress, B)
  int32_t* active;      // (1,): samples still running
  int64_t batch;
};

struct Verdict {
  bool improved;  // z is the best iterate so far: keep it
  bool broken;    // f(z) is not finite: go back to the best iterate
  bool advance;   // the sample takes another step
};

// A number for f(z) - z and one for f(z).
template <class T>
struct Norms {
  T res, f;
};

// Whether a sum of squares gives the length of a vector: it has not overflowed, and underflow of its terms has cost
// less than its rounding.
template <class T>
DEQFAST_HD bool is_sound(T square) {
  return square >= Limits<T>::tiny / Limits<T>::epsilon && square <= Limits<T>::max;
}

// |x|, or infinity if x is NaN, which no comparison would keep.
template <class T>
DEQFAST_HD T magnitude(T x) {
  const T size = x < 0 ? -x : x;
  return size <= Limits<T>::max ? size : Limits<T>::infinity;
}

template <class T>
DEQFAST_HD T larger(T a, T b) {
  return a > b ? a : b;
}

// The divisor of a vector before its squares are added up again, from its largest magnitude.
template <class T>
DEQFAST_HD Norms<T> scale_of(const Norms<T>& largest) {
  return {larger(largest.res, Limits<T>::tiny), larger(largest.f, Limits<T>::tiny)};
}

// The length of a vector by its sum of squares if that is sound, else by the sum of squares of the vector over `scale`.
template <class T>
DEQFAST_HD T length_of(T square, T scale, T scaled_square) {
  if (is_sound(square)) return sqrt(square);
  const T length = scale * sqrt(scaled_square);
  return scale <= Limits<T>::max && length > Limits<T>::max ? Limits<T>::max : length;
}

// The norms of the rule. `vectors` are f(z) - z and f(z). They are read a second time for their largest magnitudes, if
// these are the norms or `squares`, the plain sums, are not sound. If these are not sound, a third pass sums the
// squares of both over a scale.
template <class T, class Vectors>
__attribute__((always_inline)) DEQFAST_HD inline Norms<T> norms_of(const StopRule<T>& rule, const Norms<T>& squares,
                                                                   const Vectors& vectors) {
  if (!rule.maximum && is_sound(squares.res) && is_sound(squares.f)) {
    return {static_cast<T>(sqrt(squares.res)), static_cast<T>(sqrt(squares.f))};
  }
  const Norms<T> largest = vectors.largest();
  if (rule.maximum) return largest;
  const Norms<T> scale = scale_of(largest), scaled = vectors.squares_over(scale);
  return {length_of(squares.res, scale.res, scaled.res), length_of(squares.f, scale.f, scaled.f)};
}

// Whether a residual that meets the tolerance belongs to a fixed point: see Evaluation.converged of the specification.
template <class T>
DEQFAST_HD bool is_settled(const Norms<T>& norms, T first, T start, const StopRule<T>& rule) {
  if (norms.f <= static_cast<T>(kGrowth) * start && norms.res <= first) return true;
  return norms.res + rule.rounding * norms.f <= larger(first * rule.reduction, rule.atol);
}

// The caller decrements `active` when the status of a sample has changed: it neither advances nor runs then.
template <class T>
DEQFAST_HD Verdict judge(const Monitor<T>& m, int64_t row, const Norms<T>& norms, const StopRule<T>& rule) {
  T* rel_best = m.residual + row;
  T* abs_best = m.residual + m.batch + row;
  T* progress[kProgress];
  for (int i = 0; i < kProgress; ++i) progress[i] = m.progress + i * m.batch + row;
  m.iterations[row] = static_cast<int32_t>(rule.k + 1);

  const T res_abs = norms.res;
  if (!(res_abs <= Limits<T>::max && norms.f <= Limits<T>::max)) {
    m.status[row] = kNonfinite;
    return {false, true, false};
  }
  const T quotient = res_abs > 0 ? res_abs / (norms.f + rule.offset) : T(0);
  const T res_rel = quotient < Limits<T>::max ? quotient : Limits<T>::max;
  if (rule.k == 0) {
    *progress[kFirstResidual] = res_abs;
    *progress[kStartSize] = larger(norms.f, res_abs);
  }
  const T measure = rule.absolute ? res_abs : res_rel;
  const bool converged =
      measure <= rule.tol && is_settled(norms, *progress[kFirstResidual], *progress[kStartSize], rule);
  const T length = res_abs + rule.rounding * norms.f, best_length = *abs_best + rule.rounding * *progress[kBestSize];
  const bool improved = converged || (length < Limits<T>::max ? length : Limits<T>::max) < best_length;
  if (improved) {
    *rel_best = res_rel;
    *abs_best = res_abs;
    *progress[kBestSize] = norms.f;
  }
  if (res_rel < static_cast<T>(kStallGain) * *progress[kGain]) {
    *progress[kGain] = res_rel;
    *progress[kGainIteration] = static_cast<T>(rule.k);
  }
  if (measure < *progress[kLeast]) *progress[kLeast] = measure;
  const bool has_met = *progress[kLeast] <= rule.tol;
  const bool idle = static_cast<T>(rule.k) - *progress[kGainIteration] >= kStallIterations;
  if (converged) {
    m.status[row] = kConverged;
  } else if (*rel_best < rule.stall_floor && idle && !has_met) {
    m.status[row] = kStalled;
  } else if (rule.last) {
    m.status[row] = has_met ? kEscaped : kMaxIter;
  }
  return {improved, false, m.status[row] == kRunning};
}

}  // namespace deqfast
