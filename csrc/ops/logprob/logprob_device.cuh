// The two passes over a row as a GPU thread makes them: some elements at a time, in registers.
#pragma once

#include "cuda/port.cuh"
#include "ops/logprob/logprob_math.h"

namespace areal::logprob {

// 2^x by the special function unit: 2 ulp, 0 below -126.
__device__ __forceinline__ float fast_exp2(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

// Adds a group of elements to a thread's partial sums: one rescaling for the group, one exponential per element.
template <int kCount, int kLength>
__device__ __forceinline__ void accumulate(Partial<float>& part, const float (&x)[kCount][kLength], float scale) {
  float top = x[0][0];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int k = 0; k < kLength; ++k) top = fmaxf(top, x[i][k]);  // passes over NaN
  }
  if (top > part.max) {
    const float t = shifted(part.max, top, scale), factor = fast_exp2(t);
    part = {top, factor * part.sum, factor * (part.weighted + t * part.sum)};
  }
  const float shift = part.max == -INFINITY ? 0.0f : part.max;  // -inf - -inf would be NaN
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int k = 0; k < kLength; ++k) {
      float t = (x[i][k] - shift) * scale;
      t = t < -2000.0f ? -2000.0f : t;  // not fmaxf: a NaN must stay
      const float e = fast_exp2(t);
      part.sum += e;
      part.weighted += e * t;
    }
  }
}

// Logits to gradients, as if none were the label's.
template <int kLength>
__device__ __forceinline__ void to_gradient(float (&x)[kLength], const RowGradient<float>& math) {
#pragma unroll
  for (int k = 0; k < kLength; ++k) {
    const float t = (x[k] - math.max) * math.scale - math.offset, p = fast_exp2(t);
    x[k] = p == 0.0f ? 0.0f : p * (math.constant + math.slope * t);
  }
}

}  // namespace areal::logprob
