// From how much work on a second thread is woken. OpenMP's threads spin while they wait for each other, for milliseconds
// where other processes want their cores: what one thread does in some 25 us is not shared.
#pragma once

#include <algorithm>
#include <cstdint>

namespace deqfast {

// Items for a thread, each of so many elements passed over once, at some 0.2 ns an element.
inline int64_t grain_of(int64_t elements) {
  constexpr int64_t least = 1 << 17;
  return std::max<int64_t>(least / std::max<int64_t>(elements, 1), 1);
}

}  // namespace deqfast
