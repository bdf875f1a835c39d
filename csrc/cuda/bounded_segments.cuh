// Packed sequences on the device, where nobody has checked cu_seqlens: what it says is cut to the tokens there are.
#pragma once

#include "base/segments.h"
#include "cuda/port.cuh"

namespace areal::cuda {
namespace {

struct TokenRange {
  int64_t begin;
  int64_t end;
};

__device__ __forceinline__ int64_t bounded(int64_t token, int64_t tokens) {
  return token < 0 ? 0 : token > tokens ? tokens : token;
}

__device__ __forceinline__ TokenRange sequence_range(const Segments& segments, int64_t s, int64_t tokens) {
  return {bounded(segments.cu_seqlens[s], tokens), bounded(segments.cu_seqlens[s + 1], tokens)};
}

// Zeroes the tokens after the last sequence, of which a valid cu_seqlens has none. Called by all threads of the grid.
template <class Real>
__device__ __forceinline__ void zero_tail(const Segments& segments, int64_t tokens, Real* out) {
  const int64_t first = bounded(segments.cu_seqlens[segments.count], tokens);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t t = first + thread; t < tokens; t += threads) out[t] = Real(0);
}

}  // namespace
}  // namespace areal::cuda
