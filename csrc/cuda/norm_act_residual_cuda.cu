// norm_act_residual on a GPU: f = GroupNorm3(relu(z + GroupNorm2(y + x))), and its backward. Both
// normalisations share their groups. See norm.cuh and ../cpu/norm_act_residual.cpp.
#include <torch/csrc/stable/library.h>

#include "norm.cuh"

namespace deqfast {
namespace {

template <class T, class Y, class Z, int N, int K>
__global__ void __launch_bounds__(kThreads, 2) norm_act_residual_kernel(const ResidualParams<T, Y, Z> p) {
  __shared__ BlockSums<T, 1> sums;
  const Group<N> group(p.shape);
  const T count = group.template count<T>();
  T v[K > 0 ? K : 1][N], z[K > 0 ? K : 1][N], weight2[N], bias2[N], weight3[N], bias3[N];
  T mean2 = 0, rstd2 = 0, mean3 = 0, rstd3 = 0, total = 0;
  const auto read_sum = [&](int k, int at) {
    T x[N];
    load_values(p.y + group.offset + at, v[k]);
    load_values(p.x + group.offset + at, x);
#pragma unroll
    for (int i = 0; i < N; ++i) v[k][i] += x[i];
  };
  const auto read_z = [&](int k, int at) { load_values(p.z + group.offset + at, z[k]); };
  const auto activate = [&](int k) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[k][i] = relu(z[k][i] + ((v[k][i] - mean2) * rstd2 * weight2[i] + bias2[i]));
  };
  const auto read_activation = [&](int k, int at) {
    read_sum(k, at);
    read_z(k, at);
    activate(k);
  };
  const auto read_channels = [&](int c) {
    load_values(p.weight2 + group.first + c, weight2);
    load_values(p.bias2 + group.first + c, bias2);
  };
  const auto add_square = [&](int k, T mean) {
#pragma unroll
    for (int i = 0; i < N; ++i) total += (v[k][i] - mean) * (v[k][i] - mean);
  };

  sweep<K>(group, Nothing(), [&](int k, int at) {
    read_sum(k, at);
    if constexpr (K > 0) read_z(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) total += v[k][i];
  }, Nothing());
  mean2 = block_total(sums, total) / count;
  total = 0;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    if constexpr (K == 0) read_sum(k, at);
    add_square(k, mean2);
  }, Nothing());
  rstd2 = inverse_deviation(block_total(sums, total), count, p.eps);

  total = 0;
  sweep<K>(group, read_channels, [&](int k, int at) {
    if constexpr (K == 0) {
      read_activation(k, at);
    } else {
      activate(k);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) total += v[k][i];
  }, Nothing());
  mean3 = block_total(sums, total) / count;
  total = 0;
  sweep<K>(group, read_channels, [&](int k, int at) {
    if constexpr (K == 0) read_activation(k, at);
    add_square(k, mean3);
  }, Nothing());
  rstd3 = inverse_deviation(block_total(sums, total), count, p.eps);

  sweep<K>(group, [&](int c) {
    if constexpr (K == 0) read_channels(c);
    load_values(p.weight3 + group.first + c, weight3);
    load_values(p.bias3 + group.first + c, bias3);
  }, [&](int k, int at) {
    if constexpr (K == 0) read_activation(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[k][i] = (v[k][i] - mean3) * rstd3 * weight3[i] + bias3[i];
    }
    store_values(p.f + group.offset + at, v[k]);
  }, Nothing());
  if (threadIdx.x == 0) {
    p.mean2[blockIdx.x] = mean2;
    p.rstd2[blockIdx.x] = rstd2;
    p.mean3[blockIdx.x] = mean3;
    p.rstd3[blockIdx.x] = rstd3;
  }
}

