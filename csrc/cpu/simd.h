// Vectors of 64 bytes and the row primitives of the solver kernels. A vector consists of several of the processor's
// registers, each one of the compiler's own vector types, because a wider type would be kept in memory. So one source,
// compiled for AVX2 and for AVX-512, has the same lanes and one order of summation.
//
// No packaged library has the same bits everywhere in fewer lines. torch's at::vec stops with #error in a build for the
// stable ABI. Vectors of Highway and xsimd are as wide as a register: the order of a sum would depend on the processor.
// std::experimental::simd has fixed widths, but only libstdc++ has all of it. For AVX2, gcc 12 moves its masks through
// integers at every selection. It could replace Vec and Mask, but not the loads of tails, the halves or the sums.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// Also for lambdas: a vector of several registers is passed in memory to a function that is not inlined.
#define DEQFAST_ALWAYS_INLINE __attribute__((always_inline))
#define DEQFAST_INLINE inline DEQFAST_ALWAYS_INLINE

namespace deqfast {

#if defined(__AVX512F__)
constexpr int kRegister = 64;  // bytes
#elif defined(__AVX__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

template <class T, int N>
struct RegisterOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N = kRegister / sizeof(T)>
using Register = typename RegisterOf<T, N>::type;

template <class T>
struct Simd {
  static constexpr int lanes = 64 / sizeof(T);
};

constexpr int kParts = 64 / kRegister;  // of a vector

// A mask of lanes of this many bytes each, in the form of the compiler's comparisons.
template <int Bytes>
struct Mask {
  using Part = Register<std::conditional_t<Bytes == 4, float, double>>;
  decltype(Part() < Part()) part[kParts];
};

template <class T>
struct Vec {
  static constexpr int width = Simd<T>::lanes / kParts;  // lanes of a part
  Register<T> part[kParts];

  Vec() = default;
  DEQFAST_INLINE Vec(T x) {
    for (auto& p : part) p = x - Register<T>{};
  }
  DEQFAST_INLINE T operator[](int lane) const { return part[lane / width][lane % width]; }

#define DEQFAST_OPERATOR(op)                                                 \
  friend DEQFAST_INLINE Vec operator op(Vec a, Vec b) {                      \
    for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] op b.part[i];     \
    return a;                                                                \
  }
  DEQFAST_OPERATOR(+)
  DEQFAST_OPERATOR(-)
  DEQFAST_OPERATOR(*)
  DEQFAST_OPERATOR(/)
  DEQFAST_OPERATOR(&)
#undef DEQFAST_OPERATOR
#define DEQFAST_COMPARISON(op)                                               \
  friend DEQFAST_INLINE Mask<sizeof(T)> operator op(Vec a, Vec b) {          \
    Mask<sizeof(T)> m;                                                       \
    for (int i = 0; i < kParts; ++i) m.part[i] = a.part[i] op b.part[i];     \
    return m;                                                                \
  }
  DEQFAST_COMPARISON(<)
  DEQFAST_COMPARISON(<=)
  DEQFAST_COMPARISON(>)
  DEQFAST_COMPARISON(!=)
#undef DEQFAST_COMPARISON
  friend DEQFAST_INLINE Vec operator-(Vec a) {
    for (auto& p : a.part) p = -p;
    return a;
  }
  friend DEQFAST_INLINE Vec operator<<(Vec a, int bits) {
    for (auto& p : a.part) p = p << bits;
    return a;
  }
  friend DEQFAST_INLINE Vec operator>>(Vec a, int bits) {
    for (auto& p : a.part) p = p >> bits;
    return a;
  }
  friend DEQFAST_INLINE Vec& operator+=(Vec& a, Vec b) { return a = a + b; }
  friend DEQFAST_INLINE Vec& operator-=(Vec& a, Vec b) { return a = a - b; }
  friend DEQFAST_INLINE Vec& operator/=(Vec& a, Vec b) { return a = a / b; }

  // Per lane a if the mask is set, else b.
  friend DEQFAST_INLINE Vec select(Mask<sizeof(T)> mask, Vec a, Vec b) {
    for (int i = 0; i < kParts; ++i) a.part[i] = mask.part[i] ? a.part[i] : b.part[i];
    return a;
  }
};

// The bits of a vector as another type of the same size.
template <class To, class From>
DEQFAST_INLINE Vec<To> bits_as(Vec<From> v) {
  Vec<To> to;
  for (int i = 0; i < kParts; ++i) to.part[i] = (Register<To>)v.part[i];
  return to;
}

