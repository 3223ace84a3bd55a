// The least work for which a second thread is used. OpenMP's threads spin while they wait for each other, for
// milliseconds if other processes want their cores. Work of about 25 us on one thread is therefore not shared.
#pragma once

#include <algorithm>
#include <cstdint>

namespace deqfast {

constexpr int64_t kLeastElements = 1 << 17;  // one pass over them takes about 0.2 ns per element

// Number of items for a thread, if each has this many elements.
inline int64_t grain_of(int64_t elements) {
  return std::max<int64_t>(kLeastElements / std::max<int64_t>(elements, 1), 1);
}

}  // namespace deqfast
