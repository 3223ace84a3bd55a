// What the solver steps work on; the ops' arguments are told in deqfast/ops/steps.py.
#pragma once

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
  const Window window{k, static_cast<int>(left.size(1))};
  dispatch_history<BFloat16>(z.scalar_type(), history_dtype, [&](auto state, auto history) {
    using T = decltype(state);
    using H = decltype(history);
    launch(MultisecantParams<T, H>{z.mutable_data_ptr<T>(), fz.const_data_ptr<T>(), best.mutable_data_ptr<T>(),
                                   f_prev.const_data_ptr<T>(), static_cast<H*>(left.mutable_data_ptr()),
                                   static_cast<H*>(df.mutable_data_ptr()), gram.mutable_data_ptr<T>(), z.size(1),
                                   window, monitor_of<T>(status, iterations, residual, gain, active),
                                   {k, static_cast<T>(tol), absolute, static_cast<T>(stall_floor), last}, method,
                                   static_cast<T>(alpha), static_cast<T>(beta), static_cast<T>(ridge)});
  });
}

}  // namespace deqfast