template <class T, class Y, class Z, int N, int K>
__global__ void __launch_bounds__(kThreads, 1)
    norm_act_residual_backward_kernel(const ResidualBackwardParams<T, Y, Z> p) {
  __shared__ BlockSums<T, 2> sums;
  __shared__ T buffer[2 * N][kThreads];
  const Group<N> group(p.shape);
  const T count = group.template count<T>();
  const T mean2 = p.mean2[blockIdx.x], rstd2 = p.rstd2[blockIdx.x];
  const T mean3 = p.mean3[blockIdx.x], rstd3 = p.rstd3[blockIdx.x];
  const int64_t plane = p.shape.batch * p.shape.channels;
  constexpr int kSlots = K > 0 ? K : 1;
  // The result of the second normalisation, the sum before the relu, and the gradient on its way back.
  T normal2[kSlots][N], before_relu[kSlots][N], grad[kSlots][N], weight2[N], bias2[N], weight3[N];
  const auto normal3 = [&](int k, int i) { return (relu(before_relu[k][i]) - mean3) * rstd3; };
  const auto read_channels = [&](int c) {
    load_values(p.weight2 + group.first + c, weight2);
    load_values(p.bias2 + group.first + c, bias2);
    load_values(p.weight3 + group.first + c, weight3);
  };
  const auto read = [&](int k, int at) {
    T x[N];
    load_values(p.y + group.offset + at, normal2[k]);
    load_values(p.x + group.offset + at, x);
    load_values(p.z + group.offset + at, before_relu[k]);
    load_values(p.grad + group.offset + at, grad[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      normal2[k][i] = (normal2[k][i] + x[i] - mean2) * rstd2;
      before_relu[k][i] += normal2[k][i] * weight2[i] + bias2[i];
    }
  };

  AffineSums<T, N> affine3, affine2;
  sweep<K>(group, [&](int c) {
    read_channels(c);
    affine3.clear();
  }, [&](int k, int at) {
    read(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) affine3.add(i, grad[k][i], normal3(k, i));
  }, [&](int c) {
    affine3.finish(group, buffer, weight3, p.grad_affine + 2 * plane + group.channel + c, plane);
  });
  affine3.finish_means(sums, count);

  const auto pass_norm3 = [&](int k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const T g = affine3.before(grad[k][i], normal3(k, i), weight3[i], rstd3);
      grad[k][i] = before_relu[k][i] <= T(0) ? T(0) : g;
    }
  };
  sweep<K>(group, [&](int c) {
    if constexpr (K == 0) read_channels(c);
    affine2.clear();
  }, [&](int k, int at) {
    if constexpr (K == 0) read(k, at);
    pass_norm3(k);
    store_values(p.grad_z + group.offset + at, grad[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) affine2.add(i, grad[k][i], normal2[k][i]);
  }, [&](int c) { affine2.finish(group, buffer, weight2, p.grad_affine + group.channel + c, plane); });
  affine2.finish_means(sums, count);

  sweep<K>(group, [&](int c) {
    if constexpr (K == 0) read_channels(c);
  }, [&](int k, int at) {
    if constexpr (K == 0) {
      read(k, at);
      pass_norm3(k);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) grad[k][i] = affine2.before(grad[k][i], normal2[k][i], weight2[i], rstd2);
    store_values(p.grad_sum + group.offset + at, grad[k]);
  }, Nothing());
}

template <class T, class Y, class Z>
void launch(const ResidualParams<T, Y, Z>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Z)>(p.shape, [&](auto n, auto k) {
    constexpr int N = n.value, K = k.value;
    const unsigned grid = groups_grid(p.shape, "norm_act_residual");
    norm_act_residual_kernel<T, Y, Z, N, K><<<grid, kThreads, 0, stream>>>(p);
  }, p.y, p.x, p.z, p.weight2, p.bias2, p.weight3, p.bias3, p.f);
  check_launch("norm_act_residual");
}

template <class T, class Y, class Z>
void launch(const ResidualBackwardParams<T, Y, Z>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Z)>(p.shape, [&](auto n, auto k) {
    constexpr int N = n.value, K = k.value;
    const unsigned grid = groups_grid(p.shape, "norm_act_residual_backward");
    norm_act_residual_backward_kernel<T, Y, Z, N, K><<<grid, kThreads, 0, stream>>>(p);
  }, p.grad, p.y, p.x, p.z, p.weight2, p.bias2, p.weight3, p.grad_sum, p.grad_z);
  check_launch("norm_act_residual_backward");
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
  m.impl("norm_act_residual", TORCH_BOX(&norm_act_residual<Kernels>));
  m.impl("norm_act_residual_backward", TORCH_BOX(&norm_act_residual_backward<Kernels>));
}

}  // namespace deqfast
