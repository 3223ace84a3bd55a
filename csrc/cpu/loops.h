// The solver steps for a loop in compiled code, which calls them as C functions, without the dispatcher.
//
// Passing a tensor to the body of such a loop costs about a tenth of a microsecond. A step therefore works on four
// tensors only, see `loop_begin` in deqfast/ops/steps/loops.py.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "../common/steps.h"

namespace deqfast {

// A tensor owned elsewhere, read without the cost of a Tensor.
struct View {
  AtenTensorHandle tensor;

  template <class T>
  T* data() const {
    void* memory;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &memory));
    return static_cast<T*>(memory);
  }
  int64_t size(int64_t dim) const {
    int64_t size;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_size(tensor, dim, &size));
    return size;
  }
  ScalarType dtype() const {
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(dtype));
  }
};

// A new uninitialised contiguous tensor, for a fraction of the dispatcher's cost.
template <size_t dims>
AtenTensorHandle new_tensor(const std::array<int64_t, dims>& sizes, ScalarType dtype) {
  std::array<int64_t, dims> strides;
  int64_t stride = 1;
  for (size_t d = dims; d-- > 0; stride *= sizes[d]) strides[d] = stride;
  AtenTensorHandle handle;
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), type,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return handle;
}

// Positions in `counts`.
enum Counts { kEvaluations, kActive, kPerSample };

// Number of elements of `values` that every step has; a Checker has checked the sizes.
inline int64_t values_of_all(int64_t batch, int64_t dim) { return 2 * batch * dim + (2 + kProgress) * batch; }

// The tensors of a loop, split into those of a step.
template <class T>
struct LoopState {
  int64_t batch, dim, rows = batch * dim;
  T* z;
  int32_t* counts;
  int8_t* status;
  T *best = z + rows, *residual = best + rows, *progress = residual + 2 * batch;
  T* further = progress + kProgress * batch;  // of the tensors that only some steps have

  LoopState(const View& values, const View& counts, const View& status, int64_t batch, int64_t dim)
      : batch(batch), dim(dim), z(values.data<T>()), counts(counts.data<int32_t>()), status(status.data<int8_t>()) {}

  StepParams<T> params(const View& fz, int64_t max_iter, const RuleNumbers& rule) const {
    const int64_t k = counts[kEvaluations];
    return {z, fz.data<T>(), best, dim,
            {status, counts + kPerSample, residual, progress, counts + kActive, batch},
            rule_of<T>(k, k + 1 == max_iter, rule)};
  }
};

// The numbers of a step: the stop rule's, then the solver's.
struct Numbers {
  const double* begin;

  double own(int i) const { return begin[kRuleNumbers + i]; }
  RuleNumbers rule() const {
    RuleNumbers rule;
    std::memcpy(&rule, begin, sizeof rule);
    return rule;
  }
  static constexpr int kRuleNumbers = sizeof(RuleNumbers) / sizeof(double);
};

// A `Loop` has:
//   name           the op's name
//   step           (values, counts, status, history, fz, max_iter, numbers)
//   numbers        how many numbers the solver has
//   parts          how many tensors `history` consists of
//   brief_history  whether they may be bfloat16 for a float32 state
//   more_values    (checker, batch, dim, pairs): elements of `values` in addition to those of every step
//   more_counts    (batch): likewise of `counts`
//   check          (k, max_iter, pairs, numbers): raises an error before the step would leave its memory

// Run a step, count the evaluation, and return whether another one follows, () bool.
template <class Loop>
AtenTensorHandle run_step(View values, View counts, View status, View history, View fz, int64_t max_iter,
                      Numbers numbers) {
  Loop::step(values, counts, status, history, fz, max_iter, numbers);
  int32_t* counted = counts.data<int32_t>();
  const AtenTensorHandle running = new_tensor<0>({}, ScalarType::Bool);
  *View{running}.data<bool>() = ++counted[kEvaluations] < max_iter && counted[kActive] > 0;
  return running;
}

// The op: `run_step` with checks of all arguments.
template <class Loop>
Tensor loop_op(Tensor values, Tensor counts, Tensor status, Tensor history, Tensor fz, int64_t max_iter,
               std::vector<double> numbers) {
  const Checker check{Loop::name, fz, "fz"};
  check.check_rows();
  const int64_t batch = fz.size(0), dim = fz.size(1), pairs = Loop::parts && history.dim() == 4 ? history.size(2) : 0;
  if (Loop::parts) {
    const bool brief = Loop::brief_history && fz.scalar_type() == ScalarType::Float &&
                       history.scalar_type() == ScalarType::BFloat16;
    check.check("history", history, {Loop::parts, batch, std::max<int64_t>(pairs, 1), dim},
                brief ? ScalarType::BFloat16 : fz.scalar_type());
  }
  check.check("values", values, {values_of_all(batch, dim) + Loop::more_values(check, batch, dim, pairs)}, fz.scalar_type());
  check.check("counts", counts, {kPerSample + batch + Loop::more_counts(batch)}, ScalarType::Int);
  check.check("status", status, {batch}, ScalarType::Char);
  STD_TORCH_CHECK(numbers.size() == Numbers::kRuleNumbers + Loop::numbers, Loop::name, ": `numbers` must hold ",
                  Numbers::kRuleNumbers + Loop::numbers, ", got ", numbers.size());
  check.check_max_iter(max_iter);
  const int64_t k = View{counts.get()}.data<int32_t>()[kEvaluations];
  STD_TORCH_CHECK(0 <= k && k < max_iter, Loop::name, ": `counts` must begin with evaluations from 0 and below `max_iter` ",
                  max_iter, ", got ", k);
  Loop::check(k, max_iter, pairs, Numbers{numbers.data()});
  return Tensor(run_step<Loop>({values.get()}, {counts.get()}, {status.get()}, {history.get()}, {fz.get()}, max_iter,
                           {numbers.data()}));
}

// Run `body` as a C function does: errors become codes.
template <class Body>
AOTITorchError without_exceptions(const Body& body) {
  try {
    body();
    return AOTI_TORCH_SUCCESS;
  } catch (...) {
    return AOTI_TORCH_FAILURE;
  }
}

#define DEQFAST_C_FUNCTION extern "C" __attribute__((visibility("default"))) AOTITorchError

// The C function of the op `name`.
#define DEQFAST_LOOP(name, Loop)                                                                                      \
  DEQFAST_C_FUNCTION aoti_torch_cpu_##name(AtenTensorHandle values, AtenTensorHandle counts, AtenTensorHandle status, \
                                           AtenTensorHandle history, AtenTensorHandle fz, int64_t max_iter,           \
                                           const double* numbers, int64_t, AtenTensorHandle* running) {               \
    return without_exceptions([&] {                                                                                   \
      *running = run_step<Loop>({values}, {counts}, {status}, {history}, {fz}, max_iter, {numbers});                      \
    });                                                                                                               \
  }

}  // namespace deqfast
