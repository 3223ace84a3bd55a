// state_begin: the tensors of an eager solve before the first evaluation. loop_begin and loop_end: the tensors of a loop
// in compiled code, and the results of its solve.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>

#include "loops.h"

namespace deqfast {
namespace {

using Begun = std::tuple<AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle>;
using Started = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Ended = std::tuple<AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,
                         AtenTensorHandle>;

template <class T>
void write_start(const View& z0, const View& values, int64_t rows, int64_t batch) {
  T* z = values.data<T>();
  std::memcpy(z, z0.data<T>(), rows * sizeof(T));
  std::memcpy(z + rows, z, rows * sizeof(T));
  std::fill_n(z + 2 * rows, (2 + kProgress) * batch, Limits<T>::infinity);
}

// `solve`: 0 to begin only if z0 is finite; else the number of a solve that always begins.
Begun loop_begin(View z0, int64_t elements, int64_t integers, int64_t solve) {
  const int64_t batch = z0.size(0), dim = z0.size(1);
  const View values{new_tensor<1>({elements}, z0.dtype())}, counts{new_tensor<1>({integers}, ScalarType::Int)},
      status{new_tensor<1>({batch}, ScalarType::Char)}, running{new_tensor<0>({}, ScalarType::Bool)};
  std::memset(counts.data<int32_t>(), 0, integers * sizeof(int32_t));
  std::memset(status.data<int8_t>(), kRunning, batch);
  counts.data<int32_t>()[kActive] = static_cast<int32_t>(batch);
  bool finite = true;
  dispatch_state(z0.dtype(), [&](auto zero) {
    using T = decltype(zero);
    write_start<T>(z0, values, batch * dim, batch);
    const T* z = z0.data<T>();
    for (int64_t i = 0; i < batch * dim; ++i) finite &= std::abs(z[i]) <= Limits<T>::max;
  });
  *running.data<bool>() = (finite || solve) && batch > 0;
  return {values.tensor, counts.tensor, status.tensor, running.tensor};
}

Ended loop_end(View values, View counts, View status, View running, int64_t batch, int64_t dim) {
  const ScalarType dtype = values.dtype();
  const View value{new_tensor<2>({batch, dim}, dtype)}, relative{new_tensor<1>({batch}, dtype)},
      absolute{new_tensor<1>({batch}, dtype)}, ended{new_tensor<1>({batch}, ScalarType::Char)}, iterations{new_tensor<1>({batch}, ScalarType::Int)},
      evaluations{new_tensor<0>({}, ScalarType::Long)};
  dispatch_state(dtype, [&](auto zero) {
    using T = decltype(zero);
    const LoopState<T> state(values, counts, status, batch, dim);
    std::copy_n(state.best, batch * dim, value.data<T>());
    std::copy_n(state.residual, batch, relative.data<T>());
    std::copy_n(state.residual + batch, batch, absolute.data<T>());
    std::copy_n(state.status, batch, ended.data<int8_t>());
    std::copy_n(state.counts + kPerSample, batch, iterations.data<int32_t>());
    *evaluations.data<int64_t>() = state.counts[kEvaluations];
  });
  return {value.tensor, ended.tensor, iterations.tensor, relative.tensor, absolute.tensor, evaluations.tensor};
}

Started state_begin_op(Tensor z) {
  Checker{"state_begin", z, "z"}.check_rows();
  const int64_t batch = z.size(0), elements = batch * z.size(1);
  const ScalarType dtype = z.scalar_type();
  const View best{new_tensor<2>({batch, z.size(1)}, dtype)}, status{new_tensor<1>({batch}, ScalarType::Char)},
      iterations{new_tensor<1>({batch}, ScalarType::Int)}, residual{new_tensor<2>({2, batch}, dtype)},
      progress{new_tensor<2>({kProgress, batch}, dtype)}, active{new_tensor<1>({1}, ScalarType::Int)};
  std::memset(status.data<int8_t>(), kRunning, batch);
  std::fill_n(iterations.data<int32_t>(), batch, 0);
  *active.data<int32_t>() = static_cast<int32_t>(batch);
  dispatch_state(dtype, [&](auto zero) {
    using T = decltype(zero);
    std::copy_n(View{z.get()}.data<T>(), elements, best.data<T>());
    std::fill_n(residual.data<T>(), 2 * batch, Limits<T>::infinity);
    std::fill_n(progress.data<T>(), kProgress * batch, Limits<T>::infinity);
  });
  return {Tensor(best.tensor),     Tensor(status.tensor),   Tensor(iterations.tensor),
          Tensor(residual.tensor), Tensor(progress.tensor), Tensor(active.tensor)};
}

template <class... H>
auto owned(const std::tuple<H...>& handles) {
  return std::apply([](auto... handle) { return std::tuple{Tensor(handle)...}; }, handles);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> loop_begin_op(Tensor z0, int64_t elements, int64_t integers,
                                                                 int64_t solve) {
  Checker{"loop_begin", z0, "z0"}.check_rows();
  const int64_t batch = z0.size(0), least = values_of_all(batch, z0.size(1));
  STD_TORCH_CHECK(elements >= least, "loop_begin: `elements` must be at least ", least, ", got ", elements);
  STD_TORCH_CHECK(integers >= kPerSample + batch, "loop_begin: `integers` must be at least ", kPerSample + batch,
                  ", got ", integers);
  return owned(loop_begin({z0.get()}, elements, integers, solve));
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> loop_end_op(Tensor values, Tensor counts, Tensor status,
                                                                       Tensor running, int64_t batch, int64_t dim) {
  const Checker check{"loop_end", values, "values"};
  const auto dtype = values.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double,
                  "loop_end: `values` must be float32 or float64, got ", torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(batch >= 0 && dim >= 0, "loop_end: `batch` and `dim` must be at least 0, got ", batch, " and ", dim);
  check.elements({batch, dim});
  const int64_t least = values_of_all(batch, dim);
  check.check("values", values, {std::max(values.dim() == 1 ? values.size(0) : 0, least)}, dtype);
  check.check("counts", counts, {std::max(counts.dim() == 1 ? counts.size(0) : 0, kPerSample + batch)}, ScalarType::Int);
  check.check("status", status, {batch}, ScalarType::Char);
  return owned(loop_end({values.get()}, {counts.get()}, {status.get()}, {running.get()}, batch, dim));
}

}  // namespace

DEQFAST_C_FUNCTION aoti_torch_cpu_loop_begin(AtenTensorHandle z0, int64_t elements, int64_t integers, int64_t solve,
                                             AtenTensorHandle* values, AtenTensorHandle* counts,
                                             AtenTensorHandle* status, AtenTensorHandle* running) {
  return without_exceptions(
      [&] { std::tie(*values, *counts, *status, *running) = loop_begin({z0}, elements, integers, solve); });
}

DEQFAST_C_FUNCTION aoti_torch_cpu_loop_end(AtenTensorHandle values, AtenTensorHandle counts, AtenTensorHandle status,
                                           AtenTensorHandle running, int64_t batch, int64_t dim,
                                           AtenTensorHandle* value, AtenTensorHandle* ended,
                                           AtenTensorHandle* iterations, AtenTensorHandle* relative,
                                           AtenTensorHandle* absolute, AtenTensorHandle* evaluations) {
  return without_exceptions([&] {
    std::tie(*value, *ended, *iterations, *relative, *absolute, *evaluations) =
        loop_end({values}, {counts}, {status}, {running}, batch, dim);
  });
}

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) {
  m.impl("state_begin", TORCH_BOX(&state_begin_op));
  m.impl("loop_begin", TORCH_BOX(&loop_begin_op));
  m.impl("loop_end", TORCH_BOX(&loop_end_op));
}

}  // namespace deqfast