// Fewer elements than a vector's W lanes. With a Tail as the count, a load or store has no code for whole vectors; with
// the constant W, it has no code for partial ones.
template <int W>
struct Tail {
  int64_t count;
  constexpr operator int64_t() const { return count; }
};

// The value of body(from) for W elements; with a `count` below W, for that many elements and zeros.
template <int W, class T, class Count, class Body>
DEQFAST_INLINE auto padded(const T* from, Count count, const Body& body) {
  if constexpr (!std::is_same_v<Count, Tail<W>>) {
    if (count >= W) return body(from);
  }
  T copy[W] = {};
  memcpy(copy, from, count * sizeof(T));
  return body(static_cast<const T*>(copy));
}

// Have body(to) write W elements, of which the first `count` are kept, or all if `count` is larger.
template <int W, class T, class Count, class Body>
DEQFAST_INLINE void cut(T* to, Count count, const Body& body) {
  if constexpr (!std::is_same_v<Count, Tail<W>>) {
    if (count >= W) return body(to);
  }
  T copy[W];
  body(copy);
  memcpy(to, copy, count * sizeof(T));
}

template <class R, class T>
DEQFAST_INLINE R read(const T* from) {
  R r;
  memcpy(&r, from, sizeof r);
  return r;
}

// `count` below the number of lanes reads or writes that many elements; missing lanes are zero.
template <class T, class Count>
DEQFAST_INLINE Vec<T> load(const T* from, Count count) {
  return padded<Simd<T>::lanes>(from, count, [](const T* whole) DEQFAST_ALWAYS_INLINE {
    Vec<T> v;
    for (int i = 0; i < kParts; ++i) v.part[i] = read<Register<T>>(whole + i * Vec<T>::width);
    return v;
  });
}

template <class T, class Count>
DEQFAST_INLINE Vec<float> load(const BFloat16* from, Count count) {
  return padded<Simd<float>::lanes>(from, count, [](const BFloat16* whole) DEQFAST_ALWAYS_INLINE {
    constexpr int width = Vec<float>::width;
    Vec<uint32_t> bits;
    for (int i = 0; i < kParts; ++i) {
      const auto half = read<Register<uint16_t, width>>(whole + i * width);
      bits.part[i] = __builtin_convertvector(half, Register<uint32_t>) << 16;
    }
    return bits_as<float>(bits);
  });
}

template <class T, class Count>
DEQFAST_INLINE void store(T* to, Vec<T> v, Count count) {
  cut<Simd<T>::lanes>(to, count, [&](T* whole) DEQFAST_ALWAYS_INLINE {
    for (int i = 0; i < kParts; ++i) memcpy(whole + i * Vec<T>::width, &v.part[i], kRegister);
  });
}

// As many elements of any type as fit in a register in double; all of these conversions are exact.
DEQFAST_INLINE Register<double> read_double(const double* from) { return read<Register<double>>(from); }

DEQFAST_INLINE Register<double> read_double(const float* from) {
  return __builtin_convertvector(read<Register<float, Vec<double>::width>>(from), Register<double>);
}

// Half a register of elements of four bytes.
template <class T>
using Narrow = Register<T, Vec<double>::width>;

// Elements of two bytes are widened to as many floats as fit in a register, at most eight.
constexpr int kWidened = kRegister < 32 ? 4 : 8;
using Floats = Register<float, kWidened>;
using Words = Register<uint32_t, kWidened>;

template <class H>
DEQFAST_INLINE Words read_bits(const H* from) {
  return __builtin_convertvector(read<Register<uint16_t, kWidened>>(from), Words);
}

DEQFAST_INLINE Floats read_floats(const BFloat16* from) { return (Floats)(read_bits(from) << 16); }

// The exponent's bias goes from 15 to 127. Subnormal halves are multiples of 2^-24 and are made from integers: as
// subnormal floats they would be lost if the processor treats those as zero.
DEQFAST_INLINE Floats read_floats(const Half* from) {
  const Words bits = read_bits(from), exponent = bits & 0x7c00;
  const Floats mantissa = __builtin_convertvector((Register<int32_t, kWidened>)(bits & 0x3ff), Floats);
  const Words tiny = (Words)(mantissa * 0x1p-24f);
  const Words is_tiny = (Words)(exponent == 0), not_finite = (Words)(exponent == 0x7c00);
  Words wide = (is_tiny & tiny) | (~is_tiny & (((bits & 0x7fff) << 13) + (112u << 23)));
  wide |= (not_finite & 0x7f800000) | (bits & 0x8000) << 16;
  return (Floats)wide;
}

