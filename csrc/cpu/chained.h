// The solver steps as links of a chain, for a loop that a graph holds: the next iterate is memory of its own, and the
// rest of the state is written to though the schema does not say so. A graph sees no more than the chain of iterates,
// which is an order of all that the steps read and write.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "../common/checks.h"

namespace deqfast {

template <auto step, class = decltype(step)>
struct Chained;

// `A` are the step's arguments: tensors, of which the first is z and the one at `kActive` the count of running samples,
// then `int64_t k, bool last` and others. A link takes `Tensor k, int64_t max_iter` in the place of those two.
template <auto step, class... A>
struct Chained<step, void (*)(A...)> {
  static constexpr size_t kActive = 7;
  static constexpr size_t tensors = (std::is_same_v<A, Tensor> + ...);

  template <size_t I>
  using Argument = std::conditional_t<I == tensors, Tensor,
                                      std::conditional_t<I == tensors + 1, int64_t,
                                                         std::tuple_element_t<I, std::tuple<A...>>>>;

  template <class Indices>
  struct Link;
  template <size_t... I>
  struct Link<std::index_sequence<I...>> {
    static std::tuple<Tensor, Tensor> run(Argument<I>... arguments) {
      const auto given = std::tie(arguments...);
      const Tensor &count = std::get<tensors>(given), &active = std::get<kActive>(given);
      STD_TORCH_CHECK(count.scalar_type() == ScalarType::Long && count.numel() == 1 && !count.is_cuda(),
                      "a link of a chain: `k` must be one int64 on the CPU");
      int64_t& k = *count.mutable_data_ptr<int64_t>();
      const Tensor next = torch::stable::clone(std::get<0>(given));
      step(value<I>(given, next, k)...);
      Tensor done = torch::stable::new_empty(active, {}, ScalarType::Bool);
      const bool all = *active.const_data_ptr<int32_t>() == 0;
      *static_cast<bool*>(done.mutable_data_ptr()) = ++k >= std::get<tensors + 1>(given) || all;
      return {next, done};
    }

    template <size_t J, class Given>
    static auto value(const Given& given, const Tensor& next, int64_t k) {
      if constexpr (J == 0) {
        return next;
      } else if constexpr (J == tensors) {
        return k;
      } else if constexpr (J == tensors + 1) {
        return k + 1 == std::get<J>(given);
      } else {
        return std::get<J>(given);
      }
    }
  };

  using Whole = Link<std::make_index_sequence<sizeof...(A)>>;
};

}  // namespace deqfast
