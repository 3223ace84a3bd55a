// The fully connected cell z -> act(W z + c): its activations, and the checks and results of its ops.
// Shared by the CPU and CUDA kernels; `deqfast/ops/fc/__init__.py` explains the arguments.
#pragma once

#include "monitor.h"

namespace deqfast {

constexpr double kRootHalf = 0.70710678118654752440;         // sqrt(1 / 2)
constexpr double kRootOfTwoPiInverse = 0.39894228040143267794;  // 1 / sqrt(2 pi)

template <class T>
DEQFAST_HD T activate(T x, int64_t activation) {
  switch (activation) {
    case kRelu:
      return x <= 0 ? T(0) : x;  // NaN stays NaN
    case kTanh:
      return tanh(x);
    case kGelu:
      return T(0.5) * x * (T(1) + erf(x * static_cast<T>(kRootHalf)));
    default:
      return x;
  }
}

// grad * act'(x).
template <class T>
DEQFAST_HD T activate_backward(T x, T grad, int64_t activation) {
  switch (activation) {
    case kRelu:
      return x <= 0 ? T(0) : grad;
    case kTanh: {
      const T value = tanh(x);
      return grad * (T(1) - value * value);
    }
    case kGelu: {
      const T density = exp(T(-0.5) * x * x) * static_cast<T>(kRootOfTwoPiInverse);
      return grad * (T(0.5) * (T(1) + erf(x * static_cast<T>(kRootHalf))) + x * density);
    }
    default:
      return grad;
  }
}

}  // namespace deqfast
