// Query of Python before it launches the CUDA kernel of fc_fixed_point.
#pragma once

#include <cstdint>

namespace deqfast {

// Whether GPU `device` holds W (dim, dim) in shared memory: W bfloat16 if `short_weight`, the state double if
// `wide_state`.
bool fc_fits(int64_t device, int64_t dim, bool short_weight, bool wide_state);

}  // namespace deqfast
