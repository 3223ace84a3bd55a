// norm_act on a GPU: out = relu(GroupNorm(y)), and its backward. See norm.cuh and ../cpu/norm_act.cpp.
#include <torch/csrc/stable/library.h>

#include "norm.cuh"

namespace deqfast {
namespace {

template <class T, class Y, int N, int K, int Threads>
__global__ void __launch_bounds__(Threads, Threads < kThreads ? 8 : 2)
    norm_act_kernel(const NormActParams<T, Y> p, const Layout layout) {
  __shared__ BlockTotals<T, 1, Threads> totals;
  const Group<N, Threads> group(layout);
  const Y* y = p.y + group.offset;
  T v[K > 0 ? K : 1][N], weight[N], bias[N];
  const auto read_channels = [&](int c) {
    load_values(p.weight + group.first + c, weight);
    load_values(p.bias + group.first + c, bias);
  };
  if constexpr (K > 0) {  // all loads of the block, before any is waited for
    Pack<Y, N> packs[K];
    load_slots(group, p.y, packs);
    read_channels(group.col * N);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[k][i] = convert<T>(packs[k].value[i]);
    }
  }
  PartialSum<T, K, Threads> sum, squares;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    if constexpr (K == 0) load_values(y + at, v[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) sum.add(i, v[k][i]);
  }, Nothing(), [&] { sum.settle(); });
  const T count = group.template count<T>(), mean = totals.add_up(0, sum.total()) / count;
  sweep<K>(group, Nothing(), [&](int k, int at) {
    if constexpr (K == 0) load_values(y + at, v[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) squares.add(i, (v[k][i] - mean) * (v[k][i] - mean));
  }, Nothing(), [&] { squares.settle(); });
  const T rstd = inverse_deviation(totals.add_up(1, squares.total()), count, p.eps);
  sweep<K>(group, [&](int c) {
    if constexpr (K == 0) read_channels(c);
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

template <class T, class Y, int N, int K, int Threads>
__global__ void __launch_bounds__(Threads, Threads < kThreads ? 4 : 1)
    norm_act_backward_kernel(const NormActBackwardParams<T, Y> p, const Layout layout) {
  __shared__ BlockTotals<T, 2, Threads> totals;
  __shared__ T buffer[2 * N][Threads];
  const Group<N, Threads> group(layout);
  const T mean = p.mean[blockIdx.x], rstd = p.rstd[blockIdx.x];
  T weight[N], bias[N], normal[K > 0 ? K : 1][N], grad[K > 0 ? K : 1][N];
  const auto read_channels = [&](int c) {
    load_values(p.weight + group.first + c, weight);
    load_values(p.bias + group.first + c, bias);
  };
  const auto normalise = [&](int k) {  // y, which is in `normal`
#pragma unroll
    for (int i = 0; i < N; ++i) {
      normal[k][i] = (normal[k][i] - mean) * rstd;
      if (normal[k][i] * weight[i] + bias[i] <= T(0)) grad[k][i] = 0;
    }
  };
  const auto read = [&](int k, int at) {
    load_values(p.y + group.offset + at, normal[k]);
    load_values(p.grad + group.offset + at, grad[k]);
    normalise(k);
  };
  if constexpr (K > 0) {  // all loads of the block, before any is waited for
    Pack<Y, N> y_packs[K], grad_packs[K];
    load_slots(group, p.y, y_packs);
    load_slots(group, p.grad, grad_packs);
    read_channels(group.col * N);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        normal[k][i] = convert<T>(y_packs[k].value[i]);
        grad[k][i] = convert<T>(grad_packs[k].value[i]);
      }
    }
  }
  const auto begin = [&](int c) {
    if constexpr (K == 0) read_channels(c);
  };
  AffineSums<T, N, K> affine;
  sweep<K>(group, [&](int c) {
    begin(c);
    affine.clear();
  }, [&](int k, int at) {
    if constexpr (K == 0) {
      read(k, at);
    } else {
      normalise(k);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) affine.add(i, grad[k][i], normal[k][i]);
  }, [&](int c) {
    affine.finish(group, buffer, weight, p.grad_affine + group.channel + c, p.shape.batch * p.shape.channels);
  }, [&] { affine.settle(); });
  affine.finish_means(totals, 0, group.template count<T>());
  sweep<K>(group, begin, [&](int k, int at) {
    if constexpr (K == 0) read(k, at);
#pragma unroll
    for (int i = 0; i < N; ++i) grad[k][i] = affine.before(grad[k][i], normal[k][i], weight[i], rstd);
    store_values(p.grad_y + group.offset + at, grad[k]);
  }, Nothing());
}

template <class T, class Y>
void launch(const NormActParams<T, Y>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Y)>(p.shape, [&](const Layout& layout, auto n, auto k, auto threads) {
    constexpr int N = n.value, K = k.value, Threads = threads.value;
    const unsigned grid = groups_grid(p.shape, "norm_act");
    norm_act_kernel<T, Y, N, K, Threads><<<grid, Threads, 0, stream>>>(p, layout);
  }, p.y, p.weight, p.bias, p.out);
  check_launch("norm_act");
}

template <class T, class Y>
void launch(const NormActBackwardParams<T, Y>& p, cudaStream_t stream) {
  with_packs<T, 16 / sizeof(Y)>(p.shape, [&](const Layout& layout, auto n, auto k, auto threads) {
    constexpr int N = n.value, K = k.value, Threads = threads.value;
    const unsigned grid = groups_grid(p.shape, "norm_act_backward");
    norm_act_backward_kernel<T, Y, N, K, Threads><<<grid, Threads, 0, stream>>>(p, layout);
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
