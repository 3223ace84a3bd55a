// What the solver steps work on; the ops' arguments are told in deqfast/ops/steps/__init__.py.
//
// Every op is a template on `Device`, which tells the kernels of a file: `run(params, z)` does the step on the device
// of the tensor z, `BFloat16` is the device's type for it, and `max_history` the most pairs that a window may have.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "checks.h"

namespace deqfast {

template <class T>
struct PicardParams {
  T* z;         // (B, D)
  const T* fz;  // (B, D)
  T* best;      // (B, D)
  int64_t dim;
  Monitor<T> monitor;
  StopRule<T> rule;
  T damping;
};

template <class Device>
void picard_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress,
                 Tensor active, int64_t k, bool last, double tol, bool absolute, double stall_floor, double offset,
                 bool maximum, double damping) {
  const Checker check{"picard_step", z};
  check.check_rows();
  const int64_t batch = z.size(0), dim = z.size(1);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const PicardParams<T> params{
        check.out<T>("z", z, {batch, dim}), check.in<T>("fz", fz, {batch, dim}),
        check.out<T>("best", best, {batch, dim}), dim, check.monitor<T>(status, iterations, residual, progress, active),
        rule_of<T>(k, last, tol, absolute, stall_floor, offset, maximum), static_cast<T>(damping)};
    Device::run(params, z);
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
  Window window;
  Monitor<T> monitor;
  StopRule<T> rule;
  int64_t method;
  T alpha, beta, ridge;

  // Pairs of this step; without a step to come only the residual counts.
  DEQFAST_HD int pairs() const { return rule.last ? 0 : window.size(); }
};

template <class Device>
void multisecant_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress,
                      Tensor active, Tensor f_prev, Tensor left, Tensor df, Tensor gram, int64_t k, bool last,
                      double tol, bool absolute, double stall_floor, double offset, bool maximum, int64_t method,
                      double alpha, double beta, double ridge) {
  const Checker check{"multisecant_step", z};
  check.check_rows();
  STD_TORCH_CHECK(k >= 0, check.op, ": `k` must not be negative, got ", k);
  const auto [history_dtype, history] = check.check_history(left, method, Device::max_history);
  const int64_t batch = z.size(0), dim = z.size(1), pairs = history;
  const Window window{k, history, history};
  dispatch_history<typename Device::BFloat16>(z.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    const MultisecantParams<T, H> params{
        check.out<T>("z", z, {batch, dim}), check.in<T>("fz", fz, {batch, dim}),
        check.out<T>("best", best, {batch, dim}), check.in<T>("f_prev", f_prev, {batch, dim}),
        check.out<H>("left", left, {batch, pairs, dim}), check.out<H>("df", df, {batch, pairs, dim}),
        check.out<T>("gram", gram, {batch, pairs + 2, pairs}), dim, window,
        check.monitor<T>(status, iterations, residual, progress, active),
        rule_of<T>(k, last, tol, absolute, stall_floor, offset, maximum), method, static_cast<T>(alpha),
        static_cast<T>(beta), static_cast<T>(ridge)};
    Device::run(params, z);
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
};

template <class Device>
void broyden_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor progress,
                  Tensor active, Tensor steps, Tensor gram, Tensor first, int64_t k, bool last, double tol,
                  bool absolute, double stall_floor, double offset, bool maximum) {
  const Checker check{"broyden_step", z};
  check.check_rows();
  const int64_t batch = z.size(0), dim = z.size(1), rows = steps.dim() == 3 ? steps.size(1) : 0;
  STD_TORCH_CHECK(rows >= 1, check.op, ": `steps` must have shape (B, steps, D) with room for one step or more, got ",
                  shape_text(steps.sizes()));
  STD_TORCH_CHECK(k >= 0 && k <= rows && (last || k < rows), check.op, ": `k` must be at least 0 and below the ", rows,
                  " steps there is room for (at most that if `last`), got ", k);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const BroydenParams<T> params{
        check.out<T>("z", z, {batch, dim}), check.in<T>("fz", fz, {batch, dim}),
        check.out<T>("best", best, {batch, dim}), check.out<T>("steps", steps, {batch, rows, dim}),
        check.out<T>("gram", gram, {batch, rows, rows}), check.out<int32_t>("first", first, {batch}), dim, rows,
        check.monitor<T>(status, iterations, residual, progress, active),
        rule_of<T>(k, last, tol, absolute, stall_floor, offset, maximum)};
    Device::run(params, z);
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
    const TransposedParams<T, H> params{
        check.in<T>("v", v, {batch, dim}), check.in<H>("left", left, {batch, pairs, dim}),
        check.in<H>("df", df, {batch, pairs, dim}), check.in<T>("gram", gram, {batch, pairs + 2, pairs}),
        check.in<int32_t>("newest", newest, {batch}), check.in<int32_t>("count", count, {batch}),
        out.mutable_data_ptr<T>(), batch, dim, static_cast<int>(pairs), method, static_cast<T>(alpha),
        static_cast<T>(beta), static_cast<T>(ridge)};
    Device::run(params, v);
  });
  return out;
}

}  // namespace deqfast
