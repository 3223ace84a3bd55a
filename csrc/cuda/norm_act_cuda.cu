// norm_act on a GPU: out = relu(GroupNorm(y)), and its backward. See norm.cuh and ../cpu/norm_act.cpp.
#include <torch/csrc/stable/library.h>

#include "norm.cuh"

namespace deqfast {
namespace {

template <class T, class Y, int N, int K>
__global__ void __launch_bounds__(kThreads, 2) norm_act_kernel(const NormActParams<T, Y> p) {
  __shared__ BlockSums<T, 1> sums;
  const Group<N> group(p.shape);
  const Y* y = p.y + group.offset;
  T v[K > 0 ? K : 1][N], total = 0;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    load_values(y + at, v[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) total += v[k][i];
  }, Nothing());
  const T count = group.template count<T>(), mean = block_total(sums, total) / count;
  total = 0;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    if constexpr (K == 0) load_values(y + at, v[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) total += (v[k][i] - mean) * (v[k][i] - mean);
  }, Nothing());
  const T rstd = inverse_deviation(block_total(sums, total), count, p.eps);
  T weight[N], bias[N];
  sweep<K>(group, [&](int c) {
    load_values(p.weight + group.first + c, weight);
    load_values(p.bias + group.first + c, bias);
  }, [&](int k, int at) {
    if constexpr (K == 0) load_values(y + at, v[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) v[k][i] = relu((v[k][i] - mean) * rstd * weight[i] + bias[i]);
    store_values(p.out + group.offset + at, v[k]);
  }, Nothing());
  if (threadIdx.x == 0) {
    p.mean[blockIdx.x] = mean;
    p.rstd[blockIdx.x] = rstd;
  }
}

template <class T, class Y, int N, int K>
__global__ void __launch_bounds__(kThreads, 1) norm_act_backward_kernel(const NormActBackwardParams<T, Y> p) {
  __shared__ BlockSums<T, 2> sums;
  __shared__ T buffer[2 * N][kThreads];
  const Group<N> group(p.shape);
  const T mean = p.mean[blockIdx.x], rstd = p.rstd[blockIdx.x];
  T weight[N], bias[N], normal[K > 0 ? K : 1][N], grad[K > 0 ? K : 1][N];
  const auto read_channels = [&](int c) {
    load_values(p.weight + group.first + c, weight);
    load_values(p.bias + group.first + c, bias);
  };
  const auto read = [&](int k, int at) {
    load_values(p.y + group.offset + at, normal[k]);
    load_values(p.grad + group.offset + at, grad[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      normal[k][i] = (normal[k][i] - mean) * rstd;
      if (normal[k][i] * weight[i] + bias[i] <= T(0)) grad[k][i] = 0;
    }
  };
  AffineSums<T, N> affine;
  sweep<K>(group, [&](int c) {
    read_channels(c);
    affine.clear();
  }, [&](int k, int at) {
    read(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) affine.add(i, grad[k][i], normal[k][i]);
  }, [&](int c) {
    affine.finish(group, buffer, weight, p.grad_affine + group.channel + c, p.shape.batch * p.shape.channels);
  });
  affine.finish_means(sums, group.template count<T>());
  sweep<K>(group, read_channels, [&](int k, int at) {
    if constexpr (K == 0) read(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) grad[k][i] = affine.before(grad[k][i], normal[k][i], weight[i], rstd);
    store_values(p.grad_y + group.offset + at, grad[k]);
  }, Nothing());
}

template <class T, class Y>
void launch(const NormActParams<T, Y>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Y)>(p.shape, [&](auto n, auto k) {
    constexpr int N = n.value, K = k.value;
    norm_act_kernel<T, Y, N, K><<<groups_grid(p.shape, "norm_act"), kThreads, 0, stream>>>(p);
  }, p.y, p.weight, p.bias, p.out);
  check_launch("norm_act");
}

template <class T, class Y>
void launch(const NormActBackwardParams<T, Y>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Y)>(p.shape, [&](auto n, auto k) {
    constexpr int N = n.value, K = k.value;
    norm_act_backward_kernel<T, Y, N, K><<<groups_grid(p.shape, "norm_act_backward"), kThreads, 0, stream>>>(p);
  }, p.grad, p.y, p.weight, p.bias, p.grad_y);
  check_launch("norm_act_backward");
}

struct Kernels {
  using BFloat16 = __nv_bfloat16;
  static constexpr bool native = false;

  template <class Params>
  static void run(const Params& params, const Tensor& y) {
    if (params.shape.batch == 0) return;
    const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
    launch(params, current_stream(y));
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CUDA, m) {
  m.impl("norm_act", TORCH_BOX(&norm_act<Kernels>));
  m.impl("norm_act_backward", TORCH_BOX(&norm_act_backward<Kernels>));
}

}  // namespace deqfast
