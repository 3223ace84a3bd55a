// bfloat16 as CUDA has it, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t wide;
  memcpy(&wide, &x, sizeof wide);
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
