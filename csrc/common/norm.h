// Parameters of the norm_act ops, and the checks of their arguments; see deqfast/ops/norm_act/__init__.py.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "checks.h"

namespace deqfast {

struct NormShape {
  int64_t batch, channels, pixels, groups;
  bool channels_last;
};

// Whether the tensor is contiguous, in channels_last or in the order of its dimensions. An empty tensor always is.
inline bool is_dense(const Tensor& tensor, bool channels_last) {
  if (tensor.numel() == 0) return true;
  constexpr int orders[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};
  int64_t expected = 1;
  for (int d : orders[channels_last]) {
    if (tensor.size(d) != 1 && tensor.stride(d) != expected) return false;
    expected *= tensor.size(d);
  }
  return true;
}

// The dtype of sums and statistics.
inline ScalarType accumulation_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Uninitialised memory for a result with the shape and memory format of `like`.
inline Tensor empty_like(const Tensor& like, ScalarType dtype) {
  std::array<StableIValue, 6> stack{
      torch::stable::detail::from(like),         torch::stable::detail::from(std::optional<ScalarType>(dtype)),
      torch::stable::detail::from(std::nullopt), torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt), torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Checks run against y.
struct NormChecker : Checker {
  const Tensor& y = like;

  NormChecker(const char* op, const Tensor& y) : Checker{op, y, "y"} {}

  // `native`: whether the kernel also takes contiguous tensors. A tensor of single pixels has both formats.
  NormShape shape(int64_t groups, bool native) const {
    const auto dtype = y.scalar_type();
    STD_TORCH_CHECK(y.dim() == 4 && y.size(1) > 0 && y.size(2) > 0 && y.size(3) > 0, op,
                    ": `y` must have shape (B, C, H, W), got ", shape_text(y.sizes()));
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Double, op,
                    ": `y` must be float32, bfloat16 or float64, got ", torch::headeronly::toString(dtype));
    STD_TORCH_CHECK(groups >= 1 && y.size(1) % groups == 0, op, ": `groups` must divide the ", y.size(1),
                    " channels, got ", groups);
    const int64_t pixels = elements({y.size(2), y.size(3)});
    const NormShape shape{y.size(0), y.size(1), pixels, groups, !(native && pixels > 1 && is_dense(y, false))};
    map("y", y, shape, dtype);
    return shape;
  }

  // The dtype of x and z, given y's.
  ScalarType state_dtype(const Tensor& z) const {
    const auto dtype = z.scalar_type();
    STD_TORCH_CHECK(
        dtype == y.scalar_type() || (dtype == ScalarType::Float && y.scalar_type() == ScalarType::BFloat16), op,
        ": `z` must have the dtype of `y`, or float32 with bfloat16, got ", torch::headeronly::toString(dtype));
    return dtype;
  }

  // A tensor with the shape and memory format of y.
  void map(const char* name, const Tensor& tensor, const NormShape& shape, ScalarType dtype) const {
    match(name, tensor, {shape.batch, shape.channels, y.size(2), y.size(3)}, dtype);
    STD_TORCH_CHECK(is_dense(tensor, shape.channels_last), op, ": `", name,
                    "` must be contiguous in the memory format ",
                    shape.channels_last ? "channels_last" : "of `y`, contiguous_format");
  }

  // A parameter (C,) or a statistic (B, groups) in the accumulation dtype.
  void vector(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) const {
    check(name, tensor, sizes, accumulation_dtype(y));
  }

  // The common arguments of norm_act_residual and its backward.
  NormShape residual_shape(const Tensor& x, const Tensor& z, const Tensor& weight2, const Tensor& bias2,
                           const Tensor& weight3, int64_t groups, bool native) const {
    const NormShape s = shape(groups, native);
    const ScalarType state = state_dtype(z);
    map("x", x, s, state);
    map("z", z, s, state);
    vector("weight2", weight2, {s.channels});
    vector("bias2", bias2, {s.channels});
    vector("weight3", weight3, {s.channels});
    return s;
  }

  // The results of the forward pass that the backward takes.
  void residual_results(const Tensor& grad, const Tensor& mean2, const Tensor& rstd2, const Tensor& mean3,
                        const Tensor& rstd3, const NormShape& s) const {
    map("grad", grad, s, accumulation_dtype(y));
    vector("mean2", mean2, {s.batch, s.groups});
    vector("rstd2", rstd2, {s.batch, s.groups});
    vector("mean3", mean3, {s.batch, s.groups});
    vector("rstd3", rstd3, {s.batch, s.groups});
  }
};

// The type in which elements of a type are summed.
template <class Y>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class Y>
using Accumulator = typename AccumulatorOf<Y>::type;

template <class T>
const T* in(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* result(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Call `body` with a zero of y's type and one of z's.
template <class BFloat16, class F>
void dispatch_maps(ScalarType y, ScalarType z, const F& body) {
  if (y == ScalarType::Double) {
    body(double(), double());
  } else if (y == ScalarType::Float) {
    body(float(), float());
  } else if (z == ScalarType::Float) {
    body(BFloat16(), float());
  } else {
    body(BFloat16(), BFloat16());
  }
}

template <class T, class Y>
struct NormActParams {
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
struct NormActBackwardParams {
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

template <class T, class Y, class Z>
struct ResidualParams {
  NormShape shape;
  const Y* y;        // (B, C, H, W)
  const Z* x;        // (B, C, H, W)
  const Z* z;        // (B, C, H, W)
  const T* weight2;  // (C,), as the next three
  const T* bias2;
  const T* weight3;
  const T* bias3;
  T* f;      // (B, C, H, W)
  T* mean2;  // (B, groups), as the next three
  T* rstd2;
  T* mean3;
  T* rstd3;
  T eps;
};

template <class T, class Y, class Z>
struct ResidualBackwardParams {
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

// The ops: check the arguments, allocate the results and compute them. Each is a template on `Device`, which describes
// the kernels of a file: `run(params, y)` computes on the device of y, `native` is explained in NormChecker, and
// `BFloat16` is the device's type for it.
template <class Device>
std::tuple<Tensor, Tensor, Tensor> norm_act(Tensor y, Tensor weight, Tensor bias, int64_t groups, double eps) {
  const NormChecker checker{"norm_act", y};
  const NormShape shape = checker.shape(groups, Device::native);
  checker.vector("weight", weight, {shape.channels});
  checker.vector("bias", bias, {shape.channels});
  Tensor out = torch::stable::empty_like(y), mean = torch::stable::new_empty(weight, {shape.batch, groups});
  Tensor rstd = torch::stable::empty_like(mean);
  dispatch_maps<typename Device::BFloat16>(y.scalar_type(), y.scalar_type(), [&](auto zero, auto) {
    using Y = decltype(zero);
    using T = Accumulator<Y>;
    const NormActParams<T, Y> params{
        shape, in<Y>(y), in<T>(weight), in<T>(bias), result<Y>(out), result<T>(mean), result<T>(rstd),
        static_cast<T>(eps)};
    Device::run(params, y);
  });
  return {out, mean, rstd};
}

template <class Device>
std::tuple<Tensor, Tensor> norm_act_backward(Tensor grad, Tensor y, Tensor weight, Tensor bias, Tensor mean,
                                             Tensor rstd, int64_t groups) {
  const NormChecker checker{"norm_act_backward", y};
  const NormShape shape = checker.shape(groups, Device::native);
  checker.map("grad", grad, shape, y.scalar_type());
  checker.vector("weight", weight, {shape.channels});
  checker.vector("bias", bias, {shape.channels});
  checker.vector("mean", mean, {shape.batch, groups});
  checker.vector("rstd", rstd, {shape.batch, groups});
  Tensor grad_y = torch::stable::empty_like(y);
  Tensor grad_affine = torch::stable::new_empty(weight, {2, shape.batch, shape.channels});
  dispatch_maps<typename Device::BFloat16>(y.scalar_type(), y.scalar_type(), [&](auto zero, auto) {
    using Y = decltype(zero);
    using T = Accumulator<Y>;
    const NormActBackwardParams<T, Y> params{
        shape, in<Y>(grad), in<Y>(y), in<T>(weight), in<T>(bias), in<T>(mean), in<T>(rstd), result<Y>(grad_y),
        result<T>(grad_affine)};
    Device::run(params, y);
  });
  return {grad_y, grad_affine};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> norm_act_residual(
    Tensor y, Tensor x, Tensor z, Tensor weight2, Tensor bias2, Tensor weight3, Tensor bias3, int64_t groups,
    double eps) {
  const NormChecker checker{"norm_act_residual", y};
  const NormShape shape = checker.residual_shape(x, z, weight2, bias2, weight3, groups, Device::native);
  checker.vector("bias3", bias3, {shape.channels});
  Tensor f = empty_like(z, weight2.scalar_type());
  Tensor mean2 = torch::stable::new_empty(weight2, {shape.batch, groups}), rstd2 = torch::stable::empty_like(mean2);
  Tensor mean3 = torch::stable::empty_like(mean2), rstd3 = torch::stable::empty_like(mean2);
  dispatch_maps<typename Device::BFloat16>(y.scalar_type(), z.scalar_type(), [&](auto zero_y, auto zero_z) {
    using Y = decltype(zero_y);
    using Z = decltype(zero_z);
    using T = Accumulator<Y>;
    const ResidualParams<T, Y, Z> params{
        shape, in<Y>(y), in<Z>(x), in<Z>(z), in<T>(weight2), in<T>(bias2), in<T>(weight3), in<T>(bias3), result<T>(f),
        result<T>(mean2), result<T>(rstd2), result<T>(mean3), result<T>(rstd3), static_cast<T>(eps)};
    Device::run(params, y);
  });
  return {f, mean2, rstd2, mean3, rstd3};
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> norm_act_residual_backward(
    Tensor grad, Tensor y, Tensor x, Tensor z, Tensor weight2, Tensor bias2, Tensor weight3, Tensor mean2, Tensor rstd2,
    Tensor mean3, Tensor rstd3, int64_t groups) {
  const NormChecker checker{"norm_act_residual_backward", y};
  const NormShape shape = checker.residual_shape(x, z, weight2, bias2, weight3, groups, Device::native);
  checker.residual_results(grad, mean2, rstd2, mean3, rstd3, shape);
  Tensor grad_sum = torch::stable::empty_like(z), grad_z = torch::stable::empty_like(z);
  Tensor grad_affine = torch::stable::new_empty(weight2, {4, shape.batch, shape.channels});
  dispatch_maps<typename Device::BFloat16>(y.scalar_type(), z.scalar_type(), [&](auto zero_y, auto zero_z) {
    using Y = decltype(zero_y);
    using Z = decltype(zero_z);
    using T = Accumulator<Y>;
    const ResidualBackwardParams<T, Y, Z> params{
        shape, in<T>(grad), in<Y>(y), in<Z>(x), in<Z>(z), in<T>(weight2), in<T>(bias2), in<T>(weight3), in<T>(mean2),
        in<T>(rstd2), in<T>(mean3), in<T>(rstd3), result<Z>(grad_sum), result<Z>(grad_z), result<T>(grad_affine)};
    Device::run(params, y);
  });
  return {grad_sum, grad_z, grad_affine};
}

}  // namespace deqfast
