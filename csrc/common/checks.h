// Argument checks whose errors name the tensor, what is required and what was given.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "window.h"

namespace deqfast {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string text = "(";
  for (auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + ")";
}

// The dtype whose elements are a T. A class of two bytes is bfloat16, for which every device has its own type.
template <class T>
constexpr ScalarType scalar_type() {
  if constexpr (std::is_same_v<T, double>) {
    return ScalarType::Double;
  } else if constexpr (std::is_same_v<T, float>) {
    return ScalarType::Float;
  } else if constexpr (std::is_same_v<T, int32_t>) {
    return ScalarType::Int;
  } else if constexpr (std::is_same_v<T, int8_t>) {
    return ScalarType::Char;
  } else {
    static_assert(std::is_class_v<T> && sizeof(T) == 2, "neither a number of a known dtype nor a device's bfloat16");
    return ScalarType::BFloat16;
  }
}

// Elements that a process can address. Sums of a few such numbers, and small multiples, fit into int64_t.
constexpr int kAddressBits = 47;
constexpr int64_t kMaxElements = int64_t(1) << kAddressBits;

// Check `k`, the evaluations before a step, or -max_iter.
inline void check_evaluations(const char* op, int64_t k) {
  STD_TORCH_CHECK(k >= -kMaxIterations && k < kMaxIterations, op, ": `k` must be ", -kMaxIterations, " to ",
                  kMaxIterations - 1, ", got ", k);
}

// Checks run against the first tensor of an op, whose device all others share.
struct Checker {
  const char* op;
  const Tensor& like;
  const char* like_name = "z";

  // The product of the sizes. No product of some of them exceeds kMaxElements, even if another one is 0.
  int64_t elements(std::initializer_list<int64_t> sizes) const {
    int64_t product = 1, of_others = 1;
    bool fits = true;
    for (int64_t size : sizes) {
      fits = fits && size >= 0 && !__builtin_mul_overflow(of_others, std::max<int64_t>(size, 1), &of_others) &&
             of_others <= kMaxElements;
      product *= fits ? size : 0;
    }
    STD_TORCH_CHECK(fits, op, ": sizes must not be negative, and without zeros must multiply to at most 2^",
                    kAddressBits, ", got ", shape_text(sizes));
    return product;
  }

  void match(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype) const {
    bool same = tensor.dim() == static_cast<int64_t>(shape.size());
    int64_t d = 0;
    for (int64_t size : shape) same = same && tensor.size(d++) == size;
    STD_TORCH_CHECK(same, op, ": `", name, "` must have shape ", shape_text(shape), ", got ",
                    shape_text(tensor.sizes()));
    elements(shape);
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": `", name, "` must have dtype ",
                    torch::headeronly::toString(dtype), ", got ", torch::headeronly::toString(tensor.scalar_type()));
    STD_TORCH_CHECK(tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(), op,
                    ": `", name, "` must be on the device of `", like_name, "`");
  }

  void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype) const {
    match(name, tensor, shape, dtype);
    STD_TORCH_CHECK(tensor.is_contiguous(), op, ": `", name, "` must be contiguous");
  }

  // The first tensor: rows (B, D) of the state's dtype.
  void check_rows() const {
    const auto dtype = like.scalar_type();
    STD_TORCH_CHECK(like.dim() == 2, op, ": `", like_name, "` must have shape (B, D), got ", shape_text(like.sizes()));
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, op, ": `", like_name,
                    "` must be float32 or float64, got ", torch::headeronly::toString(dtype));
    check(like_name, like, {like.size(0), like.size(1)}, dtype);
  }

  // Check an argument that is read, and its device and layout.
  template <class T>
  const T* in(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) const {
    check(name, tensor, shape, scalar_type<T>());
    return static_cast<const T*>(tensor.const_data_ptr());
  }

  // The same for an argument that is written.
  template <class T>
  T* out(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape) const {
    check(name, tensor, shape, scalar_type<T>());
    return static_cast<T*>(tensor.mutable_data_ptr());
  }

  template <class T>
  Monitor<T> monitor(const Tensor& status, const Tensor& iterations, const Tensor& residual, const Tensor& progress,
                     const Tensor& active) const {
    const int64_t batch = like.size(0);
    return {out<int8_t>("status", status, {batch}),
            out<int32_t>("iterations", iterations, {batch}),
            out<T>("residual", residual, {2, batch}),
            out<T>("progress", progress, {kProgress, batch}),
            out<int32_t>("active", active, {1}),
            batch};
  }

  void check_max_iter(int64_t max_iter) const {
    STD_TORCH_CHECK(max_iter >= 1 && max_iter <= kMaxIterations, op, ": `max_iter` must be 1 to ", kMaxIterations,
                    ", got ", max_iter);
  }

  // The dtype of the history and the number of pairs that fit into it.
  std::pair<ScalarType, int> check_history(const Tensor& left, int64_t method, int64_t max_history) const {
    const int64_t history = left.dim() == 3 ? left.size(1) : 0;
    const auto dtype = like.scalar_type(), history_dtype = left.scalar_type();
    STD_TORCH_CHECK(history_dtype == dtype || (history_dtype == ScalarType::BFloat16 && dtype == ScalarType::Float), op,
                    ": `left` must have the dtype of `", like_name, "`, or bfloat16 with float32, got ",
                    torch::headeronly::toString(history_dtype));
    STD_TORCH_CHECK(history >= 1 && history <= max_history, op, ": `left` must hold 1 to ", max_history,
                    " pairs in shape (B, history, D), got ", shape_text(left.sizes()));
    STD_TORCH_CHECK(method >= 0 && method <= 3, op, ": `method` must be 0 to 3, got ", method);
    return {history_dtype, static_cast<int>(history)};
  }
};

// Call `body` with a zero of the state's type.
template <class F>
void dispatch_state(ScalarType dtype, const F& body) {
  if (dtype == ScalarType::Double) {
    body(double());
  } else {
    body(float());
  }
}

// Call `body` with a zero of the state's type and one of the history's; bfloat16 is allowed with float only.
template <class BFloat16, class F>
void dispatch_history(ScalarType state, ScalarType history, const F& body) {
  if (state == ScalarType::Double) {
    body(double(), double());
  } else if (history == ScalarType::BFloat16) {
    body(float(), BFloat16());
  } else {
    body(float(), float());
  }
}

}  // namespace deqfast
