// Kernel of scale.h: a block takes rows, a thread the vectors of a row in turn.
#pragma once

#include "cuda/vec.cuh"
#include "ops/lm_head/scale.h"

namespace areal::cuda {
namespace {

constexpr int kScaleThreads = 256;
constexpr int kScaleUnroll = 4;  // vectors a thread has in flight

template <class T, int kLength>
__device__ __forceinline__ void scale_values(float (&x)[kLength], float factor) {
#pragma unroll
  for (int k = 0; k < kLength; ++k) x[k] *= factor;
}

// Elements before the first vector of a row, or after the last one.
template <class T>
__device__ __forceinline__ void scale_part(T* p, int count, float factor) {
  float x[kVectorLength<T>];
  load_part(p, count, 0.0f, x);
  scale_values<T>(x, factor);
  store_part(p, count, x);
}

template <class T>
__device__ __forceinline__ void scale_row(T* row, int64_t columns, float factor) {
  constexpr int kLength = kVectorLength<T>;
  const RowCut cut = cut_row(row, columns);
  T* const vectors = row + cut.head;
  const int64_t stride = kScaleThreads;
  int64_t i = threadIdx.x;
  for (; i + (kScaleUnroll - 1) * stride < cut.vectors; i += kScaleUnroll * stride) {
    float x[kScaleUnroll][kLength];
#pragma unroll
    for (int u = 0; u < kScaleUnroll; ++u) load_vector<false>(vectors + (i + u * stride) * kLength, x[u]);
#pragma unroll
    for (int u = 0; u < kScaleUnroll; ++u) {
      scale_values<T>(x[u], factor);
      store_vector(vectors + (i + u * stride) * kLength, x[u]);
    }
  }
  for (; i < cut.vectors; i += stride) {
    float x[kLength];
    load_vector<false>(vectors + i * kLength, x);
    scale_values<T>(x, factor);
    store_vector(vectors + i * kLength, x);
  }
  if (threadIdx.x == 0) scale_part(row, cut.head, factor);
  if (threadIdx.x == 1) scale_part(vectors + cut.vectors * kLength, cut.tail, factor);
}

template <class T>
__global__ void __launch_bounds__(kScaleThreads) scale_kernel(const ScaleArgs args) {
  const float factor = *static_cast<const float*>(args.factor);
  if (factor == 1.0f) return;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    scale_row(static_cast<T*>(args.values) + row * args.row_stride, args.columns, factor);
  }
}

}  // namespace
}  // namespace areal::cuda
