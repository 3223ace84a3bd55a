// The activations of the fully connected cell on vectors. In float they are polynomials and one exponential. The error
// of tanh is at most 1.4 units in the last place, and gelu's is torch's. In double they call the math library per lane.
#pragma once

#include "../common/fc.h"
#include "simd.h"

namespace deqfast {

// exp(x) for x in [-87, 88], to 1 unit in the last place: 2^n times a polynomial on |r| <= log(2) / 2 (Cephes, expf).
DEQFAST_INLINE Vec<float> exp_in_range(Vec<float> x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits of the sum
  const Vec<float> shifted = x * 1.44269504088896341f + kShift, n = shifted - kShift;
  const Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * bits_as<float>((bits_as<uint32_t>(shifted) + 127) << 23);
}

DEQFAST_INLINE Vec<float> magnitude(Vec<float> x) { return select(x < 0.0f, -x, x); }

DEQFAST_INLINE Vec<float> tanh_of(Vec<float> x) {
  const Vec<float> size = magnitude(x), square = x * x;
  Vec<float> p = square * -5.70498872745e-3f + 2.06390887954e-2f;  // Cephes, tanhf
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec<float> near_zero = p * square * x + x;
  const Vec<float> far = 1.0f - 2.0f / (exp_in_range(2.0f * select(size > 10.0f, 10.0f, size)) + 1.0f);
  return select(size < 0.625f, near_zero, select(x < 0.0f, -far, far));
}

// x P(x^2) / Q(x^2), the rational function of Eigen and XLA; |erf| rounds to 1 from 3.92 on.
DEQFAST_INLINE Vec<float> erf_of(Vec<float> x) {
  x = select(x > 4.0f, 4.0f, select(x < -4.0f, -4.0f, x));
  const Vec<float> square = x * x;
  Vec<float> p = square * -2.72614225801306e-10f + 2.77068142495902e-08f;
  p = p * square - 2.10102402082508e-06f;
  p = p * square - 5.69250639462346e-05f;
  p = p * square - 7.34990630326855e-04f;
  p = p * square - 2.95459980854025e-03f;
  p = p * square - 1.60960333262415e-02f;
  Vec<float> q = square * -1.45660718464996e-05f - 2.13374055278905e-04f;
  q = q * square - 1.68282697438203e-03f;
  q = q * square - 7.37332916720468e-03f;
  q = q * square - 1.42647390514189e-02f;
  return x * p / q;
}

DEQFAST_INLINE Vec<float> activate(Vec<float> x, int64_t activation) {
  switch (activation) {
    case kRelu:
      return select(x <= 0.0f, 0.0f, x);
    case kTanh:
      return tanh_of(x);
    case kGelu:
      return 0.5f * x * (1.0f + erf_of(x * static_cast<float>(kRootHalf)));
    default:
      return x;
  }
}

DEQFAST_INLINE Vec<float> activate_backward(Vec<float> x, Vec<float> grad, int64_t activation) {
  switch (activation) {
    case kRelu:
      return select(x <= 0.0f, 0.0f, grad);
    case kTanh: {
      const Vec<float> value = tanh_of(x);
      return grad * (1.0f - value * value);
    }
    case kGelu: {
      const Vec<float> exponent = -0.5f * x * x;
      const Vec<float> bell = exp_in_range(select(exponent < -87.0f, -87.0f, exponent));
      const Vec<float> density = select(exponent < -87.0f, 0.0f, bell * static_cast<float>(kRootOfTwoPiInverse));
      return grad * (0.5f * (1.0f + erf_of(x * static_cast<float>(kRootHalf))) + x * density);
    }
    default:
      return grad;
  }
}

DEQFAST_INLINE Vec<double> activate(Vec<double> x, int64_t activation) {
  double lanes[Simd<double>::lanes];
  for (int i = 0; i < Simd<double>::lanes; ++i) lanes[i] = activate<double>(x[i], activation);
  return load(lanes, Simd<double>::lanes);
}

DEQFAST_INLINE Vec<double> activate_backward(Vec<double> x, Vec<double> grad, int64_t activation) {
  double lanes[Simd<double>::lanes];
  for (int i = 0; i < Simd<double>::lanes; ++i) lanes[i] = activate_backward<double>(x[i], grad[i], activation);
  return load(lanes, Simd<double>::lanes);
}

}  // namespace deqfast
