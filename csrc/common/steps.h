// The ops of the solver steps: checks of their arguments, and the parameters of their kernels.
// deqfast/ops/steps/__init__.py explains the arguments.
//
// Every op is a template on `Device`, which stands for the kernels of a file. `Device::run(params, z)` does the step on
// the device of the tensor z. `Device::kOnHost` says whether that is the host. `Device::BFloat16` is the type of the
// device's bfloat16, and `Device::max_history` the most pairs that a window may have.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "checks.h"
#include "flat.h"

namespace deqfast {

// Check the number of a step, and on the host find it if it is negative. All running samples have used the same number of
// evaluations, the largest one. A GPU finds it in its kernels.
template <class Device, class Params>
void number(Params& p) {
  check_evaluations(Params::op, p.rule.k);
  if (Device::kOnHost && p.rule.k < 0) {
    const auto *begin = p.monitor.iterations, *end = begin + p.monitor.batch;
    p.rule = rule_at(p.rule, begin == end ? 0 : *std::max_element(begin, end));
  }
  p.check();
}

template <class T>
struct PicardParams {
  T* z;         // (B, D)
  const T* fz;  // (B, D)
  T* best;      // (B, D)
  int64_t dim;
  Monitor<T> monitor;
  StopRule<T> rule;
  T damping;

  static constexpr const char* op = "picard_step";
  void check() const {}
};

template <class Device>
void picard_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress,
                 Tensor active, int64_t k, bool last, RuleNumbers rule, double damping) {
  const Checker check{"picard_step", z};
  check.check_rows();
  const int64_t batch = z.size(0), dim = z.size(1);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    PicardParams<T> p;
    p.z = check.out<T>("z", z, {batch, dim});
    p.fz = check.in<T>("fz", fz, {batch, dim});
    p.best = check.out<T>("best", best, {batch, dim});
    p.dim = dim;
    p.monitor = check.monitor<T>(status, iterations, residual, progress, active);
    p.rule = rule_of<T>(k, last, rule);
    p.damping = static_cast<T>(damping);
    number<Device>(p);
    Device::run(p, z);
  });
}

template <class T, class H>
struct MultisecantParams {
  T* z;             // (B, D)
  const T* fz;      // (B, D)
  T* best;          // (B, D)
  const T* f_prev;  // (B, D)
  H* left;          // (B, M, D)
  H* df;            // (B, M, D)
  T* gram;          // (B, M + 2, M)
  int64_t dim;
  int history;
  Monitor<T> monitor;
  StopRule<T> rule;
  int64_t method;
  T alpha, beta, ridge;

  static constexpr const char* op = "multisecant_step";
  void check() const {}
  // The window of a sample that has used this number of evaluations; no pairs in the last step, in which only the
  // residual counts.
  DEQFAST_HD Window window(int32_t evaluations) const {
    const StopRule<T> own = rule_at(rule, evaluations);
    return {own.k, history, own.last ? 0 : history};
  }
};

template <class Device>
void multisecant_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress,
                      Tensor active, Tensor f_prev, Tensor left, Tensor df, Tensor gram, int64_t k, bool last,
                      RuleNumbers rule, int64_t method, double alpha, double beta, double ridge) {
  const Checker check{"multisecant_step", z};
  check.check_rows();
  const auto [history_dtype, history] = check.check_history(left, method, Device::max_history);
  const int64_t batch = z.size(0), dim = z.size(1), pairs = history;
  dispatch_history<typename Device::BFloat16>(z.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    MultisecantParams<T, H> p;
    p.z = check.out<T>("z", z, {batch, dim});
    p.fz = check.in<T>("fz", fz, {batch, dim});
    p.best = check.out<T>("best", best, {batch, dim});
    p.f_prev = check.in<T>("f_prev", f_prev, {batch, dim});
    p.left = check.out<H>("left", left, {batch, pairs, dim});
    p.df = check.out<H>("df", df, {batch, pairs, dim});
    p.gram = check.out<T>("gram", gram, {batch, pairs + 2, pairs});
    p.dim = dim;
    p.history = static_cast<int>(pairs);
    p.monitor = check.monitor<T>(status, iterations, residual, progress, active);
    p.rule = rule_of<T>(k, last, rule);
    p.method = method;
    p.alpha = static_cast<T>(alpha);
    p.beta = static_cast<T>(beta);
    p.ridge = static_cast<T>(ridge);
    number<Device>(p);
    Device::run(p, z);
  });
}

