// picard_step on the CPU: z <- z + damping (f(z) - z), residuals, status and best iterate of every running sample.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../common/steps.h"
#include "rows.h"

namespace deqfast {
namespace {

template <class T>
DEQFAST_INLINE void picard_row(const PicardParams<T>& a, int64_t row) {
  constexpr int W = Simd<T>::lanes;
  T* z = a.z + row * a.dim;
  const T* fz = a.fz + row * a.dim;
  Vec<T> res_sq[2] = {}, f_sq[2] = {};
  for (int64_t d = 0, i = 0; d < a.dim; d += W, ++i) {
    const Vec<T> f = load(fz + d, a.dim - d), g = f - load(z + d, a.dim - d);
    res_sq[i & 1] += g * g;
    f_sq[i & 1] += f * f;
  }
  const Verdict verdict = settle(a.monitor, row, static_cast<T>(sum<T>(res_sq[0] + res_sq[1])),
                                 static_cast<T>(sum<T>(f_sq[0] + f_sq[1])), a.rule, z, a.best + row * a.dim, a.dim);
  if (!verdict.advance || a.rule.last) return;
  if (a.damping == T(1)) {
    memcpy(z, fz, a.dim * sizeof(T));
    return;
  }
  for (int64_t d = 0; d < a.dim; d += W) {
    const Vec<T> old = load(z + d, a.dim - d);
    store(z + d, old + a.damping * (load(fz + d, a.dim - d) - old), a.dim - d);
  }
}

template <class T>
DEQFAST_INLINE void picard_rows(const PicardParams<T>& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (a.monitor.status[row] == kRunning) picard_row(a, row);
  }
}

DEQFAST_CLONES void run(const PicardParams<float>& a, int64_t begin, int64_t end) { picard_rows(a, begin, end); }
DEQFAST_CLONES void run(const PicardParams<double>& a, int64_t begin, int64_t end) { picard_rows(a, begin, end); }

void picard_step(Tensor z, Tensor fz, Tensor best, Tensor status, Tensor iterations, Tensor residual, Tensor gain,
                 Tensor active, int64_t k, bool last, double tol, bool absolute, double stall_floor, double damping) {
  with_picard_params(z, fz, best, status, iterations, residual, gain, active, k, last, tol, absolute, stall_floor,
                     damping, [](const auto& params) {
                       torch::stable::parallel_for(0, params.monitor.batch, rows_per_thread(params.dim),
                                                   [&](int64_t begin, int64_t end) { run(params, begin, end); });
                     });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) { m.impl("picard_step", TORCH_BOX(&picard_step)); }

}  // namespace deqfast
