// norm_act_residual on the CPU: f = GroupNorm3(relu(z + GroupNorm2(y + x))), its norms, and its backward.
// A piece's passes after the first read from the caches. The memory of results serves in between: f's holds y + x, then
// relu(...); that of the gradients, where they are in the accumulation dtype, what the later passes would compute again.
#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace deqfast {
namespace {

template <class T, class Y, class Z>
struct ResidualArgs {
  NormShape shape;
  const Y* y;        // (B, C, H, W)
  const Z* x;        // (B, C, H, W)
  const Z* z;        // (B, C, H, W)
  const T* weight2;  // (C,), as the next three
  const T* bias2;
  const T* weight3;
  const T* bias3;
  T* f;      // (B, C, H, W)
  T* norms;  // (2, B, groups)
  T* mean2;  // (B, groups), as the next three
  T* rstd2;
  T* mean3;
  T* rstd3;
  T eps;
};

template <class T, class Y, class Z>
struct ResidualBackwardArgs {
  NormShape shape;
  const T* grad;     // (B, C, H, W)
  const Y* y;        // (B, C, H, W)
  const Z* x;        // (B, C, H, W)
  const Z* z;        // (B, C, H, W)
  const T* weight2;  // (C,), as the next two
  const T* bias2;
  const T* weight3;
  const T* mean2;  // (B, groups), as the next three
  const T* rstd2;
  const T* mean3;
  const T* rstd3;
  Z* grad_sum;     // (B, C, H, W)
  Z* grad_z;       // (B, C, H, W)
  T* grad_affine;  // (4, B, C)
};

template <class T, class Y, class Z, class Last>
DEQFAST_INLINE void run_pieces(const ResidualArgs<T, Y, Z>& a, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece p(a.shape);
  ChannelArrays<T> arrays(p.channels, 3), sums(p.channels, 2);
  T *mean_c = arrays[0], *rstd_c = arrays[1], *group = arrays[2];
  for (int64_t i = begin; i < end; ++i) {
    const Y* y = a.y + i * p.size();
    const Z *x = a.x + i * p.size(), *z = a.z + i * p.size();
    T* f = a.f + i * p.size();
    const int64_t c0 = i * p.channels % a.shape.channels, g0 = i * p.groups;
    const T *weight2 = a.weight2 + c0, *bias2 = a.bias2 + c0, *weight3 = a.weight3 + c0, *bias3 = a.bias3 + c0;
    const auto stored = [&](int64_t d, int64_t, auto count) DEQFAST_INLINE_LAMBDA { return load<T>(f + d, count); };
    const auto affine = [&](int64_t d, int64_t c, auto count, const T* weight, const T* bias) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal = (stored(d, c, count) - at<kLast>(mean_c, c, count)) * at<kLast>(rstd_c, c, count);
      return Vec<T>(normal * at<kLast>(weight, c, count) + at<kLast>(bias, c, count));
    };
    const auto add = [&](int64_t d, int64_t, auto count) DEQFAST_INLINE_LAMBDA {
      const Vec<T> s = load<T>(y + d, count) + load<T>(x + d, count);
      store(f + d, s, count);
      return s;
    };
    statistics<T, kLast>(p, a.eps, sums, mean_c, rstd_c, a.mean2 + g0, a.rstd2 + g0, add, stored);
    const auto activate = [&](int64_t d, int64_t c, auto count) DEQFAST_INLINE_LAMBDA {
      const Vec<T> v = relu<T>(load<T>(z + d, count) + affine(d, c, count, weight2, bias2));
      store(f + d, v, count);
      return v;
    };
    statistics<T, kLast>(p, a.eps, sums, mean_c, rstd_c, a.mean3 + g0, a.rstd3 + g0, activate, stored);
    sweep<T, kLast, 2>(p, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_INLINE_LAMBDA {
      const Vec<T> value = affine(d, c, count, weight3, bias3), step = value - load<T>(z + d, count);
      store(f + d, value, count);
      terms[0] += step * step;
      terms[1] += value * value;
    });
    for (int k = 0; k < 2; ++k) {
      group_means<T>(p, sums[k], nullptr, group);
      for (int64_t g = 0; g < p.groups; ++g) {
        a.norms[k * a.shape.batch * a.shape.groups + g0 + g] = group[g] * static_cast<T>(p.size() / p.groups);
      }
    }
  }
}

