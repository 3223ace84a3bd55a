// The ops of the solver steps: checks of their arguments, and the parameters of their kernels.
// deqfast/ops/steps/__init__.py explains the arguments.
//
// Every op is a template on `Device`, which stands for the kernels of a file. `Device::run(params, z)` does the step on
// the device of the tensor z. `Device::kOnHost` says whether that is the host. `Device::BFloat16` is the type of the
// device's bfloat16, and `Device::max_history` the most pairs that a window may have.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "checks.h"
#include "flat.h"

namespace deqfast {

// Arguments that ops share, in groups with the names and the order of the tables in deqfast/ops/steps/__init__.py.
struct State {
  Tensor z, fz, best, status, iterations, residual, progress, active;
};
struct Pairs {
  Tensor left, df, gram;
};
struct Steps {
  Tensor steps, gram, first;
};
struct Evaluation {
  int64_t k;
  bool last;
  RuleNumbers rule;
};
struct Mixing {
  int64_t method;
  double alpha, beta, ridge;
};

template <>
struct FieldsOf<State> {
  using type = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
};
template <>
struct FieldsOf<Pairs> {
  using type = std::tuple<Tensor, Tensor, Tensor>;
};
template <>
struct FieldsOf<Steps> : FieldsOf<Pairs> {};
template <>
struct FieldsOf<Evaluation> {
  using type = std::tuple<int64_t, bool, double, double, double, double, double>;
};
template <>
struct FieldsOf<Mixing> {
  using type = std::tuple<int64_t, double, double, double>;
};

// The parameters of every step.
template <class T>
struct StepParams {
  T* z;         // (B, D)
  const T* fz;  // (B, D)
  T* best;      // (B, D)
  int64_t dim;
  Monitor<T> monitor;
  StopRule<T> rule;
};

template <class T>
StepParams<T> step_params(const Checker& check, const State& s, const Evaluation& evaluation) {
  const int64_t batch = s.z.size(0), dim = s.z.size(1);
  StepParams<T> p;
  p.z = check.out<T>("z", s.z, {batch, dim});
  p.fz = check.in<T>("fz", s.fz, {batch, dim});
  p.best = check.out<T>("best", s.best, {batch, dim});
  p.dim = dim;
  p.monitor = check.monitor<T>(s.status, s.iterations, s.residual, s.progress, s.active);
  p.rule = rule_of<T>(evaluation.k, evaluation.last, evaluation.rule);
  return p;
}

template <class T>
struct MixingParams {
  int64_t method;
  T alpha, beta, ridge;
};

template <class T>
MixingParams<T> mixing_params(const Mixing& m) {
  return {m.method, static_cast<T>(m.alpha), static_cast<T>(m.beta), static_cast<T>(m.ridge)};
}

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
struct PicardParams : StepParams<T> {
  T damping;

  static constexpr const char* op = "picard_step";
  void check() const {}
};

template <class Device>
void picard_step(State state, Evaluation evaluation, double damping) {
  const Checker check{"picard_step", state.z};
  check.check_rows();
  dispatch_state(state.z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    PicardParams<T> p{step_params<T>(check, state, evaluation), static_cast<T>(damping)};
    number<Device>(p);
    Device::run(p, state.z);
  });
}

template <class T, class H>
struct MultisecantParams : StepParams<T>, MixingParams<T> {
  const T* f_prev;  // (B, D)
  H* left;          // (B, M, D)
  H* df;            // (B, M, D)
  T* gram;          // (B, M + 2, M)
  int history;

  static constexpr const char* op = "multisecant_step";
  void check() const {}
  // The window of a sample that has used this number of evaluations; no pairs in the last step, in which only the
  // residual counts.
  DEQFAST_HD Window window(int32_t evaluations) const {
    const StopRule<T> own = rule_at(this->rule, evaluations);
    return {own.k, history, own.last ? 0 : history};
  }
};

