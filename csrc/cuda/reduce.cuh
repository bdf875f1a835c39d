// Reductions over a warp and a block in a fixed order, for any trivially copyable value of whole 4-byte words and any
// merge(a, b) -> value: the result is the same from run to run.
#pragma once

#include <cstring>
#include <type_traits>

#include "cuda/port.cuh"

namespace areal::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kFullWarp = 0xffffffffu;

// A value moved between lanes by shuffle(word) -> word.
template <class T, class Shuffle>
__device__ __forceinline__ T shuffle_words(const T& value, const Shuffle& shuffle) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0);
  unsigned words[sizeof(T) / 4];
  memcpy(words, &value, sizeof value);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) words[i] = shuffle(words[i]);
  T result;
  memcpy(&result, words, sizeof result);
  return result;
}

// The value that lane (own lane + delta) holds. Called by all 32 lanes.
template <class T>
__device__ __forceinline__ T shuffle_down(const T& value, unsigned delta) {
  return shuffle_words(value, [delta](unsigned word) { return __shfl_down_sync(kFullWarp, word, delta); });
}

// The value that lane 0 holds. Called by all 32 lanes.
template <class T>
__device__ __forceinline__ T broadcast(const T& value) {
  return shuffle_words(value, [](unsigned word) { return __shfl_sync(kFullWarp, word, 0); });
}

// Called by all 32 lanes; the result is valid in lane 0.
template <class T, class Merge>
__device__ __forceinline__ T warp_reduce(T value, const Merge& merge) {
#pragma unroll
  for (unsigned delta = kWarp / 2; delta > 0; delta /= 2) value = merge(value, shuffle_down(value, delta));
  return value;
}

// Called by all kThreads threads of the block; the result is valid in thread 0. `warps` is shared memory for this call
// alone; it may be used again at once, because a barrier ends the call.
template <int kThreads, class T, class Merge>
__device__ __forceinline__ T block_reduce(T value, const Merge& merge, const T& identity,
                                          T (&warps)[kThreads / kWarp]) {
  static_assert(kThreads % kWarp == 0 && kThreads <= 1024);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  value = warp_reduce(value, merge);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  if (warp == 0) value = warp_reduce(lane < kThreads / kWarp ? warps[lane] : identity, merge);
  __syncthreads();
  return value;
}

}  // namespace areal::cuda
