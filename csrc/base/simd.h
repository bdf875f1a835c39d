// Portable vectors for the ISA sources: float lanes as wide as the instruction set this source is compiled for (4
// baseline, 8 AVX2, 16 AVX-512), written with the compiler's vector extensions so that GCC and Clang, x86 and Arm
// share one text. Everything here is force-inlined with internal linkage inside `namespace areal::AREAL_ISA`:
// an out-of-line copy compiled for AVX-512 could otherwise be picked by the linker for a baseline caller.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "base/dtype.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef AREAL_ISA
#error "base/simd.h belongs in sources that CMake compiles once per instruction set (AREAL_ISA undefined)"
#endif

#define AREAL_INLINE inline __attribute__((always_inline))

namespace areal::AREAL_ISA {
namespace {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

inline constexpr float kInf = std::numeric_limits<float>::infinity();

AREAL_INLINE VecF splat(float x) { return x - VecF{}; }  // not VecF{} + x: that turns -0 into 0, so the add stays
AREAL_INLINE VecF select(VecI mask, VecF yes, VecF no) { return mask ? yes : no; }
// Where either is NaN the result is b. (Intrinsics: against a constant GCC makes a compare and a blend of a > b ? a :
// b.)
AREAL_INLINE VecF max(VecF a, VecF b) {
#if defined(__AVX512F__)
  return (VecF)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VecF)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
AREAL_INLINE VecF min(VecF a, VecF b) {
#if defined(__AVX512F__)
  return (VecF)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (VecF)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

AREAL_INLINE VecF fma(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
  return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (VecF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

AREAL_INLINE VecF load(const float* p) {
  VecF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
AREAL_INLINE VecF load(const BFloat16* p) {  // intrinsics: GCC 12 splits the generic widening into five instructions
#if defined(__AVX512F__)
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (VecF)((VecU)_mm512_maskz_cvtepu16_epi32(0xffff, h) << 16);
#elif defined(__AVX2__)
  return (VecF)((VecU)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 16);
#else
  VecH h;
  std::memcpy(&h, p, sizeof h);
  return (VecF)(__builtin_convertvector(h, VecU) << 16);
#endif
}
AREAL_INLINE VecF load(const Float16* p) {
#if defined(__AVX512F__)
  return (VecF)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (VecF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  VecH h;
  std::memcpy(&h, p, sizeof h);
  const VecU w = __builtin_convertvector(h, VecU), sign = (w & 0x8000u) << 16, body = (w & 0x7fffu) << 13;
  const VecF scaled = (VecF)body * splat(0x1p112f);  // re-bias; denormals come out right
  const VecU special = (VecU)((VecU)(w & 0x7c00u) == 0x7c00u);
  return (VecF)((((VecU)scaled & ~special) | ((body | 0x7f800000u) & special)) | sign);
#endif
}
AREAL_INLINE void store(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }
AREAL_INLINE void store(BFloat16* p, VecF v) {  // round to nearest even; NaN stays NaN
  const VecU u = (VecU)v, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const VecU quiet = (u >> 16) | 0x40u, nan = (VecU)(v != v);
  const VecU bits = (rounded & ~nan) | (quiet & nan);
#if defined(__AVX2__) && !defined(__AVX512F__)  // GCC 12 takes a dozen instructions for the generic narrowing
  const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  const VecH h = __builtin_convertvector(bits, VecH);
  std::memcpy(p, &h, sizeof h);
#endif
}

AREAL_INLINE float to_float(float x) { return x; }
AREAL_INLINE float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
AREAL_INLINE float to_float(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, body = uint32_t{x.bits & 0x7fffu} << 13;
  if ((x.bits & 0x7c00u) == 0x7c00u) return std::bit_cast<float>(sign | body | 0x7f800000u);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(std::bit_cast<float>(body) * 0x1p112f) | sign);
}
AREAL_INLINE void from_float(float x, float* out) { *out = x; }
AREAL_INLINE void from_float(float x, BFloat16* out) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  out->bits = uint16_t(x != x ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
AREAL_INLINE void from_float(float x, Float16* out) {  // round to nearest even; overflow gives infinity
  const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint32_t h;
  if (a >= 0x7f800000u) {
    h = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (a >= 0x477ff000u) {
    h = 0x7c00u;
  } else if (a < 0x38800000u) {  // denormal half: let the float adder round at 2^-24
    h = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  } else {
    h = (a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  }
  out->bits = uint16_t(sign | h);
}
AREAL_INLINE void store(Float16* p, VecF v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) from_float(v[i], p + i);
#endif
}

// 2 kLanes consecutive elements as two vectors, in whatever order is cheapest; store_pair has the same order.
template <class T>
AREAL_INLINE void load_pair(const T* p, VecF& a, VecF& b) {
  a = load(p);
  b = load(p + kLanes);
}
AREAL_INLINE void load_pair(const BFloat16* p, VecF& even, VecF& odd) {
  VecU words;
  std::memcpy(&words, p, sizeof words);
  even = (VecF)(words << 16);
  odd = (VecF)(words & 0xffff0000u);
}
template <class T>
AREAL_INLINE void store_pair(T* p, VecF a, VecF b) {
  store(p, a);
  store(p + kLanes, b);
}
AREAL_INLINE void store_pair(BFloat16* p, VecF even, VecF odd) {
  const auto rounded = [](VecF v) __attribute__((always_inline)) {
    const VecU u = (VecU)v, nan = (VecU)(v != v);
    return ((u + 0x7fffu + ((u >> 16) & 1u)) & ~nan) | ((u | 0x400000u) & nan);
  };
  const VecU words = (rounded(even) >> 16) | (rounded(odd) & 0xffff0000u);
  std::memcpy(p, &words, sizeof words);
}
// Of values that are not NaN; store_pair() takes twice as many instructions again.
AREAL_INLINE void store_pair_without_nan(BFloat16* p, VecF even, VecF odd) {
  const VecU a = (VecU)even, b = (VecU)odd;
  const VecU low = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16, high = (b + 0x7fffu + ((b >> 16) & 1u)) & 0xffff0000u;
  const VecU words = low | high;
  std::memcpy(p, &words, sizeof words);
}
template <class T>
AREAL_INLINE void store_pair_without_nan(T* p, VecF a, VecF b) {
  store_pair(p, a, b);
}

// Lane reductions in a fixed tree order (lane i with lane i + width / 2, and so on): the same result for the same
// lanes, always. Halves are taken with shuffles; a loop over an array of lanes would go through memory.
typedef float Vec4F __attribute__((vector_size(16)));
#if defined(__AVX2__)
typedef float Vec8F __attribute__((vector_size(32)));
#endif

template <class Fold>
AREAL_INLINE float reduce(VecF v, Fold fold) {
#if defined(__AVX512F__)
  const Vec8F half = fold(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                          __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(__AVX2__)
  const Vec8F half = v;
#endif
#if defined(__AVX2__)
  const Vec4F quarter =
      fold(__builtin_shufflevector(half, half, 0, 1, 2, 3), __builtin_shufflevector(half, half, 4, 5, 6, 7));
#else
  const Vec4F quarter = v;
#endif
  const Vec4F pair = fold(quarter, __builtin_shufflevector(quarter, quarter, 2, 3, 0, 1));
  return fold(pair, __builtin_shufflevector(pair, pair, 1, 0, 3, 2))[0];
}
AREAL_INLINE float reduce_add(VecF v) {
  return reduce(v, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
}
AREAL_INLINE float reduce_max(VecF v) {
  return reduce(v, [](auto a, auto b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// e^x = scale (1 + r + r^2 p) with scale = 2^n and |r| <= ln(2)/2, for |x| <= 87; for callers that also want e^x - 1 or
// e^x - 1 - x without cancellation. Cody-Waite reduction and a degree-6 polynomial.
struct ExpParts {
  VecF r, p, scale;
};
AREAL_INLINE ExpParts exp_parts(VecF x) {
  const VecF magic = splat(0x1.8p23f);
  const VecF biased = fma(x, splat(0x1.715476p0f), magic);
  const VecF n = biased - magic;
  VecF r = fma(n, splat(-0x1.62e400p-1f), x);
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  VecF p = splat(0x1.6850e4p-10f);
  p = fma(p, r, splat(0x1.123bccp-7f));
  p = fma(p, r, splat(0x1.555b98p-5f));
  p = fma(p, r, splat(0x1.55548ep-3f));
  p = fma(p, r, splat(0x1.fffff8p-2f));
  return {r, p, (VecF)(((VecI)biased << 23) + (VecI)splat(1.0f))};
}

// e^x for x <= 88: 0 below -87.33 (no denormals), NaN stays NaN; within 2 ulp of the true value (tested exhaustively
// over a sample of every binade).
AREAL_INLINE VecF exp(VecF x) {
  const ExpParts e = exp_parts(x);
  const VecF y = fma(fma(e.p, e.r, splat(1.0f)), e.r, splat(1.0f));
  const VecI scaled = (VecI)y + ((VecI)e.scale - (VecI)splat(1.0f));
  const VecF value = select(x < -87.33f, splat(0.0f), (VecF)scaled);
  return select(x == x, value, x);
}

// 2^(x scale) for products in [-125, 127], which the caller sees to; within 2 ulp, exactly 1 at 0. The product is not
// rounded (but on the baseline). NaN is the caller's to keep (its payload may be lost here). Degree-5 minimax
// polynomial on [-1/2, 1/2].
AREAL_INLINE VecF exp2_of_product(VecF x, VecF scale) {
  const VecF magic = splat(0x1.8p23f);
  const VecF biased = fma(x, scale, magic);
  const VecF r = fma(x, scale, magic - biased);
  VecF p = splat(0x1.5aab6ep-10f);
  p = fma(p, r, splat(0x1.3cec48p-7f));
  p = fma(p, r, splat(0x1.c6babcp-5f));
  p = fma(p, r, splat(0x1.ebf9b6p-3f));
  p = fma(p, r, splat(0x1.62e424p-1f));
  p = fma(p, r, splat(1.0f));
  return (VecF)((VecI)p + ((VecI)biased << 23));
}

}  // namespace
}  // namespace areal::AREAL_ISA
