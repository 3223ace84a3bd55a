// Conversions with explicit rounding: torch builds extensions without the implicit conversions of bfloat16.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

namespace deqfast {

template <class To, class From>
__device__ To convert(From x) {
  if constexpr (std::is_same_v<From, __nv_bfloat16>) {
    return __bfloat162float(x);
  } else if constexpr (std::is_same_v<To, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

}  // namespace deqfast
