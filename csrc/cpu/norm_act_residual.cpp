// norm_act_residual on the CPU: f = GroupNorm3(relu(z + GroupNorm2(y + x))).
// A piece's passes after the first read from the caches; the memory of f first holds y + x, then relu(...).
#include <torch/csrc/stable/library.h>

#include "norm.h"

namespace deqfast {

template <class T, class Y, class Z, class Last>
void run_pieces(const ResidualParams<T, Y, Z>& p, int64_t begin, int64_t end, Last) {
  constexpr bool kLast = Last::value;
  const Piece piece(p.shape);
  ChannelArrays<T> arrays(piece.channels, 2), sums(piece.channels, 1);
  T *mean_c = arrays[0], *rstd_c = arrays[1];
  for (int64_t i = begin; i < end; ++i) {
    const Y* y = p.y + i * piece.size();
    const Z *x = p.x + i * piece.size(), *z = p.z + i * piece.size();
    T* f = p.f + i * piece.size();
    const int64_t c0 = i * piece.channels % p.shape.channels, g0 = i * piece.groups;
    const T *weight2 = p.weight2 + c0, *bias2 = p.bias2 + c0, *weight3 = p.weight3 + c0, *bias3 = p.bias3 + c0;
    const auto stored = [&](int64_t d, int64_t, auto count) DEQFAST_ALWAYS_INLINE { return load<T>(f + d, count); };
    const auto affine = [&](int64_t d, int64_t c, auto count, const T* weight, const T* bias) DEQFAST_ALWAYS_INLINE {
      const Vec<T> normal = (stored(d, c, count) - at<kLast>(mean_c, c, count)) * at<kLast>(rstd_c, c, count);
      return normal * at<kLast>(weight, c, count) + at<kLast>(bias, c, count);
    };
    const auto add = [&](int64_t d, int64_t, auto count) DEQFAST_ALWAYS_INLINE {
      const Vec<T> s = load<T>(y + d, count) + load<T>(x + d, count);
      store(f + d, s, count);
      return s;
    };
    statistics<T, kLast>(piece, p.eps, sums, mean_c, rstd_c, p.mean2 + g0, p.rstd2 + g0, add, stored);
    const auto activate = [&](int64_t d, int64_t c, auto count) DEQFAST_ALWAYS_INLINE {
      const Vec<T> v = relu<T>(load<T>(z + d, count) + affine(d, c, count, weight2, bias2));
      store(f + d, v, count);
      return v;
    };
    statistics<T, kLast>(piece, p.eps, sums, mean_c, rstd_c, p.mean3 + g0, p.rstd3 + g0, activate, stored);
    sweep<T, kLast, 0>(piece, sums, [&](int64_t d, int64_t c, auto count, Vec<T>*) DEQFAST_ALWAYS_INLINE {
      store(f + d, affine(d, c, count, weight3, bias3), count);
    });
  }
}

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("norm_act_residual", TORCH_BOX(&norm_act_residual<NormKernels>));
}

}  // namespace deqfast
