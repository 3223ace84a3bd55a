// fc_vjp on a GPU: grad * act'(pre), element by element.
#include <torch/csrc/stable/library.h>

#include "../common/fc_checks.h"
#include "block.cuh"

namespace deqfast {
namespace {

template <class T>
struct VjpParams {
  const T* pre;
  const T* grad;
  T* result;
  int64_t size, activation;
};

// N neighbouring elements per thread.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) fc_vjp_kernel(const VjpParams<T> p) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= p.size) return;
  const auto x = load<T, N>(p.pre + i);
  auto g = load<T, N>(p.grad + i);
#pragma unroll
  for (int e = 0; e < N; ++e) g.value[e] = activate_backward(x.value[e], g.value[e], p.activation);
  store(p.result + i, g);
}

template <class T>
void launch(const VjpParams<T>& params, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  if (params.size == 0) return;
  if (aligned<N>(params.size, params.pre, params.grad, params.result)) {
    const auto grid = static_cast<unsigned>((params.size / N + kThreads - 1) / kThreads);
    fc_vjp_kernel<T, N><<<grid, kThreads, 0, stream>>>(params);
  } else {
    const auto grid = static_cast<unsigned>((params.size + kThreads - 1) / kThreads);
    fc_vjp_kernel<T, 1><<<grid, kThreads, 0, stream>>>(params);
  }
  check_launch("fc_vjp");
}

Tensor fc_vjp(Tensor pre, Tensor grad, int64_t activation) {
  check_fc_vjp("fc_vjp", pre, grad, activation);
  Tensor result = torch::stable::empty_like(pre);
  const torch::stable::accelerator::DeviceGuard guard(pre.get_device_index());
  dispatch_state(pre.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    launch(VjpParams<T>{pre.const_data_ptr<T>(), grad.const_data_ptr<T>(), result.mutable_data_ptr<T>(), pre.numel(),
                        activation},
           current_stream(pre));
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) { m.impl("fc_vjp", TORCH_BOX(&fc_vjp)); }

}  // namespace deqfast
