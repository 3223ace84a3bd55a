// From how much work on a second thread is woken. OpenMP's threads spin while they wait for each other, for milliseconds
// where other processes want their cores: what one thread does in some 25 us is not shared.
#pragma once

#include <algorithm>
#include <cstdint>

namespace deqfast {

constexpr int64_t kLeastElements = 1 << 17;  // passed over once, at some 0.2 ns an element

// Items for a thread, each of so many elements.
inline int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(kLeastElements / std::max<int64_t>(elements, 1), 1);
}

}  // namespace deqfast
