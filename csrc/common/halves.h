// The ops of the halves of a step, for rows that are parts of samples: checks of their arguments, and the parameters of
// their kernels. deqfast/ops/steps/split.py explains them.
//
// `Device::sums(params, half, z)` fills the sums of the rows whose status is kRunning. `Device::apply(params, half, z)`
// takes the step of the rows with a verdict for it. Both use only those parameters of the step that they are given.
#pragma once

#include "steps.h"

namespace deqfast {

// The sums of each row, (B, width), and the verdicts, (B,), of which each op has what it needs.
template <class T>
struct RowSums {
  T* sums;
  int64_t width;
  const int8_t* verdict;
};

DEQFAST_HD inline Verdict verdict_of(int8_t bits) {
  return {(bits & kImproved) != 0, (bits & kBroken) != 0, (bits & kAdvances) != 0};
}

// The sums of multisecant_step, by their position for n pairs: |g|^2, |f(z)|^2; L^T g and L^T y, n each; |l|^2 and |y|^2
// of the newest pair; its row of the window matrix, n, if L holds steps.
struct SumsOfPairs {
  int g, y, squares, row, width;

  DEQFAST_HD SumsOfPairs(int n, int64_t method)
      : g(2), y(g + n), squares(y + n), row(squares + 2), width(row + (left_is_y(method) ? 0 : n)) {}
};

// Fill in what all sums have.
template <class T, class Params>
RowSums<T> begin_sums(const Checker& check, Params& p, const Tensor& z, const Tensor& fz, const Tensor& status, Tensor& sums,
                   int64_t width) {
  const int64_t batch = z.size(0), dim = z.size(1);
  p.z = const_cast<T*>(check.in<T>("z", z, {batch, dim}));
  p.fz = check.in<T>("fz", fz, {batch, dim});
  p.dim = dim;
  p.monitor.status = const_cast<int8_t*>(check.in<int8_t>("status", status, {batch}));
  p.monitor.batch = batch;
  return {check.out<T>("sums", sums, {batch, width}), width, nullptr};
}

// Fill in what all second halves have.
template <class T, class Params>
RowSums<T> begin_apply(const Checker& check, Params& p, Tensor& z, const Tensor& fz, Tensor& best, const Tensor& verdict) {
  const int64_t batch = z.size(0), dim = z.size(1);
  p.z = check.out<T>("z", z, {batch, dim});
  p.fz = check.in<T>("fz", fz, {batch, dim});
  p.best = check.out<T>("best", best, {batch, dim});
  p.dim = dim;
  p.monitor.batch = batch;
  return {nullptr, 0, check.in<int8_t>("verdict", verdict, {batch})};
}

// The sums that an op reads, none before the first step.
template <class T>
void read_sums(const Checker& check, RowSums<T>& half, const Tensor& z, const Tensor& sums, int64_t k, int64_t width) {
  const int64_t columns = k == 0 && sums.dim() == 2 ? sums.size(1) : width;
  half.sums = const_cast<T*>(check.in<T>("sums", sums, {z.size(0), columns}));
  half.width = columns;
}

inline void check_steps(const Checker& check, int64_t k, int64_t least) {
  STD_TORCH_CHECK(k >= least && k < kMaxIterations, check.op, ": `k` must be ", least, " to ", kMaxIterations - 1, ", got ",
                  k);
}

template <class Device>
void picard_sums(Tensor z, Tensor fz, Tensor status, Tensor sums) {
  const Checker check{"picard_sums", z};
  check.check_rows();
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    PicardParams<T> p = {};
    const RowSums<T> half = begin_sums<T>(check, p, z, fz, status, sums, 2);
    Device::sums(p, half, z);
  });
}

template <class Device>
void picard_apply(Tensor z, Tensor fz, Tensor best, Tensor verdict, double damping) {
  const Checker check{"picard_apply", z};
  check.check_rows();
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    PicardParams<T> p = {};
    const RowSums<T> half = begin_apply<T>(check, p, z, fz, best, verdict);
    p.damping = static_cast<T>(damping);
    Device::apply(p, half, z);
  });
}

