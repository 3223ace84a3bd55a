// norm_act_residual_backward on the CPU: the gradients of f = GroupNorm3(relu(z + GroupNorm2(y + x))).
// A separate file, so that it is compiled in parallel with the forward pass. If the gradients have the accumulation
// dtype, their memory holds intermediate results, which later passes would otherwise compute again.
#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace deqfast {

template <class T, class Y, class Z, class Last>
void run_pieces(const ResidualBackwardParams<T, Y, Z>& p, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece piece(p.shape);
  ChannelArrays<T> arrays(piece.channels, 10), sums(piece.channels, 2);
  T *mean2 = arrays[0], *rstd2 = arrays[1], *mean3 = arrays[2], *rstd3 = arrays[3];
  constexpr bool kKeep = std::is_same_v<T, Z>;
  for (int64_t i = begin; i < end; ++i) {
    const T* grad = p.grad + i * piece.size();
    const Y* y = p.y + i * piece.size();
    const Z *x = p.x + i * piece.size(), *z = p.z + i * piece.size();
    Z *grad_sum = p.grad_sum + i * piece.size(), *grad_z = p.grad_z + i * piece.size();
    const int64_t c0 = i * piece.channels % p.shape.channels, g0 = i * piece.groups;
    const T *weight2 = p.weight2 + c0, *bias2 = p.bias2 + c0, *weight3 = p.weight3 + c0;
    spread(piece, p.mean2 + g0, mean2);
    spread(piece, p.rstd2 + g0, rstd2);
    spread(piece, p.mean3 + g0, mean3);
    spread(piece, p.rstd3 + g0, rstd3);
    const auto normal2_at = [&](int64_t d, int64_t c, auto count) DEQFAST_ALWAYS_INLINE {
      const Vec<T> s = load<T>(y + d, count) + load<T>(x + d, count);
      return (s - at<kLast>(mean2, c, count)) * at<kLast>(rstd2, c, count);
    };
    const auto before_relu_at = [&](int64_t d, int64_t c, auto count, Vec<T> normal2) DEQFAST_ALWAYS_INLINE {
      return load<T>(z + d, count) + (normal2 * at<kLast>(weight2, c, count) + at<kLast>(bias2, c, count));
    };
    const auto normal3_at = [&](int64_t c, auto count, Vec<T> before_relu) DEQFAST_ALWAYS_INLINE {
      return (relu<T>(before_relu) - at<kLast>(mean3, c, count)) * at<kLast>(rstd3, c, count);
    };
    sweep<T, kLast, 2>(piece, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal2 = normal2_at(d, c, count), before_relu = before_relu_at(d, c, count, normal2);
      const Vec<T> g = load<T>(grad + d, count);
      if constexpr (kKeep) store(grad_sum + d, normal2, count);
      terms[0] += g * normal3_at(c, count, before_relu);
      terms[1] += g;
    });
    put_affine(p.shape, piece, i, sums, p.grad_affine + 2 * p.shape.batch * p.shape.channels);
    const NormBackward<T, kLast> through_norm3(piece, sums, weight3, rstd3, arrays, 4);
    const auto normal2_again = [&](int64_t d, int64_t c, auto count) DEQFAST_ALWAYS_INLINE {
      if constexpr (kKeep) {
        return load<T>(grad_sum + d, count);
      } else {
        return normal2_at(d, c, count);
      }
    };
    const auto grad_z_at = [&](int64_t d, int64_t c, auto count, Vec<T> normal2) DEQFAST_ALWAYS_INLINE {
      const Vec<T> before_relu = before_relu_at(d, c, count, normal2);
      const Vec<T> g = load<T>(grad + d, count);
      return masked<T>(through_norm3(g, normal3_at(c, count, before_relu), c, count), before_relu);
    };
    sweep<T, kLast, 2>(piece, sums,
                       [&](int64_t d, int64_t c, auto count, Vec<T>* terms) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal2 = normal2_again(d, c, count), g = grad_z_at(d, c, count, normal2);
      store(grad_z + d, g, count);
      terms[0] += g * normal2;
      terms[1] += g;
    });
    put_affine(p.shape, piece, i, sums, p.grad_affine);
    const NormBackward<T, kLast> through_norm2(piece, sums, weight2, rstd2, arrays, 7);
    sweep<T, kLast, 0>(piece, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal2 = normal2_again(d, c, count);
      const Vec<T> g = kKeep ? load<T>(grad_z + d, count) : grad_z_at(d, c, count, normal2);
      store(grad_sum + d, through_norm2(g, normal2, c, count), count);
    });
  }
}

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("norm_act_residual_backward", TORCH_BOX(&norm_act_residual_backward<NormKernels>));
}

}  // namespace deqfast
