// A vector of tokens of the ISA sources, the last of a run only in part: lanes past `count` are masked.
#pragma once

#include "base/simd.h"

namespace areal::AREAL_ISA {
namespace {

typedef uint8_t VecB __attribute__((vector_size(kLanes)));
typedef double VecD __attribute__((vector_size(kLanes * 4)));  // half of the lanes
typedef int64_t VecL __attribute__((vector_size(kLanes * 4)));

AREAL_INLINE VecI is_nonzero(VecB bytes) {
#if defined(__AVX512F__)
  return (VecI)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)bytes) != 0;
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)bytes)) != 0;
#else
  return __builtin_convertvector(bytes, VecI) != 0;
#endif
}

AREAL_INLINE VecI load_live(const bool* mask, int64_t count) {
  VecB bytes{};
  if (count >= kLanes) {
    if (mask == nullptr) return VecI{} == 0;
    std::memcpy(&bytes, mask, sizeof bytes);
  } else {
    for (int64_t i = 0; i < count; ++i) bytes[i] = mask == nullptr || mask[i];
  }
  return is_nonzero(bytes);
}

AREAL_INLINE VecF load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  VecF v{};
  for (int64_t i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

AREAL_INLINE void store_some(float* p, VecF v, int64_t count) {
  if (count >= kLanes) return store(p, v);
  for (int64_t i = 0; i < count; ++i) p[i] = v[i];
}

// fn(index, count) for each vector of [begin, end).
template <class Fn>
AREAL_INLINE void for_each_vector(int64_t begin, int64_t end, const Fn& fn) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) fn(i, int64_t{kLanes});
  if (i < end) fn(i, end - i);
}

// The lower or upper half of the lanes, as doubles. (Intrinsics: GCC 12 converts a vector in pieces.)
template <int half>
AREAL_INLINE VecD widen(VecF v) {
#if defined(__AVX512F__)
  return (VecD)_mm512_maskz_cvtps_pd(0xff, _mm512_extractf32x8_ps((__m512)v, half));
#elif defined(__AVX2__)
  return (VecD)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, half));
#else
  return VecD{v[2 * half], v[2 * half + 1]};
#endif
}

// A mask of lanes for the doubles of a half.
template <int half>
AREAL_INLINE VecL widen(VecI live) {
#if defined(__AVX512F__)
  return (VecL)_mm512_maskz_cvtepi32_epi64(0xff, _mm512_maskz_extracti64x4_epi64(0xff, (__m512i)live, half));
#elif defined(__AVX2__)
  return (VecL)_mm256_cvtepi32_epi64(_mm256_extracti128_si256((__m256i)live, half));
#else
  return VecL{live[2 * half], live[2 * half + 1]};
#endif
}

}  // namespace
}  // namespace areal::AREAL_ISA
