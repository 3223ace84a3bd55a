// fc_vjp on a GPU: grad * act'(pre), element by element.
#include <torch/csrc/stable/library.h>

#include "../common/fc_ops.h"
#include "block.cuh"

namespace deqfast {
namespace {

// N adjacent elements per thread.
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

struct Kernels {
  template <class T>
  static void run(const VjpParams<T>& params, const Tensor& pre) {
    const torch::stable::accelerator::DeviceGuard guard(pre.get_device_index());
    launch(params, current_stream(pre));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) { m.impl("fc_vjp", TORCH_BOX(&fc_vjp<Kernels>)); }

}  // namespace deqfast
