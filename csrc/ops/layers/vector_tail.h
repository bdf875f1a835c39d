// Loops over rows whose width is no multiple of the vector: fn(index, count) for each vector, count < kLanes at the
// end.
#pragma once

#include "base/simd.h"

namespace areal::AREAL_ISA {
namespace {

// The first `count` elements; the other lanes are 0.
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

template <class Fn>
AREAL_INLINE void for_each_vector(int64_t width, const Fn& fn) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) fn(i, int64_t{kLanes});
  if (i < width) fn(i, width - i);
}

}  // namespace
}  // namespace areal::AREAL_ISA