template <class H, class Count>
DEQFAST_INLINE Vec<double> load_double(const H* from, Count count) {
  constexpr int lanes = Simd<double>::lanes;
  return padded<lanes>(from, count, [](const H* whole) DEQFAST_ALWAYS_INLINE {
    if constexpr (sizeof(H) == 2) {
      float floats[lanes];
      for (int i = 0; i < lanes; i += kWidened) {
        const Floats part = read_floats(whole + i);
        memcpy(floats + i, &part, sizeof part);
      }
      return load_double(floats, std::integral_constant<int64_t, lanes>());
    } else {
      Vec<double> v;
      for (int i = 0; i < kParts; ++i) v.part[i] = read_double(whole + i * Vec<double>::width);
      return v;
    }
  });
}

// The upper halves, rounded to nearest even; NaN stays NaN.
DEQFAST_INLINE Vec<uint32_t> bfloat16_bits(Vec<float> v) {
  const Vec<uint32_t> bits = bits_as<uint32_t>(v), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return select(v != v, 0x7fc0, rounded);
}

template <class Count>
DEQFAST_INLINE void store_bits(BFloat16* to, Vec<uint32_t> bits, Count count) {
  cut<Simd<float>::lanes>(to, count, [&](BFloat16* whole) DEQFAST_ALWAYS_INLINE {
    constexpr int width = Vec<float>::width;
    for (int i = 0; i < kParts; ++i) {
      const auto half = __builtin_convertvector(bits.part[i], Register<uint16_t, width>);
      memcpy(whole + i * width, &half, sizeof half);
    }
  });
}

template <class Count>
DEQFAST_INLINE void store(BFloat16* to, Vec<float> v, Count count) { store_bits(to, bfloat16_bits(v), count); }

// A vector rounded to H once, as memory of H would store it, then used and stored.
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
  Vec<uint32_t> bits;
  DEQFAST_INLINE explicit Held(Vec<float> v) : bits(bfloat16_bits(v)) {}
  DEQFAST_INLINE Vec<float> value() const { return bits_as<float>(bits << 16); }
  template <class Count>
  DEQFAST_INLINE void put(BFloat16* to, Count count) const {
    store_bits(to, bits, count);
  }
};

// Call body(d, lanes) for every vector of W of `count` elements. `lanes` is the constant W, except for a Tail at the
// end: a load or store of whole vectors is then one instruction.
template <int W, class F>
DEQFAST_INLINE void for_vectors(int64_t count, const F& body) {
  int64_t d = 0;
  for (; d + W <= count; d += W) body(d, std::integral_constant<int64_t, W>());
  if (d < count) body(d, Tail<W>{count - d});
}

// The lanes of half a register from `First` on, in double. They are taken one by one: a copy as memory would keep the
// register in memory.
template <int First, size_t... I>
DEQFAST_INLINE Register<double> half_in_double(Register<float> v, std::index_sequence<I...>) {
  return __builtin_convertvector((Narrow<float>{v[First + I]...}), Register<double>);
}

// A vector of doubles with the same sum over its lanes. The halves of a float vector are added.
DEQFAST_INLINE Vec<double> widened(Vec<double> v) { return v; }
DEQFAST_INLINE Vec<double> widened(Vec<float> v) {
  constexpr int width = Vec<double>::width;
  constexpr auto lanes = std::make_index_sequence<width>();
  Vec<double> halves[2];
  for (int i = 0; i < 2 * kParts; i += 2) {
    halves[i / kParts].part[i % kParts] = half_in_double<0>(v.part[i / 2], lanes);
    halves[(i + 1) / kParts].part[(i + 1) % kParts] = half_in_double<width>(v.part[i / 2], lanes);
  }
  return halves[0] + halves[1];
}

// The sum over the lanes, in double, by halves: faster than one lane after the other.
template <class T>
DEQFAST_INLINE double sum(Vec<T> v) {
  const Vec<double> w = widened(v);
  return ((w[0] + w[4]) + (w[2] + w[6])) + ((w[1] + w[5]) + (w[3] + w[7]));
}

}  // namespace deqfast
