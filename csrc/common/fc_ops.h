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

inline Checker check_fc(const char* op, const Tensor& weight, const Tensor& c, int64_t activation, int64_t max_iter) {
  const Checker checker{op, c, "c"};
  checker.check_rows();
  const auto dtype = c.scalar_type(), weight_dtype = weight.scalar_type();
  const int64_t dim = c.size(1);
  STD_TORCH_CHECK(dim > 0, op, ": `c` must have at least one column");
  STD_TORCH_CHECK(weight_dtype == dtype || (weight_dtype == ScalarType::BFloat16 && dtype == ScalarType::Float), op,
                  ": `weight` must have the dtype of `c`, or bfloat16 with float32, got ",
                  torch::headeronly::toString(weight_dtype));
  checker.check("weight", weight, {dim, dim}, weight_dtype);
  check_activation(op, activation);
  checker.check_max_iter(max_iter);
  return checker;
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

template <class T, class H>
FcProblem<T, H> fc_problem(const Tensor& weight, const Tensor& c, const Tensor& z0, T* value, int64_t activation,
                           int64_t max_iter, const RuleNumbers& rule) {
  FcProblem<T, H> p;
  p.weight = static_cast<const H*>(weight.const_data_ptr());
  p.c = c.const_data_ptr<T>();
  p.z0 = z0.const_data_ptr<T>();
  p.value = value;
  p.rule = rule_of<T>(0, false, rule);
  p.batch = c.size(0);
  p.dim = c.size(1);
  p.max_iter = max_iter;
  p.activation = activation;
  return p;
}

template <class Device>
FcOutcome fc_fixed_point(Tensor weight, Tensor c, Tensor z0, int64_t activation, int64_t max_iter,
                         RuleNumbers rule) {
  const Checker checker = check_fc("fc_fixed_point", weight, c, activation, max_iter);
  checker.check("z0", z0, {c.size(0), c.size(1)}, c.scalar_type());
  const FcOutcome outcome = empty_fc_outcome(c);
  dispatch_history<typename Device::BFloat16>(c.scalar_type(), weight.scalar_type(), [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    T* value = std::get<0>(outcome).template mutable_data_ptr<T>();
    Device::run(fc_problem<T, H>(weight, c, z0, value, activation, max_iter, rule), outcome, c);
  });
  return outcome;
}

// Evaluations `begin` to `end` - 1 of a solve, from and to the memory of its state.
template <class T, class H>
struct FcSteps {
  FcProblem<T, H> problem;  // its z0 is z, and its value the best iterate
  T* panels;                // (D, D + kPanelPadding): W as the kernel multiplies it, written if `begin` is 0
  T* z;                     // (B, D)
  Monitor<T> monitor;
  int64_t begin, end;
};

template <class Device>
void fc_steps(Tensor weight, Tensor c, Tensor panels, Tensor z, Tensor best, Tensor status, Tensor iterations,
              Tensor residual, Tensor progress, int64_t activation, int64_t k, int64_t until, int64_t max_iter,
              RuleNumbers rule) {
  const Checker check = check_fc("fc_steps", weight, c, activation, max_iter);
  STD_TORCH_CHECK(k >= 0 && k < until, check.op, ": `k` must be at least 0 and below `until` ", until, ", got ", k);
  STD_TORCH_CHECK(until <= max_iter, check.op, ": `until` must be at most `max_iter` ", max_iter, ", got ", until);
  const int64_t batch = c.size(0), dim = c.size(1);
  dispatch_history<typename Device::BFloat16>(c.scalar_type(), weight.scalar_type(), [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    FcSteps<T, H> s;
    s.panels = check.out<T>("panels", panels, {dim, dim + kPanelPadding});
    s.z = check.out<T>("z", z, {batch, dim});
    s.problem = fc_problem<T, H>(weight, c, z, check.out<T>("best", best, {batch, dim}), activation, max_iter, rule);
    s.monitor = {check.out<int8_t>("status", status, {batch}),
                 check.out<int32_t>("iterations", iterations, {batch}),
                 check.out<T>("residual", residual, {2, batch}),
                 check.out<T>("progress", progress, {kProgress, batch}),
                 nullptr,
                 batch};
    s.begin = k;
    s.end = until;
    Device::run(s);
  });
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
