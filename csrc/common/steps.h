// What the solver steps work on; the ops' arguments are told in deqfast/ops/steps.py.
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

// Check the arguments of picard_step and call `launch` with its parameters.
template <class F>
void with_picard_params(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual,
                        Tensor gain, Tensor active, int64_t k, bool last, double tol, bool absolute,
                        double stall_floor, double damping, const F& launch) {
  const Checker checker{"picard_step", z};
  checker.check_state(fz, best, status, iterations, residual, gain, active);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    launch(PicardParams<T>{z.mutable_data_ptr<T>(), fz.const_data_ptr<T>(), best.mutable_data_ptr<T>(), z.size(1),
                           monitor_of<T>(status, iterations, residual, gain, active),
                           {k, static_cast<T>(tol), absolute, static_cast<T>(stall_floor), last},
                           static_cast<T>(damping)});
  });
}

// The same for multisecant_step; `BFloat16` is the type of the device for it.
template <class BFloat16, class F>
void with_multisecant_params(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual,
                             Tensor gain, Tensor active, Tensor f_prev, Tensor left, Tensor df, Tensor gram, int64_t k,
                             bool last, double tol, bool absolute, double stall_floor, int64_t method, double alpha,
                             double beta, double ridge, int64_t max_history, const F& launch) {
  const Checker checker{"multisecant_step", z};
  checker.check_state(fz, best, status, iterations, residual, gain, active);
  const auto history_dtype = checker.check_window(f_prev, left, df, gram, k, method, max_history);
  const int history = static_cast<int>(left.size(1));
  const Window window{k, history, history};
  dispatch_history<BFloat16>(z.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    launch(MultisecantParams<T, H>{z.mutable_data_ptr<T>(), fz.const_data_ptr<T>(), best.mutable_data_ptr<T>(),
                                   f_prev.const_data_ptr<T>(), static_cast<H*>(left.mutable_data_ptr()),
                                   static_cast<H*>(df.mutable_data_ptr()), gram.mutable_data_ptr<T>(), z.size(1),
                                   window, monitor_of<T>(status, iterations, residual, gain, active),
                                   {k, static_cast<T>(tol), absolute, static_cast<T>(stall_floor), last}, method,
                                   static_cast<T>(alpha), static_cast<T>(beta), static_cast<T>(ridge)});
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

// Check the arguments of broyden_step and call `launch` with its parameters.
template <class F>
void with_broyden_params(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual,
                         Tensor gain, Tensor active, Tensor steps, Tensor gram, Tensor first, int64_t k, bool last,
                         double tol, bool absolute, double stall_floor, const F& launch) {
  const Checker checker{"broyden_step", z};
  checker.check_state(fz, best, status, iterations, residual, gain, active);
  const int64_t rows = checker.check_steps(steps, gram, first, k, last);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    launch(BroydenParams<T>{z.mutable_data_ptr<T>(), fz.const_data_ptr<T>(), best.mutable_data_ptr<T>(),
                            steps.mutable_data_ptr<T>(), gram.mutable_data_ptr<T>(),
                            first.mutable_data_ptr<int32_t>(), z.size(1), rows,
                            monitor_of<T>(status, iterations, residual, gain, active),
                            {k, static_cast<T>(tol), absolute, static_cast<T>(stall_floor), last}});
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

// Check the arguments of multisecant_transposed and call `launch` with its parameters; the result is theirs to fill.
template <class BFloat16, class F>
Tensor with_transposed_params(Tensor v, Tensor left, Tensor df, Tensor gram, Tensor newest, Tensor count,
                              int64_t method, double alpha, double beta, double ridge, int64_t max_history,
                              const F& launch) {
  const Checker checker{"multisecant_transposed", v, "v"};
  checker.check_rows();
  const auto history_dtype = checker.check_history(left, df, gram, method, max_history);
  checker.check("newest", newest, {v.size(0)}, ScalarType::Int);
  checker.check("count", count, {v.size(0)}, ScalarType::Int);
  Tensor out = torch::stable::empty_like(v);
  dispatch_history<BFloat16>(v.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    launch(TransposedParams<T, H>{
        v.const_data_ptr<T>(), static_cast<const H*>(left.const_data_ptr()), static_cast<const H*>(df.const_data_ptr()),
        gram.const_data_ptr<T>(), newest.const_data_ptr<int32_t>(), count.const_data_ptr<int32_t>(),
        out.mutable_data_ptr<T>(), v.size(0), v.size(1), static_cast<int>(left.size(1)), method, static_cast<T>(alpha),
        static_cast<T>(beta), static_cast<T>(ridge)});
  });
  return out;
}

}  // namespace deqfast
