// chain_state: the tensors that the links of a chain share, in one tensor that keeps them.
#include <torch/csrc/stable/library.h>

#include "chained.h"

namespace deqfast {
namespace {

Tensor chain_state(std::vector<Tensor> tensors) {
  constexpr int64_t size = sizeof(ChainState);
  auto* made = new ChainState{nullptr, std::move(tensors)};
  made->self = made;
  return torch::stable::from_blob(
      made, {size}, {1},
      torch::stable::Device(torch::headeronly::DeviceType::CPU), ScalarType::Byte,
      [](void* state) { delete static_cast<ChainState*>(state); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(deqfast, CPU, m) { m.impl("chain_state", TORCH_BOX(&chain_state)); }

}  // namespace deqfast
