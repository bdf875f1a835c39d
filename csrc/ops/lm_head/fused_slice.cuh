// What a block of the fused kernel holds of a row of logits, and the two passes that its workers make over it.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/vec.cuh"
#include "ops/lm_head/fused.h"
#include "ops/logprob/logprob_device.cuh"

namespace areal::cuda {
namespace {

using logprob::Partial;
using logprob::RowGradient;
using FusedInput = LogprobInput<float>;

constexpr int kWorkers = 256;
constexpr int kFusedUnroll = 2;  // 16-byte vectors a thread holds at a time

// The part of a row that this block holds: vectors that begin `offset` elements into the row; the first block also
// takes the elements before the first vector, the last block those after the last one (`ends`, fewer than a vector).
template <class T>
struct Slice {
  T* row;  // nullptr: the row before was the last one
  int64_t index;
  int64_t label;
  float temperature;
  float scale;          // log2(e) / temperature
  unsigned label_rank;  // of the block that holds the label's logit
  int64_t offset;
  int vectors;
  int head;
  int tail;
  int64_t tail_offset;

  __device__ __forceinline__ bool has_ends(int thread) const {
    return (thread == kWorkers - 1 && head > 0) || (thread == kWorkers - 2 && tail > 0);
  }
  __device__ __forceinline__ int64_t ends_offset(int thread) const { return thread == kWorkers - 1 ? 0 : tail_offset; }
  __device__ __forceinline__ int ends_count(int thread) const { return thread == kWorkers - 1 ? head : tail; }
};

template <class T>
__device__ __forceinline__ Slice<T> slice_of(const FusedInput& input, int64_t row) {
  constexpr int kLength = kVectorLength<T>;
  T* x = static_cast<T*>(const_cast<void*>(input.logits)) + row * input.row_stride;
  const RowCut cut = cut_row(x, input.vocab);
  const int64_t blocks = cluster_size(), rank = cluster_rank(), label = input.labels[row];
  const float temperature = input.row_temperature(row);
  const int64_t each = max((cut.vectors + blocks - 1) / blocks, int64_t{1});
  const int64_t begin = min(rank * each, cut.vectors), end = min(begin + each, cut.vectors);
  const int64_t tail_offset = cut.head + cut.vectors * kLength;
  int64_t label_rank = label < cut.head ? 0 : (label - cut.head) / kLength / each;
  if (label >= tail_offset) label_rank = blocks - 1;
  return {x,
          row,
          label,
          temperature,
          static_cast<float>(logprob::kLog2E) / temperature,
          static_cast<unsigned>(label_rank),
          cut.head + begin * kLength,
          static_cast<int>(end - begin),
          rank == 0 ? cut.head : 0,
          rank == blocks - 1 ? cut.tail : 0,
          tail_offset};
}

// The rows of this cluster, 32 at a time: row first, first + stride, ... Called by whole warps.
struct ClusterRows {
  const FusedInput& input;
  int64_t first, stride;

  // Live, and neither label nor temperature out of range.
  __device__ __forceinline__ bool computes(int64_t row) const {
    const int64_t label = input.labels[row];
    const float temperature = input.row_temperature(row);
    return input.live(row) && label >= 0 && label < input.vocab && temperature >= 1.17549435e-38f &&
           temperature < INFINITY;
  }
  __device__ __forceinline__ int64_t at(int64_t row, int lane) const { return row + lane * stride; }
  // Bit i: row at(row, i) exists, and is one to compute or not, as asked.
  __device__ __forceinline__ unsigned select(int64_t row, bool to_compute) const {
    const int64_t own = at(row, static_cast<int>(threadIdx.x) % kWarp);
    return __ballot_sync(kFullWarp, own < input.rows && computes(own) == to_compute);
  }
};

struct RowPlan {
  RowGradient<float> gradient;
  float label_gradient;
};

// A worker's sums over its elements of a slice.
template <class T>
__device__ __forceinline__ Partial<float> sum_slice(const Slice<T>& slice, const T* tile) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x), vectors = slice.vectors;
  const float scale = slice.scale;
  Partial<float> part = logprob::empty_partial<float>();
  float ends[1][kLength];
  const bool has_ends = slice.has_ends(thread);
  if (has_ends) load_part(slice.row + slice.ends_offset(thread), slice.ends_count(thread), -INFINITY, ends[0]);
  int i = thread;
  for (; i + (kFusedUnroll - 1) * kWorkers < vectors; i += kFusedUnroll * kWorkers) {
    float x[kFusedUnroll][kLength];
#pragma unroll
    for (int u = 0; u < kFusedUnroll; ++u) load_vector<false>(tile + (i + u * kWorkers) * kLength, x[u]);
    logprob::accumulate(part, x, scale);
  }
  for (; i < vectors; i += kWorkers) {
    float x[1][kLength];
    load_vector<false>(tile + i * kLength, x[0]);
    logprob::accumulate(part, x, scale);
  }
  if (has_ends) logprob::accumulate(part, ends, scale);  // from global memory: by now they have come
  return part;
}

// Replaces the label's element, where it lies in the vector at `offset`.
template <int kLength>
__device__ __forceinline__ void patch_label(float (&x)[kLength], int64_t offset, int64_t label, float value) {
#pragma unroll
  for (int k = 0; k < kLength; ++k) x[k] = offset + k == label ? value : x[k];
}

template <class T>
__device__ __forceinline__ void store_zeros(T* p) {
  constexpr float kZeros[kVectorLength<T>] = {};
  store_vector(p, kZeros);
}

// A worker's elements of the slice's gradient, from the tile to global memory.
template <class T>
__device__ __forceinline__ void write_gradient(const Slice<T>& slice, const T* tile, const RowPlan& plan) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x), vectors = slice.vectors;
  const RowGradient<float> math = plan.gradient;
  const float label_gradient = plan.label_gradient;
  const int64_t label = slice.label, begin = slice.offset;
  T* const row = slice.row;
  float x[kLength] = {};
  if (slice.has_ends(thread)) {
    const int64_t offset = slice.ends_offset(thread);
    const int count = slice.ends_count(thread);
    if (!math.zero) {
      load_part(row + offset, count, 0.0f, x);
      logprob::to_gradient(x, math);
      patch_label(x, offset, label, label_gradient);
    }
    store_part(row + offset, count, x);
  }
  if (math.zero) {
    for (int i = thread; i < vectors; i += kWorkers) store_zeros(row + begin + int64_t{i} * kLength);
    return;
  }
  for (int i = thread; i < vectors; i += kWorkers) {
    const int64_t offset = begin + int64_t{i} * kLength;
    load_vector<false>(tile + i * kLength, x);
    logprob::to_gradient(x, math);
    patch_label(x, offset, label, label_gradient);
    store_vector(row + offset, x);
  }
}

// A worker's elements of a row that is not computed.
template <class T>
__device__ __forceinline__ void fill_row(const FusedInput& input, int64_t row, float value) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x);
  const Slice<T> slice = slice_of<T>(input, row);
  float x[kLength];
#pragma unroll
  for (int k = 0; k < kLength; ++k) x[k] = value;
  if (slice.has_ends(thread)) store_part(slice.row + slice.ends_offset(thread), slice.ends_count(thread), x);
  for (int i = thread; i < slice.vectors; i += kWorkers)
    store_vector(slice.row + slice.offset + int64_t{i} * kLength, x);
}

}  // namespace
}  // namespace areal::cuda
