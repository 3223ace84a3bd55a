// fc_vjp on the CPU: grad * act'(pre), element by element.
#include <torch/csrc/stable/library.h>

#include "../common/fc_checks.h"
#include "activations.h"

namespace deqfast {
namespace {

constexpr int64_t kGrain = 16384;  // elements for which a thread is worth its start

template <class T>
struct VjpArgs {
  const T* pre;
  const T* grad;
  T* result;
  int64_t activation;
};

template <class T>
DEQFAST_INLINE void vjp_range(const VjpArgs<T>& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += Simd<T>::lanes) {
    store(a.result + i, activate_backward(load(a.pre + i, end - i), load(a.grad + i, end - i), a.activation), end - i);
  }
}

DEQFAST_CLONES void run(const VjpArgs<float>& a, int64_t begin, int64_t end) { vjp_range(a, begin, end); }
DEQFAST_CLONES void run(const VjpArgs<double>& a, int64_t begin, int64_t end) { vjp_range(a, begin, end); }

Tensor fc_vjp(Tensor pre, Tensor grad, int64_t activation) {
  check_fc_vjp("fc_vjp", pre, grad, activation);
  Tensor result = torch::stable::empty_like(pre);
  dispatch_state(pre.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const VjpArgs<T> args{pre.const_data_ptr<T>(), grad.const_data_ptr<T>(), result.mutable_data_ptr<T>(), activation};
    torch::stable::parallel_for(0, pre.numel(), kGrain, [&](int64_t begin, int64_t end) { run(args, begin, end); });
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) { m.impl("fc_vjp", TORCH_BOX(&fc_vjp)); }

}  // namespace deqfast
