// norm_act on the CPU: out = relu(GroupNorm(y)), and its backward. Passes after the first read from the caches.
#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace deqfast {

template <class T, class Y, class Last>
void run_pieces(const NormActParams<T, Y>& p, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece piece(p.shape);
  ChannelArrays<T> arrays(piece.channels, 2), sums(piece.channels, 1);
  T *mean_c = arrays[0], *rstd_c = arrays[1];
  for (int64_t i = begin; i < end; ++i) {
    const Y* y = p.y + i * piece.size();
    Y* out = p.out + i * piece.size();
    const int64_t c0 = i * piece.channels % p.shape.channels, g0 = i * piece.groups;
    const T *weight = p.weight + c0, *bias = p.bias + c0;
    const auto value = [&](int64_t d, int64_t, auto count) DEQFAST_ALWAYS_INLINE { return load<T>(y + d, count); };
    statistics<T, kLast>(piece, p.eps, sums, mean_c, rstd_c, p.mean + g0, p.rstd + g0, value, value);
    sweep<T, kLast, 0>(piece, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal = (load<T>(y + d, count) - at<kLast>(mean_c, c, count)) * at<kLast>(rstd_c, c, count);
      store(out + d, relu<T>(normal * at<kLast>(weight, c, count) + at<kLast>(bias, c, count)), count);
    });
  }
}

template <class T, class Y, class Last>
void run_pieces(const NormActBackwardParams<T, Y>& p, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece piece(p.shape);
  ChannelArrays<T> arrays(piece.channels, 5), sums(piece.channels, 2);
  T *mean_c = arrays[0], *rstd_c = arrays[1];
  for (int64_t i = begin; i < end; ++i) {
    const Y *y = p.y + i * piece.size(), *grad = p.grad + i * piece.size();
    Y* grad_y = p.grad_y + i * piece.size();
    const int64_t c0 = i * piece.channels % p.shape.channels, g0 = i * piece.groups;
    const T *weight = p.weight + c0, *bias = p.bias + c0;
    spread(piece, p.mean + g0, mean_c);
    spread(piece, p.rstd + g0, rstd_c);
    const auto normal_at = [&](int64_t d, int64_t c, auto count) DEQFAST_ALWAYS_INLINE {
      return (load<T>(y + d, count) - at<kLast>(mean_c, c, count)) * at<kLast>(rstd_c, c, count);
    };
    const auto grad_at = [&](int64_t d, int64_t c, auto count, Vec<T> normal) DEQFAST_ALWAYS_INLINE {
      return masked<T>(load<T>(grad + d, count), normal * at<kLast>(weight, c, count) + at<kLast>(bias, c, count));
    };
    sweep<T, kLast, 2>(piece, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal = normal_at(d, c, count), g = grad_at(d, c, count, normal);
      terms[0] += g * normal;
      terms[1] += g;
    });
    put_affine(p.shape, piece, i, sums, p.grad_affine);
    const NormBackward<T, kLast> through_norm(piece, sums, weight, rstd_c, arrays, 2);
    sweep<T, kLast, 0>(piece, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal = normal_at(d, c, count);
      store(grad_y + d, through_norm(grad_at(d, c, count, normal), normal, c, count), count);
    });
  }
}

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("norm_act", TORCH_BOX(&norm_act<NormKernels>));
  m.impl("norm_act_backward", TORCH_BOX(&norm_act_backward<NormKernels>));
}

}  // namespace deqfast