template <class T>
struct BroydenParams {
  T* z;            // (B, D)
  const T* fz;     // (B, D)
  T* best;         // (B, D)
  T* steps;        // (B, M, D)
  T* gram;         // (B, M, M)
  int32_t* first;  // (B,)
  int64_t dim, rows;
  Monitor<T> monitor;
  StopRule<T> rule;

  static constexpr const char* op = "broyden_step";
  void check() const {
    STD_TORCH_CHECK(rule.k >= 0 && rule.k <= rows && (rule.last || rule.k < rows), "broyden_step: `k` must be at least 0 ",
                    "and below the ", rows, " steps there is room for (at most that if `last`), got ", rule.k);
  }
};

template <class Device>
void broyden_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress,
                  Tensor active, Tensor steps, Tensor gram, Tensor first, int64_t k, bool last,
                  RuleNumbers rule) {
  const Checker check{"broyden_step", z};
  check.check_rows();
  const int64_t batch = z.size(0), dim = z.size(1), rows = steps.dim() == 3 ? steps.size(1) : 0;
  STD_TORCH_CHECK(rows >= 1, check.op, ": `steps` must have shape (B, steps, D) with room for one step or more, got ",
                  shape_text(steps.sizes()));
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    BroydenParams<T> p;
    p.z = check.out<T>("z", z, {batch, dim});
    p.fz = check.in<T>("fz", fz, {batch, dim});
    p.best = check.out<T>("best", best, {batch, dim});
    p.steps = check.out<T>("steps", steps, {batch, rows, dim});
    p.gram = check.out<T>("gram", gram, {batch, rows, rows});
    p.first = check.out<int32_t>("first", first, {batch});
    p.dim = dim;
    p.rows = rows;
    p.monitor = check.monitor<T>(status, iterations, residual, progress, active);
    p.rule = rule_of<T>(k, last, rule);
    number<Device>(p);
    Device::run(p, z);
  });
}

template <class T, class H>
struct TransposedParams {
  const T* v;     // (B, D)
  const H* left;  // (B, M, D)
  const H* df;    // (B, M, D)
  const T* gram;  // (B, M + 2, M)
  const int32_t* newest;  // (B,)
  const int32_t* count;   // (B,)
  T* out;                 // (B, D)
  int64_t batch, dim;
  int history;
  int64_t method;
  T alpha, beta, ridge;

  DEQFAST_HD Window window(int64_t row) const {
    const int pairs = count[row] < history ? count[row] : history;
    return {newest[row] + int64_t(1), history, pairs > 0 ? pairs : 0};
  }
};

template <class Device>
Tensor multisecant_transposed(Tensor v, Tensor left, Tensor df, Tensor gram, Tensor newest, Tensor count,
                              int64_t method, double alpha, double beta, double ridge) {
  const Checker check{"multisecant_transposed", v, "v"};
  check.check_rows();
  const auto [history_dtype, history] = check.check_history(left, method, Device::max_history);
  const int64_t batch = v.size(0), dim = v.size(1), pairs = history;
  Tensor out = torch::stable::empty_like(v);
  dispatch_history<typename Device::BFloat16>(v.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    TransposedParams<T, H> p;
    p.v = check.in<T>("v", v, {batch, dim});
    p.left = check.in<H>("left", left, {batch, pairs, dim});
    p.df = check.in<H>("df", df, {batch, pairs, dim});
    p.gram = check.in<T>("gram", gram, {batch, pairs + 2, pairs});
    p.newest = check.in<int32_t>("newest", newest, {batch});
    p.count = check.in<int32_t>("count", count, {batch});
    p.out = out.mutable_data_ptr<T>();
    p.batch = batch;
    p.dim = dim;
    p.history = static_cast<int>(pairs);
    p.method = method;
    p.alpha = static_cast<T>(alpha);
    p.beta = static_cast<T>(beta);
    p.ridge = static_cast<T>(ridge);
    Device::run(p, v);
  });
  return out;
}

}  // namespace deqfast