template <class Device>
void multisecant_sums(Tensor z, Tensor fz, Tensor status, Tensor f_prev, Tensor left, Tensor df, Tensor gram, Tensor sums,
                      int64_t k, int64_t method, double beta) {
  const Checker check{"multisecant_sums", z};
  check.check_rows();
  const auto [history_dtype, history] = check.check_history(left, method, Device::max_history);
  check_steps(check, k, 1);
  const int64_t batch = z.size(0), dim = z.size(1), pairs = history;
  dispatch_history<typename Device::BFloat16>(z.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    MultisecantParams<T, H> p = {};
    const int n = static_cast<int>(std::min(k, pairs));
    const RowSums<T> half = begin_sums<T>(check, p, z, fz, status, sums, SumsOfPairs(n, method).width);
    p.f_prev = check.in<T>("f_prev", f_prev, {batch, dim});
    p.left = check.out<H>("left", left, {batch, pairs, dim});
    p.df = check.out<H>("df", df, {batch, pairs, dim});
    p.gram = const_cast<T*>(check.in<T>("gram", gram, {batch, pairs + 2, pairs}));
    p.history = static_cast<int>(pairs);
    p.rule.k = k;
    p.method = method;
    p.beta = static_cast<T>(beta);
    Device::sums(p, half, z);
  });
}

template <class Device>
void multisecant_apply(Tensor z, Tensor fz, Tensor best, Tensor verdict, Tensor left, Tensor df, Tensor gram, Tensor sums,
                       int64_t k, int64_t method, double alpha, double beta, double ridge) {
  const Checker check{"multisecant_apply", z};
  check.check_rows();
  const auto [history_dtype, history] = check.check_history(left, method, Device::max_history);
  check_steps(check, k, 0);
  const int64_t batch = z.size(0), dim = z.size(1), pairs = history;
  dispatch_history<typename Device::BFloat16>(z.scalar_type(), history_dtype, [&](auto state, auto element) {
    using T = decltype(state);
    using H = decltype(element);
    MultisecantParams<T, H> p = {};
    RowSums<T> half = begin_apply<T>(check, p, z, fz, best, verdict);
    read_sums(check, half, z, sums, k, SumsOfPairs(static_cast<int>(std::min(k, pairs)), method).width);
    p.left = check.out<H>("left", left, {batch, pairs, dim});
    p.df = const_cast<H*>(check.in<H>("df", df, {batch, pairs, dim}));
    p.gram = check.out<T>("gram", gram, {batch, pairs + 2, pairs});
    p.history = static_cast<int>(pairs);
    p.rule.k = k;
    p.method = method;
    p.alpha = static_cast<T>(alpha);
    p.beta = static_cast<T>(beta);
    p.ridge = static_cast<T>(ridge);
    Device::apply(p, half, z);
  });
}

// The number of steps that there is room for; `k` steps are known, at least `least`, and one may follow.
inline int64_t room_for_steps(const Checker& check, const Tensor& steps, int64_t k, int64_t least) {
  const int64_t rows = steps.dim() == 3 ? steps.size(1) : 0;
  STD_TORCH_CHECK(rows >= 1, check.op, ": `steps` must have shape (B, steps, D) with room for one step or more, got ",
                  shape_text(steps.sizes()));
  STD_TORCH_CHECK(k >= least && k < rows, check.op, ": `k` must be at least ", least, " and below the ", rows,
                  " steps there is room for, got ", k);
  return rows;
}

template <class Device>
void broyden_sums(Tensor z, Tensor fz, Tensor status, Tensor steps, Tensor sums, int64_t k) {
  const Checker check{"broyden_sums", z};
  check.check_rows();
  const int64_t batch = z.size(0), dim = z.size(1), rows = room_for_steps(check, steps, k, 1);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    BroydenParams<T> p = {};
    const RowSums<T> half = begin_sums<T>(check, p, z, fz, status, sums, 2 + 2 * k);
    p.steps = const_cast<T*>(check.in<T>("steps", steps, {batch, rows, dim}));
    p.rows = rows;
    p.rule.k = k;
    Device::sums(p, half, z);
  });
}

template <class Device>
void broyden_apply(Tensor z, Tensor fz, Tensor best, Tensor verdict, Tensor steps, Tensor gram, Tensor first, Tensor sums,
                   int64_t k) {
  const Checker check{"broyden_apply", z};
  check.check_rows();
  const int64_t batch = z.size(0), dim = z.size(1), rows = room_for_steps(check, steps, k, 0);
  dispatch_state(z.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    BroydenParams<T> p = {};
    RowSums<T> half = begin_apply<T>(check, p, z, fz, best, verdict);
    read_sums(check, half, z, sums, k, 2 + 2 * k);
    p.steps = check.out<T>("steps", steps, {batch, rows, dim});
    p.gram = check.out<T>("gram", gram, {batch, rows, rows});
    p.first = check.out<int32_t>("first", first, {batch});
    p.rows = rows;
    p.rule.k = k;
    Device::apply(p, half, z);
  });
}

}  // namespace deqfast
