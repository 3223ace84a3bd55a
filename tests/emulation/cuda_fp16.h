// float16 as CUDA has it.
#pragma once

struct __half {
  _Float16 value;
};

inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