template <class T, class Y, class Z, class Last>
DEQFAST_INLINE void run_pieces(const ResidualBackwardArgs<T, Y, Z>& a, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece p(a.shape);
  ChannelArrays<T> arrays(p.channels, 10), sums(p.channels, 2);
  T *mean2 = arrays[0], *rstd2 = arrays[1], *mean3 = arrays[2], *rstd3 = arrays[3];
  constexpr bool kKeep = std::is_same_v<T, Z>;
  for (int64_t i = begin; i < end; ++i) {
    const T* grad = a.grad + i * p.size();
    const Y* y = a.y + i * p.size();
    const Z *x = a.x + i * p.size(), *z = a.z + i * p.size();
    Z *grad_sum = a.grad_sum + i * p.size(), *grad_z = a.grad_z + i * p.size();
    const int64_t c0 = i * p.channels % a.shape.channels, g0 = i * p.groups;
    const T *weight2 = a.weight2 + c0, *bias2 = a.bias2 + c0, *weight3 = a.weight3 + c0;
    spread(p, a.mean2 + g0, mean2);
    spread(p, a.rstd2 + g0, rstd2);
    spread(p, a.mean3 + g0, mean3);
    spread(p, a.rstd3 + g0, rstd3);
    const auto normal2_at = [&](int64_t d, int64_t c, auto count) DEQFAST_INLINE_LAMBDA {
      const Vec<T> s = load<T>(y + d, count) + load<T>(x + d, count);
      return Vec<T>((s - at<kLast>(mean2, c, count)) * at<kLast>(rstd2, c, count));
    };
    const auto before_relu_at = [&](int64_t d, int64_t c, auto count, Vec<T> normal2) DEQFAST_INLINE_LAMBDA {
      return Vec<T>(load<T>(z + d, count) + (normal2 * at<kLast>(weight2, c, count) + at<kLast>(bias2, c, count)));
    };
    const auto normal3_at = [&](int64_t c, auto count, Vec<T> before_relu) DEQFAST_INLINE_LAMBDA {
      return Vec<T>((relu<T>(before_relu) - at<kLast>(mean3, c, count)) * at<kLast>(rstd3, c, count));
    };
    sweep<T, kLast, 2>(p, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal2 = normal2_at(d, c, count), before_relu = before_relu_at(d, c, count, normal2);
      const Vec<T> g = load<T>(grad + d, count);
      if constexpr (kKeep) store(grad_sum + d, normal2, count);
      terms[0] += g * normal3_at(c, count, before_relu);
      terms[1] += g;
    });
    put_affine(a.shape, p, i, sums, a.grad_affine + 2 * a.shape.batch * a.shape.channels);
    const NormBackward<T, kLast> through_norm3(p, sums, weight3, rstd3, arrays, 4);
    const auto normal2_again = [&](int64_t d, int64_t c, auto count) DEQFAST_INLINE_LAMBDA {
      if constexpr (kKeep) {
        return load<T>(grad_sum + d, count);
      } else {
        return normal2_at(d, c, count);
      }
    };
    const auto grad_z_at = [&](int64_t d, int64_t c, auto count, Vec<T> normal2) DEQFAST_INLINE_LAMBDA {
      const Vec<T> before_relu = before_relu_at(d, c, count, normal2);
      const Vec<T> g = load<T>(grad + d, count);
      return masked<T>(through_norm3(g, normal3_at(c, count, before_relu), c, count), before_relu);
    };
    sweep<T, kLast, 2>(p, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal2 = normal2_again(d, c, count), g = grad_z_at(d, c, count, normal2);
      store(grad_z + d, g, count);
      terms[0] += g * normal2;
      terms[1] += g;
    });
    put_affine(a.shape, p, i, sums, a.grad_affine);
    const NormBackward<T, kLast> through_norm2(p, sums, weight2, rstd2, arrays, 7);
    sweep<T, kLast, 0>(p, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal2 = normal2_again(d, c, count);
      const Vec<T> g = kKeep ? load<T>(grad_z + d, count) : grad_z_at(d, c, count, normal2);
      store(grad_sum + d, through_norm2(g, normal2, c, count), count);
    });
  }
}

