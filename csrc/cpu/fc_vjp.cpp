// fc_vjp on the CPU: grad * act'(pre), element by element.
#include <torch/csrc/stable/library.h>

#include "../common/fc_ops.h"
#include "activations.h"
#include "grain.h"

namespace deqfast {
namespace {

template <class T>
void vjp_range(const VjpParams<T>& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += Simd<T>::lanes) {
    store(a.result + i, activate_backward(load(a.pre + i, end - i), load(a.grad + i, end - i), a.activation), end - i);
  }
}

struct Kernels {
  template <class T>
  static void run(const VjpParams<T>& params, const Tensor&) {
    torch::stable::parallel_for(0, params.size, grain_of(1),
                                [&](int64_t begin, int64_t end) { vjp_range(params, begin, end); });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) { m.impl("fc_vjp", TORCH_BOX(&fc_vjp<Kernels>)); }

}  // namespace deqfast
