// Vectors of 64 bytes and the row primitives of the solver kernels. The vectors are the compiler's own: one source
// gives AVX-512, AVX2 and baseline code, chosen when the library is loaded, with one order of summation.
#pragma once

#include <cstdint>
#include <cstring>

#define DEQFAST_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define DEQFAST_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define DEQFAST_WIDE_REGISTERS __builtin_cpu_supports("avx512vl")
#else
#define DEQFAST_CLONES
#define DEQFAST_WIDE_REGISTERS false
#endif

namespace deqfast {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class T>
struct Simd;
template <>
struct Simd<float> {
  static constexpr int lanes = 16;
  typedef float Vec __attribute__((vector_size(64)));
};
template <>
struct Simd<double> {
  static constexpr int lanes = 8;
  typedef double Vec __attribute__((vector_size(64)));
};
template <class T>
using Vec = typename Simd<T>::Vec;

typedef float F32x8 __attribute__((vector_size(32)));
typedef uint32_t U32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));

// `count` below the number of lanes reads or writes that many elements; missing lanes are zero.
template <class T>
DEQFAST_INLINE Vec<T> load(const T* from, int64_t count) {
  Vec<T> v = {};
  if (count >= Simd<T>::lanes) {
    memcpy(&v, from, sizeof v);
  } else {
    memcpy(&v, from, count * sizeof(T));
  }
  return v;
}

template <class T>
DEQFAST_INLINE Vec<float> load(const BFloat16* from, int64_t count) {
  U16x16 half = {};
  memcpy(&half, from, (count >= 16 ? 16 : count) * sizeof(uint16_t));
  const U32x16 wide = __builtin_convertvector(half, U32x16) << 16;
  Vec<float> v;
  memcpy(&v, &wide, sizeof v);
  return v;
}

template <class T>
DEQFAST_INLINE void store(T* to, Vec<T> v, int64_t count) {
  memcpy(to, &v, count >= Simd<T>::lanes ? sizeof v : count * sizeof(T));
}

// Eight elements of any type as double; all of these conversions are exact.
DEQFAST_INLINE Vec<double> load_double(const double* from, int64_t count) { return load(from, count); }

DEQFAST_INLINE Vec<double> load_double(const float* from, int64_t count) {
  F32x8 v = {};
  if (count >= 8) {
    memcpy(&v, from, sizeof v);
  } else {
    memcpy(&v, from, count * sizeof(float));
  }
  return __builtin_convertvector(v, Vec<double>);
}

template <class H>
DEQFAST_INLINE U32x8 load_bits(const H* from, int64_t count) {
  U16x8 half = {};
  if (count >= 8) {
    memcpy(&half, from, sizeof half);
  } else {
    memcpy(&half, from, count * sizeof(H));
  }
  return __builtin_convertvector(half, U32x8);
}

DEQFAST_INLINE Vec<double> load_double(const BFloat16* from, int64_t count) {
  const U32x8 wide = load_bits(from, count) << 16;
  F32x8 v;
  memcpy(&v, &wide, sizeof v);
  return __builtin_convertvector(v, Vec<double>);
}

// The exponent's bias goes from 15 to 127 by a product, which is right for subnormal numbers too.
DEQFAST_INLINE Vec<double> load_double(const Half* from, int64_t count) {
  const U32x8 bits = load_bits(from, count), magnitude = (bits & 0x7fff) << 13;
  F32x8 v;
  memcpy(&v, &magnitude, sizeof v);
  v *= 0x1p112f;
  U32x8 wide;
  memcpy(&wide, &v, sizeof wide);
  const U32x8 not_finite = (U32x8)((bits & 0x7c00) == 0x7c00);
  wide |= (not_finite & 0x7f800000) | (bits & 0x8000) << 16;
  memcpy(&v, &wide, sizeof v);
  return __builtin_convertvector(v, Vec<double>);
}

// Round to nearest even; NaN stays NaN.
DEQFAST_INLINE void store(BFloat16* to, Vec<float> v, int64_t count) {
  U32x16 bits;
  memcpy(&bits, &v, sizeof bits);
  const U32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32x16 is_nan = (U32x16)(v != v);
  const U16x16 half = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), U16x16);
  memcpy(to, &half, (count >= 16 ? 16 : count) * sizeof(uint16_t));
}

template <class T, class H>
DEQFAST_INLINE Vec<T> round_to(Vec<T> v) {
  H buffer[Simd<T>::lanes];
  store(buffer, v, Simd<T>::lanes);
  return load<T>(buffer, Simd<T>::lanes);
}
template <>
DEQFAST_INLINE Vec<float> round_to<float, float>(Vec<float> v) {
  return v;
}
template <>
DEQFAST_INLINE Vec<double> round_to<double, double>(Vec<double> v) {
  return v;
}

template <class T>
DEQFAST_INLINE double sum(Vec<T> v) {
  double total = 0;
  for (int i = 0; i < Simd<T>::lanes; ++i) total += v[i];
  return total;
}

}  // namespace deqfast