template <class Device>
void multisecant_step(State state, Tensor f_prev, Pairs pairs, Evaluation evaluation, Mixing mixing) {
  const Checker check{"multisecant_step", state.z};
  check.check_rows();
  const auto [history_dtype, history] = check.check_history(pairs.left, mixing.method, Device::max_history);
  const int64_t batch = state.z.size(0), dim = state.z.size(1), count = history;
  dispatch_history<typename Device::BFloat16>(state.z.scalar_type(), history_dtype, [&](auto zero, auto element) {
    using T = decltype(zero);
    using H = decltype(element);
    MultisecantParams<T, H> p{step_params<T>(check, state, evaluation), mixing_params<T>(mixing)};
    p.f_prev = check.in<T>("f_prev", f_prev, {batch, dim});
    p.left = check.out<H>("left", pairs.left, {batch, count, dim});
    p.df = check.out<H>("df", pairs.df, {batch, count, dim});
    p.gram = check.out<T>("gram", pairs.gram, {batch, count + 2, count});
    p.history = static_cast<int>(count);
    number<Device>(p);
    Device::run(p, state.z);
  });
}

template <class T>
struct BroydenParams : StepParams<T> {
  T* steps;        // (B, M, D)
  T* gram;         // (B, M, M)
  int32_t* first;  // (B,)
  int64_t rows;

  static constexpr const char* op = "broyden_step";
  void check() const {
    const int64_t k = this->rule.k, most = rows - !this->rule.last;
    STD_TORCH_CHECK(k >= 0 && k <= most, "broyden_step: `k` must be at least 0 and below the ", rows,
                    " steps there is room for (at most that if `last`), got ", k);
  }
};

template <class Device>
void broyden_step(State state, Steps s, Evaluation evaluation) {
  const Checker check{"broyden_step", state.z};
  check.check_rows();
  const int64_t batch = state.z.size(0), dim = state.z.size(1), rows = s.steps.dim() == 3 ? s.steps.size(1) : 0;
  STD_TORCH_CHECK(rows >= 1, check.op, ": `steps` must have shape (B, steps, D) with room for one step or more, got ",
                  shape_text(s.steps.sizes()));
  dispatch_state(state.z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    BroydenParams<T> p{step_params<T>(check, state, evaluation)};
    p.steps = check.out<T>("steps", s.steps, {batch, rows, dim});
    p.gram = check.out<T>("gram", s.gram, {batch, rows, rows});
    p.first = check.out<int32_t>("first", s.first, {batch});
    p.rows = rows;
    number<Device>(p);
    Device::run(p, state.z);
  });
}

template <class T, class H>
struct TransposedParams : MixingParams<T> {
  const T* v;     // (B, D)
  const H* left;  // (B, M, D)
  const H* df;    // (B, M, D)
  const T* gram;  // (B, M + 2, M)
  const int32_t* newest;  // (B,)
  const int32_t* count;   // (B,)
  T* out;                 // (B, D)
  int64_t batch, dim;
  int history;

  DEQFAST_HD Window window(int64_t row) const {
    const int pairs = count[row] < history ? count[row] : history;
    return {newest[row] + int64_t(1), history, pairs > 0 ? pairs : 0};
  }
};

template <class Device>
Tensor multisecant_transposed(Tensor v, Pairs pairs, Tensor newest, Tensor count, Mixing mixing) {
  const Checker check{"multisecant_transposed", v, "v"};
  check.check_rows();
  const auto [history_dtype, history] = check.check_history(pairs.left, mixing.method, Device::max_history);
  const int64_t batch = v.size(0), dim = v.size(1), slots = history;
  Tensor out = torch::stable::empty_like(v);
  dispatch_history<typename Device::BFloat16>(v.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    TransposedParams<T, H> p{mixing_params<T>(mixing)};
    p.v = check.in<T>("v", v, {batch, dim});
    p.left = check.in<H>("left", pairs.left, {batch, slots, dim});
    p.df = check.in<H>("df", pairs.df, {batch, slots, dim});
    p.gram = check.in<T>("gram", pairs.gram, {batch, slots + 2, slots});
    p.newest = check.in<int32_t>("newest", newest, {batch});
    p.count = check.in<int32_t>("count", count, {batch});
    p.out = out.mutable_data_ptr<T>();
    p.batch = batch;
    p.dim = dim;
    p.history = static_cast<int>(slots);
    Device::run(p, v);
  });
  return out;
}

}  // namespace deqfast