DEQFAST_CLONES void run(const ResidualArgs<float, float, float>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualArgs<float, BFloat16, float>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualArgs<float, BFloat16, BFloat16>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualArgs<double, double, double>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualBackwardArgs<float, float, float>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualBackwardArgs<float, BFloat16, float>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualBackwardArgs<float, BFloat16, BFloat16>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const ResidualBackwardArgs<double, double, double>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> norm_act_residual(Tensor y, Tensor x, Tensor z,
                                                                            Tensor weight2, Tensor bias2,
                                                                            Tensor weight3, Tensor bias3,
                                                                            int64_t groups, double eps) {
  const NormChecker checker{"norm_act_residual", y};
  const NormShape shape = checker.residual_shape(x, z, weight2, bias2, weight3, groups, /*native=*/true);
  checker.vector("bias3", bias3, {shape.channels});
  Tensor f = empty_like(z, weight2.scalar_type());
  Tensor norms = torch::stable::new_empty(weight2, {2, shape.batch, groups});
  Tensor mean2 = torch::stable::new_empty(weight2, {shape.batch, groups}), rstd2 = torch::stable::empty_like(mean2);
  Tensor mean3 = torch::stable::empty_like(mean2), rstd3 = torch::stable::empty_like(mean2);
  dispatch_maps<BFloat16>(y.scalar_type(), z.scalar_type(), [&](auto zero_y, auto zero_z) {
    using Y = decltype(zero_y);
    using Z = decltype(zero_z);
    using T = Accumulator<Y>;
    launch(ResidualArgs<T, Y, Z>{shape, in<Y>(y), in<Z>(x), in<Z>(z), in<T>(weight2), in<T>(bias2), in<T>(weight3),
                                 in<T>(bias3), result<T>(f), result<T>(norms), result<T>(mean2), result<T>(rstd2),
                                 result<T>(mean3), result<T>(rstd3), static_cast<T>(eps)});
  });
  return {f, norms, mean2, rstd2, mean3, rstd3};
}

std::tuple<Tensor, Tensor, Tensor> norm_act_residual_backward(Tensor grad, Tensor y, Tensor x, Tensor z,
                                                              Tensor weight2, Tensor bias2, Tensor weight3,
                                                              Tensor mean2, Tensor rstd2, Tensor mean3, Tensor rstd3,
                                                              int64_t groups) {
  const NormChecker checker{"norm_act_residual_backward", y};
  const NormShape shape = checker.residual_shape(x, z, weight2, bias2, weight3, groups, /*native=*/true);
  checker.residual_results(grad, mean2, rstd2, mean3, rstd3, shape);
  Tensor grad_sum = torch::stable::empty_like(z), grad_z = torch::stable::empty_like(z);
  Tensor grad_affine = torch::stable::new_empty(weight2, {4, shape.batch, shape.channels});
  dispatch_maps<BFloat16>(y.scalar_type(), z.scalar_type(), [&](auto zero_y, auto zero_z) {
    using Y = decltype(zero_y);
    using Z = decltype(zero_z);
    using T = Accumulator<Y>;
    launch(ResidualBackwardArgs<T, Y, Z>{shape, in<T>(grad), in<Y>(y), in<Z>(x), in<Z>(z), in<T>(weight2), in<T>(bias2),
                                         in<T>(weight3), in<T>(mean2), in<T>(rstd2), in<T>(mean3), in<T>(rstd3),
                                         result<Z>(grad_sum), result<Z>(grad_z), result<T>(grad_affine)});
  });
  return {grad_sum, grad_z, grad_affine};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("norm_act_residual", TORCH_BOX(&norm_act_residual));
  m.impl("norm_act_residual_backward", TORCH_BOX(&norm_act_residual_backward));
}

}  // namespace deqfast
