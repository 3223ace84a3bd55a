// The ops of the fully connected cell: arguments, their checks, and results. A device runs the kernel.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "checks.h"
#include "fc.h"
#include "flat.h"

namespace deqfast {

using FcOutcome = std::tuple<Tensor, Tensor, Tensor, Tensor>;  // value, status, iterations, residual

inline void check_activation(const char* op, int64_t activation) {
  STD_TORCH_CHECK(activation >= kIdentity && activation <= kGelu, op, ": `activation` must be 0 to 3, got ",
                  activation);
}

inline FcOutcome empty_fc_outcome(const Tensor& c) {
  const int64_t batch = c.size(0);
  return {torch::stable::empty_like(c), torch::stable::new_empty(c, {batch}, ScalarType::Char),
          torch::stable::new_empty(c, {batch}, ScalarType::Int), torch::stable::new_empty(c, {2, batch})};
}

template <class T>
Monitor<T> fc_monitor(const FcOutcome& outcome, T* progress) {
  const auto& [value, status, iterations, residual] = outcome;
  return {status.mutable_data_ptr<int8_t>(), iterations.mutable_data_ptr<int32_t>(),
          residual.mutable_data_ptr<T>(),    progress, nullptr, status.size(0)};
}

template <class T, class H>
struct FcProblem {
  const H* weight;  // (D, D)
  const T* c;       // (B, D)
  const T* z0;      // (B, D)
  T* value;         // (B, D)
  StopRule<T> rule;  // without its k and last
  int64_t batch, dim, max_iter, activation;
};

template <class Device>
FcOutcome fc_fixed_point(Tensor weight, Tensor c, Tensor z0, int64_t activation, int64_t max_iter,
                         RuleNumbers rule) {
  const char* op = "fc_fixed_point";
  const Checker checker{op, c, "c"};
  checker.check_rows();
  const auto dtype = c.scalar_type(), weight_dtype = weight.scalar_type();
  const int64_t batch = c.size(0), dim = c.size(1);
  STD_TORCH_CHECK(dim > 0, op, ": `c` must have at least one column");
  STD_TORCH_CHECK(weight_dtype == dtype || (weight_dtype == ScalarType::BFloat16 && dtype == ScalarType::Float), op,
                  ": `weight` must have the dtype of `c`, or bfloat16 with float32, got ",
                  torch::headeronly::toString(weight_dtype));
  checker.check("weight", weight, {dim, dim}, weight_dtype);
  check_activation(op, activation);
  checker.check_max_iter(max_iter);
  checker.check("z0", z0, {batch, dim}, dtype);
  const FcOutcome outcome = empty_fc_outcome(c);
  dispatch_history<typename Device::BFloat16>(dtype, weight_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    FcProblem<T, H> p;
    p.weight = static_cast<const H*>(weight.const_data_ptr());
    p.c = c.const_data_ptr<T>();
    p.z0 = z0.const_data_ptr<T>();
    p.value = std::get<0>(outcome).template mutable_data_ptr<T>();
    p.rule = rule_of<T>(0, false, rule);
    p.batch = batch;
    p.dim = dim;
    p.max_iter = max_iter;
    p.activation = activation;
    Device::run(p, outcome, c);
  });
  return outcome;
}

template <class T>
struct VjpParams {
  const T* pre;
  const T* grad;
  T* result;
  int64_t size, activation;
};

template <class Device>
Tensor fc_vjp(Tensor pre, Tensor grad, int64_t activation) {
  const Checker checker{"fc_vjp", pre, "pre"};
  checker.check_rows();
  checker.check("grad", grad, {pre.size(0), pre.size(1)}, pre.scalar_type());
  check_activation("fc_vjp", activation);
  Tensor result = torch::stable::empty_like(pre);
  dispatch_state(pre.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    Device::run(VjpParams<T>{pre.const_data_ptr<T>(), grad.const_data_ptr<T>(), result.mutable_data_ptr<T>(),
                             pre.numel(), activation},
                pre);
  });
  return result;
}

}  // namespace deqfast
