// Argument checks that name the tensor, what it must be and what it is.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <string>

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

// Checks run against the first tensor of an op, whose device all others share.
struct Checker {
  const char* op;
  const Tensor& like;
  const char* like_name = "z";

  void check(const char* name, const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype) const {
    bool same = tensor.dim() == static_cast<int64_t>(shape.size());
    int64_t d = 0;
    for (int64_t size : shape) same = same && tensor.size(d++) == size;
    STD_TORCH_CHECK(same, op, ": `", name, "` must have shape ", shape_text(shape), ", got ",
                    shape_text(tensor.sizes()));
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, op, ": `", name, "` must have dtype ",
                    torch::headeronly::toString(dtype), ", got ", torch::headeronly::toString(tensor.scalar_type()));
    STD_TORCH_CHECK(tensor.is_contiguous(), op, ": `", name, "` must be contiguous");
    STD_TORCH_CHECK(tensor.is_cuda() == like.is_cuda() && tensor.get_device_index() == like.get_device_index(), op,
                    ": `", name, "` must be on the device of `", like_name, "`");
  }

  // The first tensor: rows (B, D) of the state's dtype.
  void check_rows() const {
    const auto dtype = like.scalar_type();
    STD_TORCH_CHECK(like.dim() == 2, op, ": `", like_name, "` must have shape (B, D), got ", shape_text(like.sizes()));
    STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, op, ": `", like_name,
                    "` must be float32 or float64, got ", torch::headeronly::toString(dtype));
    check(like_name, like, {like.size(0), like.size(1)}, dtype);
  }

  // The tensors every solver step takes: the state, f's value and the monitor.
  void check_state(const Tensor& fz, const Tensor& best, const Tensor& status, const Tensor& iterations,
                   const Tensor& residual, const Tensor& gain, const Tensor& active) const {
    check_rows();
    const auto dtype = like.scalar_type();
    const int64_t batch = like.size(0), dim = like.size(1);
    check("fz", fz, {batch, dim}, dtype);
    check("best", best, {batch, dim}, dtype);
    check("status", status, {batch}, ScalarType::Char);
    check("iterations", iterations, {batch}, ScalarType::Int);
    check("residual", residual, {2, batch}, dtype);
    check("gain", gain, {2, batch}, dtype);
    check("active", active, {1}, ScalarType::Int);
  }

  // The window of secant pairs; returns the dtype of the history.
  ScalarType check_window(const Tensor& f_prev, const Tensor& left, const Tensor& df, const Tensor& gram, int64_t k,
                          int64_t method, int64_t max_history) const {
    STD_TORCH_CHECK(k >= 0, op, ": `k` must not be negative, got ", k);
    check("f_prev", f_prev, {like.size(0), like.size(1)}, like.scalar_type());
    return check_history(left, df, gram, method, max_history);
  }

  ScalarType check_history(const Tensor& left, const Tensor& df, const Tensor& gram, int64_t method,
                           int64_t max_history) const {
    const int64_t batch = like.size(0), dim = like.size(1), history = left.dim() == 3 ? left.size(1) : 0;
    const auto dtype = like.scalar_type(), history_dtype = left.scalar_type();
    STD_TORCH_CHECK(history_dtype == dtype || (history_dtype == ScalarType::BFloat16 && dtype == ScalarType::Float), op,
                    ": `left` must have the dtype of `", like_name, "`, or bfloat16 beside float32, got ",
                    torch::headeronly::toString(history_dtype));
    STD_TORCH_CHECK(history >= 1 && history <= max_history, op, ": `left` must hold 1 to ", max_history,
                    " pairs in shape (B, history, D), got ", shape_text(left.sizes()));
    STD_TORCH_CHECK(method >= 0 && method <= 3, op, ": `method` must be 0 to 3, got ", method);
    check("left", left, {batch, history, dim}, history_dtype);
    check("df", df, {batch, history, dim}, history_dtype);
    check("gram", gram, {batch, history + 2, history}, dtype);
    return history_dtype;
  }

  // All steps of a solve; returns how many there is room for.
  int64_t check_steps(const Tensor& steps, const Tensor& gram, const Tensor& first, int64_t k, bool last) const {
    const int64_t batch = like.size(0), dim = like.size(1), rows = steps.dim() == 3 ? steps.size(1) : 0;
    STD_TORCH_CHECK(rows >= 1, op, ": `steps` must have shape (B, steps, D) with room for one step or more, got ",
                    shape_text(steps.sizes()));
    check("steps", steps, {batch, rows, dim}, like.scalar_type());
    check("gram", gram, {batch, rows, rows}, like.scalar_type());
    check("first", first, {batch}, ScalarType::Int);
    STD_TORCH_CHECK(k >= 0 && k <= rows && (last || k < rows), op, ": `k` must be at least 0 and below the ", rows,
                    " steps there is room for (at most that if `last`), got ", k);
    return rows;
  }
};

template <class T>
Monitor<T> monitor_of(const Tensor& status, const Tensor& iterations, const Tensor& residual, const Tensor& gain,
                      const Tensor& active) {
  return {status.mutable_data_ptr<int8_t>(), iterations.mutable_data_ptr<int32_t>(), residual.mutable_data_ptr<T>(),
          gain.mutable_data_ptr<T>(),        active.mutable_data_ptr<int32_t>(),     status.size(0)};
}

// Call `body` with a zero of the state's type.
template <class F>
void dispatch_state(ScalarType dtype, const F& body) {
  if (dtype == ScalarType::Double) {
    body(double());
  } else {
    body(float());
  }
}

// Call `body` with a zero of the state's type and one of the history's; bfloat16 goes beside float only.
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
