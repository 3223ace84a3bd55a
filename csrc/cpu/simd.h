// Vectors of 64 bytes and the row primitives of the solver kernels. The vectors are the compiler's own: one source
// gives AVX2 code, which setup.py asks for, and AVX-512 code, chosen when the library is loaded, with one order of
// summation.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#define DEQFAST_ALWAYS_INLINE __attribute__((always_inline))  // also for lambdas, whose callers are cloned
#define DEQFAST_INLINE inline DEQFAST_ALWAYS_INLINE

// DEQFAST_CLONES: a function for AVX2 and for AVX-512. DEQFAST_WIDE: for AVX-512 alone, to be called if DEQFAST_HAS_WIDE.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define DEQFAST_CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
#define DEQFAST_WIDE __attribute__((target("arch=x86-64-v4")))
#define DEQFAST_HAS_WIDE __builtin_cpu_supports("avx512vl")
#else
#define DEQFAST_CLONES
#define DEQFAST_WIDE
#define DEQFAST_HAS_WIDE false
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
typedef int32_t I32x8 __attribute__((vector_size(32)));
typedef uint32_t U32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));

// Fewer elements than a vector's W lanes. As the count of a load or store it spares the code for whole vectors, as W as a
// constant spares that for parts.
template <int W>
struct Tail {
  int64_t count;
  constexpr operator int64_t() const { return count; }
};

// Copy the first `count` of W elements, all of them if `count` is larger.
template <int W, class T, class Count>
DEQFAST_INLINE void copy_lanes(T* to, const T* from, Count count) {
  if constexpr (!std::is_same_v<Count, Tail<W>>) {
    if (count >= W) {  // a size known to the compiler: else this is a call
      memcpy(to, from, W * sizeof(T));
      return;
    }
  }
  memcpy(to, from, count * sizeof(T));
}

// `count` below the number of lanes reads or writes that many elements; missing lanes are zero.
template <class T, class Count>
DEQFAST_INLINE Vec<T> load(const T* from, Count count) {
  Vec<T> v = {};
  copy_lanes<Simd<T>::lanes>(reinterpret_cast<T*>(&v), from, count);
  return v;
}

DEQFAST_INLINE Vec<float> as_float(U32x16 bits) {
  Vec<float> v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

template <class T, class Count>
DEQFAST_INLINE Vec<float> load(const BFloat16* from, Count count) {
  U16x16 half = {};
  copy_lanes<16>(reinterpret_cast<BFloat16*>(&half), from, count);
  return as_float(__builtin_convertvector(half, U32x16) << 16);
}

template <class T, class Count>
DEQFAST_INLINE void store(T* to, Vec<T> v, Count count) {
  copy_lanes<Simd<T>::lanes>(to, reinterpret_cast<const T*>(&v), count);
}

// Eight elements of any type as double; all of these conversions are exact.
DEQFAST_INLINE Vec<double> load_double(const double* from, int64_t count) { return load(from, count); }

DEQFAST_INLINE Vec<double> load_double(const float* from, int64_t count) {
  F32x8 v = {};
  copy_lanes<8>(reinterpret_cast<float*>(&v), from, count);
  return __builtin_convertvector(v, Vec<double>);
}

template <class H>
DEQFAST_INLINE U32x8 load_bits(const H* from, int64_t count) {
  U16x8 half = {};
  copy_lanes<8>(reinterpret_cast<H*>(&half), from, count);
  return __builtin_convertvector(half, U32x8);
}

DEQFAST_INLINE Vec<double> load_double(const BFloat16* from, int64_t count) {
  const U32x8 wide = load_bits(from, count) << 16;
  F32x8 v;
  memcpy(&v, &wide, sizeof v);
  return __builtin_convertvector(v, Vec<double>);
}

// The exponent's bias goes from 15 to 127. Subnormal halves are multiples of 2^-24, made from integers: where the
// processor takes subnormal floats for zero, they would be lost in those.
DEQFAST_INLINE Vec<double> load_double(const Half* from, int64_t count) {
  const U32x8 bits = load_bits(from, count), exponent = bits & 0x7c00;
  F32x8 v = __builtin_convertvector((I32x8)(bits & 0x3ff), F32x8) * 0x1p-24f;
  U32x8 tiny;
  memcpy(&tiny, &v, sizeof tiny);
  const U32x8 is_tiny = (U32x8)(exponent == 0), not_finite = (U32x8)(exponent == 0x7c00);
  U32x8 wide = (is_tiny & tiny) | (~is_tiny & (((bits & 0x7fff) << 13) + (112u << 23)));
  wide |= (not_finite & 0x7f800000) | (bits & 0x8000) << 16;
  memcpy(&v, &wide, sizeof v);
  return __builtin_convertvector(v, Vec<double>);
}

// The upper halves, rounded to nearest even; NaN stays NaN.
DEQFAST_INLINE U32x16 bfloat16_bits(Vec<float> v) {
  U32x16 bits;
  memcpy(&bits, &v, sizeof bits);
  const U32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U32x16 is_nan = (U32x16)(v != v);
  return (is_nan & 0x7fc0) | (~is_nan & rounded);
}

template <class Count>
DEQFAST_INLINE void store_bits(BFloat16* to, U32x16 bits, Count count) {
  const U16x16 half = __builtin_convertvector(bits, U16x16);
  copy_lanes<16>(to, reinterpret_cast<const BFloat16*>(&half), count);
}

template <class Count>
DEQFAST_INLINE void store(BFloat16* to, Vec<float> v, Count count) { store_bits(to, bfloat16_bits(v), count); }

// A vector as memory of H holds it: rounded once, then used and stored.
template <class T, class H>
struct Held {
  Vec<T> v;
  DEQFAST_INLINE explicit Held(Vec<T> v) : v(v) {}
  DEQFAST_INLINE Vec<T> value() const { return v; }
  template <class Count>
  DEQFAST_INLINE void put(H* to, Count count) const {
    store(to, v, count);
  }
};
template <>
struct Held<float, BFloat16> {
  U32x16 bits;
  DEQFAST_INLINE explicit Held(Vec<float> v) : bits(bfloat16_bits(v)) {}
  DEQFAST_INLINE Vec<float> value() const { return as_float(bits << 16); }
  template <class Count>
  DEQFAST_INLINE void put(BFloat16* to, Count count) const {
    store_bits(to, bits, count);
  }
};

// Call body(d, lanes) for every vector of W of `count` elements, `lanes` being the compile-time W but for a Tail at
// the end: a load or store of whole vectors is then one instruction.
template <int W, class F>
DEQFAST_INLINE void for_vectors(int64_t count, const F& body) {
  int64_t d = 0;
  for (; d + W <= count; d += W) body(d, std::integral_constant<int64_t, W>());
  if (d < count) body(d, Tail<W>{count - d});
}

// Sums in double of vectors, lane by lane.
DEQFAST_INLINE Vec<double> widened(Vec<double> v) { return v; }
DEQFAST_INLINE Vec<double> widened(Vec<float> v) {
  F32x8 low, high;
  memcpy(&low, &v, sizeof low);
  memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
  return __builtin_convertvector(low, Vec<double>) + __builtin_convertvector(high, Vec<double>);
}

// The sum over the lanes, in double, by halves: shorter than one lane after the other.
template <class T>
DEQFAST_INLINE double sum(Vec<T> v) {
  const Vec<double> w = widened(v);
  return ((w[0] + w[4]) + (w[2] + w[6])) + ((w[1] + w[5]) + (w[3] + w[7]));
}

}  // namespace deqfast
