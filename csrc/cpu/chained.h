// The solver steps as links of a chain, for a loop that a graph holds: the next iterate is memory of its own, and the
// rest of the state is written to though the schema does not say so. A graph sees no more than the chain of iterates,
// which is an order of all that the steps read and write.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "../common/checks.h"

namespace deqfast {

// What all links of a chain work on. A graph hands it on as one tensor of bytes, since each tensor that it hands to a
// loop's body or to an op costs about a tenth of a microsecond.
struct ChainState {
  const ChainState* self;  // tells a state from other bytes, and from a copy, whose tensors nobody keeps
  std::vector<Tensor> tensors;  // of the step, in its order, without those that a link takes itself; k, the count

  static ChainState& of(const Tensor& bytes, size_t tensors) {
    auto* state = static_cast<ChainState*>(bytes.mutable_data_ptr());
    STD_TORCH_CHECK(bytes.numel() == sizeof(ChainState) && state->self == state && state->tensors.size() == tensors,
                    "a link of a chain: `state` must be what chain_state makes of ", tensors, " tensors");
    return *state;
  }
};

// A contiguous tensor on the CPU without values, for a fraction of what the dispatcher takes.
template <size_t dims>
Tensor uninitialised(const std::array<int64_t, dims>& sizes, const std::array<int64_t, dims>& strides,
                     ScalarType dtype) {
  AtenTensorHandle handle;
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes.data(), strides.data(), type,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

template <auto step, bool kept = false, class = decltype(step)>
struct Chained;

// `A` are the step's arguments: tensors, of which the first two are z and f(z) and that at `kActive` counts the running
// samples, then `int64_t k, bool last` and others. A link takes z, f(z), f at the iterate before if it is `kept` (behind
// the count), the rest of the tensors as a ChainState, `int64_t max_iter` and the others.
template <auto step, bool kept, class... A>
struct Chained<step, kept, void (*)(A...)> {
  static constexpr size_t kActive = 7;
  static constexpr size_t tensors = (std::is_same_v<A, Tensor> + ...), taken = 2 + kept, behind = tensors + 2;

  template <size_t>
  using Taken = Tensor;
  template <size_t I>
  using Number = std::tuple_element_t<behind + I, std::tuple<A...>>;

  template <class Takes, class Tensors, class Numbers>
  struct Link;
  template <size_t... T, size_t... I, size_t... N>
  struct Link<std::index_sequence<T...>, std::index_sequence<I...>, std::index_sequence<N...>> {
    static std::tuple<Tensor, Tensor> run(Taken<T>... takes, Tensor state, int64_t max_iter, Number<N>... numbers) {
      const auto taking = std::tie(takes...);
      const std::vector<Tensor>& shared = ChainState::of(state, tensors - taken + 1).tensors;
      const Tensor &z = std::get<0>(taking), &count = shared.back(), &active = shared[kActive - 2];
      STD_TORCH_CHECK(z.dim() == 2 && z.is_contiguous() && !z.is_cuda(),
                      "a link of a chain: `z` must be contiguous rows on the CPU");
      STD_TORCH_CHECK(count.scalar_type() == ScalarType::Long && count.numel() == 1 && !count.is_cuda(),
                      "a link of a chain: `k` must be one int64 on the CPU");
      int64_t& k = *count.mutable_data_ptr<int64_t>();
      const Tensor next = uninitialised<2>({z.size(0), z.size(1)}, {z.size(1), 1}, z.scalar_type());
      std::memcpy(next.mutable_data_ptr(), z.const_data_ptr(), z.numel() * z.element_size());
      step(argument<I>(next, taking, shared)..., k, k + 1 == max_iter, numbers...);
      const Tensor done = uninitialised<0>({}, {}, ScalarType::Bool);
      const bool all = *active.const_data_ptr<int32_t>() == 0;
      *static_cast<bool*>(done.mutable_data_ptr()) = ++k >= max_iter || all;
      return {next, done};
    }
  };

  template <size_t I, class Takes>
  static const Tensor& argument(const Tensor& next, const Takes& taking, const std::vector<Tensor>& shared) {
    if constexpr (I == 0) {
      return next;
    } else if constexpr (I == 1) {
      return std::get<1>(taking);
    } else if constexpr (I == kActive + 1 && kept) {
      return std::get<2>(taking);
    } else {
      return shared[I - (I > kActive ? taken : 2)];
    }
  }

  using Whole = Link<std::make_index_sequence<taken>, std::make_index_sequence<tensors>,
                     std::make_index_sequence<sizeof...(A) - behind>>;
};

}  // namespace deqfast
