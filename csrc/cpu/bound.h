// Steps bound to the tensors of a solve. They run without the dispatcher, which takes longer than a small step.
#pragma once

#include <memory>

#include "../common/steps.h"

namespace deqfast {

struct BoundStep {
  virtual ~BoundStep() = default;
  // Return the number of samples that still run. `fz` has the shape, dtype and layout of z.
  virtual int32_t run(const void* fz, int64_t k, bool last) = 0;
};

// A device for the ops: it keeps their checked parameters for a bound step of `Kernels`, and runs nothing.
template <class Kernels>
struct Binding {
  static constexpr bool kOnHost = Kernels::kOnHost;
  static inline thread_local std::unique_ptr<BoundStep> made;

  template <class Params>
  struct Step : BoundStep {
    Params params;
    Step(const Params& params) : params(params) {}
    int32_t run(const void* fz, int64_t k, bool last) override {
      params.fz = static_cast<decltype(params.fz)>(fz);
      params.rule.k = k;
      params.rule.last = last;
      number<Kernels>(params);
      Kernels::run(params, Tensor());
      return *params.monitor.active;
    }
  };
  template <class Params>
  static void run(const Params& params, const Tensor&) {
    made = std::make_unique<Step<Params>>(params);
  }
};

// `Bind<&op, Kernels>::call` takes the arguments of the op, and returns the address of a BoundStep, which the caller owns.
template <auto op, class Kernels, class = decltype(op)>
struct Bind;
template <auto op, class Kernels, class... Arguments>
struct Bind<op, Kernels, void (*)(Arguments...)> {
  static int64_t call(Arguments... arguments) {
    op(std::move(arguments)...);
    return reinterpret_cast<int64_t>(Binding<Kernels>::made.release());
  }
};

}  // namespace deqfast
