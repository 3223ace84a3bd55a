// norm_act_residual on a GPU: f = GroupNorm3(relu(z + GroupNorm2(y + x))), and its backward. Both
// normalisations share their groups. See norm.cuh and ../cpu/norm_act_residual.cpp.
#include <torch/csrc/stable/library.h>

#include "norm.cuh"

namespace deqfast {
namespace {

template <class T, class Y, class Z, int N, int K, int Threads>
__global__ void __launch_bounds__(Threads, Threads < kThreads ? 8 : 2)
    norm_act_residual_kernel(const ResidualParams<T, Y, Z> p, const Layout layout) {
  __shared__ BlockTotals<T, 1, Threads> totals;
  const Group<N, Threads> group(layout);
  const T count = group.template count<T>();
  T v[K > 0 ? K : 1][N], z[K > 0 ? K : 1][N], weight2[N], bias2[N], weight3[N], bias3[N];
  T mean2 = 0, rstd2 = 0, mean3 = 0, rstd3 = 0;
  const auto read_sum = [&](int k, int at) {
    T x[N];
    load_values(p.y + group.offset + at, v[k]);
    load_values(p.x + group.offset + at, x);
#pragma unroll
    for (int i = 0; i < N; ++i) v[k][i] += x[i];
  };
  const auto activate = [&](int k) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[k][i] = relu(z[k][i] + ((v[k][i] - mean2) * rstd2 * weight2[i] + bias2[i]));
  };
  const auto read_activation = [&](int k, int at) {
    read_sum(k, at);
    load_values(p.z + group.offset + at, z[k]);
    activate(k);
  };
  const auto read_channels = [&](int c) {
    load_values(p.weight2 + group.first + c, weight2);
    load_values(p.bias2 + group.first + c, bias2);
  };
  const auto read_last_channels = [&](int c) {
    load_values(p.weight3 + group.first + c, weight3);
    load_values(p.bias3 + group.first + c, bias3);
  };
  if constexpr (K > 0) {  // all loads of the block, before any is waited for
    Pack<Y, N> y_packs[K];
    Pack<Z, N> x_packs[K], z_packs[K];
    load_slots(group, p.y, y_packs);
    load_slots(group, p.x, x_packs);
    load_slots(group, p.z, z_packs);
    const int c = group.col * N;
    read_channels(c);
    read_last_channels(c);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[k][i] = convert<T>(y_packs[k].value[i]) + convert<T>(x_packs[k].value[i]);
        z[k][i] = convert<T>(z_packs[k].value[i]);
      }
    }
  }

  using Sum = PartialSum<T, K, Threads>;
  Sum sum2, squares2, sum3, squares3;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    if constexpr (K == 0) read_sum(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) sum2.add(i, v[k][i]);
  }, Nothing(), [&] { sum2.settle(); });
  mean2 = totals.add_up(0, sum2.total()) / count;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    if constexpr (K == 0) read_sum(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) squares2.add(i, (v[k][i] - mean2) * (v[k][i] - mean2));
  }, Nothing(), [&] { squares2.settle(); });
  rstd2 = inverse_deviation(totals.add_up(1, squares2.total()), count, p.eps);

  const auto begin = [&](int c) {
    if constexpr (K == 0) read_channels(c);
  };
  sweep<K>(group, begin, [&](int k, int at) {
    if constexpr (K == 0) {
      read_activation(k, at);
    } else {
      activate(k);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) sum3.add(i, v[k][i]);
  }, Nothing(), [&] { sum3.settle(); });
  mean3 = totals.add_up(0, sum3.total()) / count;
  sweep<K>(group, begin, [&](int k, int at) {
    if constexpr (K == 0) read_activation(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) squares3.add(i, (v[k][i] - mean3) * (v[k][i] - mean3));
  }, Nothing(), [&] { squares3.settle(); });
  rstd3 = inverse_deviation(totals.add_up(1, squares3.total()), count, p.eps);

  sweep<K>(group, [&](int c) {
    begin(c);
    if constexpr (K == 0) read_last_channels(c);
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

template <class T, class Y, class Z, int N, int K, int Threads>
__global__ void __launch_bounds__(Threads, Threads < kThreads ? 4 : 1)
    norm_act_residual_backward_kernel(const ResidualBackwardParams<T, Y, Z> p, const Layout layout) {
  __shared__ BlockTotals<T, 2, Threads> totals;
  __shared__ T buffer[2 * N][Threads];
  const Group<N, Threads> group(layout);
  const T count = group.template count<T>();
  const T mean2 = p.mean2[blockIdx.x], rstd2 = p.rstd2[blockIdx.x];
  const T mean3 = p.mean3[blockIdx.x], rstd3 = p.rstd3[blockIdx.x];
  const int64_t plane = p.shape.batch * p.shape.channels;
  constexpr int kSlots = K > 0 ? K : 1;
  // The result of the second normalisation, the sum before the relu, and the gradient.
  T normal2[kSlots][N], before_relu[kSlots][N], grad[kSlots][N], weight2[N], bias2[N], weight3[N];
  const auto normal3 = [&](int k, int i) { return (relu(before_relu[k][i]) - mean3) * rstd3; };
  const auto read_channels = [&](int c) {
    load_values(p.weight2 + group.first + c, weight2);
    load_values(p.bias2 + group.first + c, bias2);
    load_values(p.weight3 + group.first + c, weight3);
  };
  const auto normalise = [&](int k) {  // y + x, which is in normal2
#pragma unroll
    for (int i = 0; i < N; ++i) {
      normal2[k][i] = (normal2[k][i] - mean2) * rstd2;
      before_relu[k][i] += normal2[k][i] * weight2[i] + bias2[i];
    }
  };
  const auto read = [&](int k, int at) {
    T x[N];
    load_values(p.y + group.offset + at, normal2[k]);
    load_values(p.x + group.offset + at, x);
    load_values(p.z + group.offset + at, before_relu[k]);
    load_values(p.grad + group.offset + at, grad[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) normal2[k][i] += x[i];
    normalise(k);
  };
  if constexpr (K > 0) {  // all loads of the block, before any is waited for
    Pack<Y, N> y_packs[K];
    Pack<Z, N> x_packs[K], z_packs[K];
    Pack<T, N> grad_packs[K];
    load_slots(group, p.y, y_packs);
    load_slots(group, p.x, x_packs);
    load_slots(group, p.z, z_packs);
    load_slots(group, p.grad, grad_packs);
    read_channels(group.col * N);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        normal2[k][i] = convert<T>(y_packs[k].value[i]) + convert<T>(x_packs[k].value[i]);
        before_relu[k][i] = convert<T>(z_packs[k].value[i]);
        grad[k][i] = grad_packs[k].value[i];
      }
    }
  }

  AffineSums<T, N, K> affine3, affine2;
  sweep<K>(group, [&](int c) {
    if constexpr (K == 0) read_channels(c);
    affine3.clear();
  }, [&](int k, int at) {
    if constexpr (K == 0) {
      read(k, at);
    } else {
      normalise(k);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) affine3.add(i, grad[k][i], normal3(k, i));
  }, [&](int c) {
    affine3.finish(group, buffer, weight3, p.grad_affine + 2 * plane + group.channel + c, plane);
  }, [&] { affine3.settle(); });
  affine3.finish_means(totals, 0, count);

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
  }, [&](int c) { affine2.finish(group, buffer, weight2, p.grad_affine + group.channel + c, plane); }, [&] {
    affine2.settle();
  });
  affine2.finish_means(totals, 1, count);

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
  with_packs<T, 16 / sizeof(Z)>(p.shape, [&](const Layout& layout, auto n, auto k, auto threads) {
    constexpr int N = n.value, K = k.value, Threads = threads.value;
    const unsigned grid = groups_grid(p.shape, "norm_act_residual");
    norm_act_residual_kernel<T, Y, Z, N, K, Threads><<<grid, Threads, 0, stream>>>(p, layout);
  }, p.y, p.x, p.z, p.weight2, p.bias2, p.weight3, p.bias3, p.f);
  check_launch("norm_act_residual");
}

template <class T, class Y, class Z>
void launch(const ResidualBackwardParams<T, Y, Z>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Z)>(p.shape, [&](const Layout& layout, auto n, auto k, auto threads) {
    constexpr int N = n.value, K = k.value, Threads = threads.value;
    const unsigned grid = groups_grid(p.shape, "norm_act_residual_backward");
    norm_act_residual_backward_kernel<T, Y, Z, N, K, Threads><<<grid, Threads, 0, stream>>>(p, layout);
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
