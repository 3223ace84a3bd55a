// The arguments of the norm_act ops, checked: shapes, dtypes, memory format. Shared by the CPU and CUDA kernels;
// `deqfast/ops/norm_act.py` says what they mean.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "checks.h"

namespace deqfast {

struct NormShape {
  int64_t batch, channels, pixels, groups;
  bool channels_last;
};

// Whether the elements lie without gaps, channels fastest or in the order of the dimensions.
inline bool is_dense(const Tensor& tensor, bool channels_last) {
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

// Memory without values for a result shaped as `like`, in its memory format.
inline Tensor empty_like(const Tensor& like, ScalarType dtype) {
  std::array<StableIValue, 6> stack{
      torch::stable::detail::from(like),         torch::stable::detail::from(std::optional<ScalarType>(dtype)),
      torch::stable::detail::from(std::nullopt), torch::stable::detail::from(std::nullopt),
      torch::stable::detail::from(std::nullopt), torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Checks run against y, whose device all others share.
struct NormChecker {
  const char* op;
  const Tensor& y;

  // `native` says whether the kernel takes contiguous tensors too. Of single pixels both formats are true.
  NormShape shape(int64_t groups, bool native) const {
    const auto dtype = y.scalar_type();
    STD_TORCH_CHECK(y.dim() == 4 && y.size(1) * y.size(2) * y.size(3) > 0, op,
                    ": `y` must have shape (B, C, H, W), got ", shape_text(y.sizes()));
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Double, op,
                    ": `y` must be float32, bfloat16 or float64, got ", torch::headeronly::toString(dtype));
    STD_TORCH_CHECK(groups >= 1 && y.size(1) % groups == 0, op, ": `groups` must divide the ", y.size(1),
                    " channels, got ", groups);
    const int64_t pixels = y.size(2) * y.size(3);
    const NormShape shape{y.size(0), y.size(1), pixels, groups, !(native && pixels > 1 && is_dense(y, false))};
    map("y", y, shape, dtype);
    return shape;
  }

  // The dtype of x and z beside y's.
  ScalarType state_dtype(const Tensor& z) const {
    const auto dtype = z.scalar_type();
    STD_TORCH_CHECK(
        dtype == y.scalar_type() || (dtype == ScalarType::Float && y.scalar_type() == ScalarType::BFloat16), op,
        ": `z` must have the dtype of `y`, or float32 beside bfloat16, got ", torch::headeronly::toString(dtype));
    return dtype;
  }

  // A tensor shaped as y, in the same memory format.
  void map(const char* name, const Tensor& tensor, const NormShape& shape, ScalarType dtype) const {
    check(name, tensor, {shape.batch, shape.channels, y.size(2), y.size(3)}, dtype);
    STD_TORCH_CHECK(is_dense(tensor, shape.channels_last), op, ": `", name,
                    "` must be contiguous in the memory format ",
                    shape.channels_last ? "channels_last" : "of `y`, contiguous_format");
  }

  // A parameter (C,) or a statistic (B, groups) in the accumulation dtype.
  void vector(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) const {
    check(name, tensor, sizes, accumulation_dtype(y));
    STD_TORCH_CHECK(tensor.is_contiguous(), op, ": `", name, "` must be contiguous");
  }

  // What norm_act_residual and its backward both take.
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

  // What the backward takes of the forward's results.
  void residual_results(const Tensor& grad, const Tensor& mean2, const Tensor& rstd2, const Tensor& mean3,
                        const Tensor& rstd3, const NormShape& s) const {
    map("grad", grad, s, accumulation_dtype(y));
    vector("mean2", mean2, {s.batch, s.groups});
    vector("rstd2", rstd2, {s.batch, s.groups});
    vector("mean3", mean3, {s.batch, s.groups});
    vector("rstd3", rstd3, {s.batch, s.groups});
  }

 private:
  void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype) const {
    bool same = tensor.dim() == static_cast<int64_t>(sizes.size());
    int64_t d = 0;
    for (int64_t size : sizes) same = same && tensor.size(d++) == size;
    STD_TORCH_CHECK(same, op, ": `", name, "` must have shape ", shape_text(sizes), ", got ",
                    shape_text(tensor.sizes()));
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": `", name, "` must have dtype ",
                    torch::headeronly::toString(dtype), ", got ", torch::headeronly::toString(tensor.scalar_type()));
    STD_TORCH_CHECK(tensor.is_cuda() == y.is_cuda() && tensor.get_device_index() == y.get_device_index(), op, ": `",
                    name, "` must be on the device of `y`");
  }
};

// What elements of a type are summed in.
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

}  // namespace deqfast
