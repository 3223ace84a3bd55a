// norm_act on the CPU: out = relu(GroupNorm(y)), and its backward. Passes after the first read from the caches.
#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace deqfast {
namespace {

template <class T, class Y>
struct NormActArgs {
  NormShape shape;
  const Y* y;       // (B, C, H, W)
  const T* weight;  // (C,)
  const T* bias;    // (C,)
  Y* out;           // (B, C, H, W)
  T* mean;          // (B, groups)
  T* rstd;          // (B, groups)
  T eps;
};

template <class T, class Y>
struct NormActBackwardArgs {
  NormShape shape;
  const Y* grad;    // (B, C, H, W)
  const Y* y;       // (B, C, H, W)
  const T* weight;  // (C,)
  const T* bias;    // (C,)
  const T* mean;    // (B, groups)
  const T* rstd;    // (B, groups)
  Y* grad_y;        // (B, C, H, W)
  T* grad_affine;   // (2, B, C)
};

template <class T, class Y, class Last>
DEQFAST_INLINE void run_pieces(const NormActArgs<T, Y>& a, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece p(a.shape);
  ChannelArrays<T> arrays(p.channels, 2), sums(p.channels, 1);
  T *mean_c = arrays[0], *rstd_c = arrays[1];
  for (int64_t i = begin; i < end; ++i) {
    const Y* y = a.y + i * p.size();
    Y* out = a.out + i * p.size();
    const T *weight = a.weight + i * p.channels % a.shape.channels, *bias = a.bias + i * p.channels % a.shape.channels;
    const auto value = [&](int64_t d, int64_t, auto count) DEQFAST_INLINE_LAMBDA { return load<T>(y + d, count); };
    statistics<T, kLast>(p, a.eps, sums, mean_c, rstd_c, a.mean + i * p.groups, a.rstd + i * p.groups, value, value);
    sweep<T, kLast, 0>(p, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal = (load<T>(y + d, count) - at<kLast>(mean_c, c, count)) * at<kLast>(rstd_c, c, count);
      store(out + d, relu<T>(normal * at<kLast>(weight, c, count) + at<kLast>(bias, c, count)), count);
    });
  }
}

template <class T, class Y, class Last>
DEQFAST_INLINE void run_pieces(const NormActBackwardArgs<T, Y>& a, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece p(a.shape);
  ChannelArrays<T> arrays(p.channels, 5), sums(p.channels, 2);
  T *mean_c = arrays[0], *rstd_c = arrays[1];
  for (int64_t i = begin; i < end; ++i) {
    const Y *y = a.y + i * p.size(), *grad = a.grad + i * p.size();
    Y* grad_y = a.grad_y + i * p.size();
    const T *weight = a.weight + i * p.channels % a.shape.channels, *bias = a.bias + i * p.channels % a.shape.channels;
    spread(p, a.mean + i * p.groups, mean_c);
    spread(p, a.rstd + i * p.groups, rstd_c);
    const auto normal_at = [&](int64_t d, int64_t c, auto count) DEQFAST_INLINE_LAMBDA {
      return Vec<T>((load<T>(y + d, count) - at<kLast>(mean_c, c, count)) * at<kLast>(rstd_c, c, count));
    };
    const auto grad_at = [&](int64_t d, int64_t c, auto count, Vec<T> normal) DEQFAST_INLINE_LAMBDA {
      return masked<T>(load<T>(grad + d, count),
                       normal * at<kLast>(weight, c, count) + at<kLast>(bias, c, count));
    };
    sweep<T, kLast, 2>(p, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal = normal_at(d, c, count), g = grad_at(d, c, count, normal);
      terms[0] += g * normal;
      terms[1] += g;
    });
    put_affine(a.shape, p, i, sums, a.grad_affine);
    const NormBackward<T, kLast> through_norm(p, sums, weight, rstd_c, arrays, 2);
    sweep<T, kLast, 0>(p, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_INLINE_LAMBDA {
      const Vec<T> normal = normal_at(d, c, count);
      store(grad_y + d, through_norm(grad_at(d, c, count, normal), normal, c, count), count);
    });
  }
}

DEQFAST_CLONES void run(const NormActArgs<float, float>& a, int64_t begin, int64_t end) { run_any(a, begin, end); }
DEQFAST_CLONES void run(const NormActArgs<float, BFloat16>& a, int64_t begin, int64_t end) { run_any(a, begin, end); }
DEQFAST_CLONES void run(const NormActArgs<double, double>& a, int64_t begin, int64_t end) { run_any(a, begin, end); }
DEQFAST_CLONES void run(const NormActBackwardArgs<float, float>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const NormActBackwardArgs<float, BFloat16>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}
DEQFAST_CLONES void run(const NormActBackwardArgs<double, double>& a, int64_t begin, int64_t end) {
  run_any(a, begin, end);
}

std::tuple<Tensor, Tensor, Tensor> norm_act(Tensor y, Tensor weight, Tensor bias, int64_t groups, double eps) {
  const NormChecker checker{"norm_act", y};
  const NormShape shape = checker.shape(groups, /*native=*/true);
  checker.vector("weight", weight, {shape.channels});
  checker.vector("bias", bias, {shape.channels});
  Tensor out = torch::stable::empty_like(y), mean = torch::stable::new_empty(weight, {shape.batch, groups});
  Tensor rstd = torch::stable::empty_like(mean);
  dispatch_maps<BFloat16>(y.scalar_type(), y.scalar_type(), [&](auto zero, auto) {
    using Y = decltype(zero);
    using T = Accumulator<Y>;
    launch(NormActArgs<T, Y>{shape, in<Y>(y), in<T>(weight), in<T>(bias), result<Y>(out), result<T>(mean),
                             result<T>(rstd), static_cast<T>(eps)});
  });
  return {out, mean, rstd};
}

std::tuple<Tensor, Tensor> norm_act_backward(Tensor grad, Tensor y, Tensor weight, Tensor bias, Tensor mean,
                                             Tensor rstd, int64_t groups) {
  const NormChecker checker{"norm_act_backward", y};
  const NormShape shape = checker.shape(groups, /*native=*/true);
  checker.map("grad", grad, shape, y.scalar_type());
  checker.vector("weight", weight, {shape.channels});
  checker.vector("bias", bias, {shape.channels});
  checker.vector("mean", mean, {shape.batch, groups});
  checker.vector("rstd", rstd, {shape.batch, groups});
  Tensor grad_y = torch::stable::empty_like(y);
  Tensor grad_affine = torch::stable::new_empty(weight, {2, shape.batch, shape.channels});
  dispatch_maps<BFloat16>(y.scalar_type(), y.scalar_type(), [&](auto zero, auto) {
    using Y = decltype(zero);
    using T = Accumulator<Y>;
    launch(NormActBackwardArgs<T, Y>{shape, in<Y>(grad), in<Y>(y), in<T>(weight), in<T>(bias), in<T>(mean), in<T>(rstd),
                                     result<Y>(grad_y), result<T>(grad_affine)});
  });
  return {grad_y, grad_affine};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("norm_act", TORCH_BOX(&norm_act));
  m.impl("norm_act_backward", TORCH_BOX(&norm_act_backward));
}

}  // namespace deqfast
