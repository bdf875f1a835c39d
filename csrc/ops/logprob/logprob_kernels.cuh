// Kernels of the log-softmax gather. One thread block reads a row (forward), or a few blocks share one (split forward,
// backward); every read and write of logits is a 16-byte vector but for the ends of a row (cuda/vec.cuh).
#pragma once

#include "cuda/reduce.cuh"
#include "cuda/vec.cuh"
#include "ops/logprob/logprob.h"
#include "ops/logprob/logprob_device.cuh"
#include "ops/logprob/logprob_math.h"

namespace areal::cuda {
namespace {

using logprob::accumulate;
using logprob::Partial;
using logprob::RowGradient;
using logprob::to_gradient;
using Input = LogprobInput<float>;
using Output = LogprobOutput<float>;
using Gradient = LogprobGradient<float>;

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // 16-byte loads in flight per thread

// What a block reads of a row: vectors [begin, end), and the first `head` and the last `tail` elements.
struct Share {
  int64_t begin;
  int64_t end;
  int head;
  int tail;
};

// The calling thread's part of a share.
template <class T>
__device__ __forceinline__ Partial<float> thread_partial(const T* row, const RowCut& cut, const Share& share,
                                                         float scale) {
  constexpr int kLength = kVectorLength<T>;
  const int thread = static_cast<int>(threadIdx.x);
  Partial<float> part = logprob::empty_partial<float>();
  const T* body = row + cut.head;
  int64_t i = share.begin + thread;
  for (; i + (kUnroll - 1) * kThreads < share.end; i += kUnroll * kThreads) {
    float x[kUnroll][kLength];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) load_vector<true>(body + (i + u * kThreads) * kLength, x[u]);
    accumulate(part, x, scale);
  }
  for (; i < share.end; i += kThreads) {
    float x[1][kLength];
    load_vector<true>(body + i * kLength, x[0]);
    accumulate(part, x, scale);
  }
  const bool head = thread == kThreads - 1 && share.head > 0, tail = thread == kThreads - 2 && share.tail > 0;
  if (head || tail) {
    float x[1][kLength];
    load_part(head ? row : body + cut.vectors * kLength, head ? share.head : share.tail, -INFINITY, x[0]);
    accumulate(part, x, scale);
  }
  return part;
}

__device__ __forceinline__ bool row_is_valid(const Input& input, int64_t row, int64_t vocab_total) {
  const int64_t label = input.labels[row];
  const float temperature = input.row_temperature(row);
  return label >= 0 && label < vocab_total && temperature >= 1.17549435e-38f && temperature < INFINITY;
}

__device__ __forceinline__ void store_row(const Output& output, int64_t row, float logprob, float entropy, float lse,
                                          float row_max, float log_sum) {
  output.logprobs[row] = logprob;
  output.entropy[row] = entropy;
  output.lse[row] = lse;
  output.row_max[row] = row_max;
  output.log_sum[row] = log_sum;
}

template <class T>
__device__ __forceinline__ float load_logit(const Input& input, int64_t row, int64_t column) {
  return to_float(static_cast<const T*>(input.logits)[row * input.row_stride + column]);
}

// Where one thread puts the sums of a row: they become its outputs, or the part that this rank contributes.
template <class T>
struct OutputSink {
  Output output;
  __device__ __forceinline__ void live(const Input& input, int64_t row, const Partial<float>& total) const {
    const float label_logit = load_logit<T>(input, row, input.labels[row]);
    const auto result = logprob::finish_row(total, label_logit, input.row_temperature(row));
    store_row(output, row, result.logprob, result.entropy, result.lse, total.max, result.log_sum);
  }
  __device__ __forceinline__ void fill(int64_t row, float value) const {
    store_row(output, row, value, value, value, value, value);
  }
};

template <class T>
struct PartSink {
  LogprobPart<float>* parts;
  __device__ __forceinline__ void live(const Input& input, int64_t row, const Partial<float>& total) const {
    const int64_t column = input.labels[row] - input.vocab_start;
    const bool owned = column >= 0 && column < input.vocab;
    parts[row] = logprob::to_part(total, owned ? load_logit<T>(input, row, column) : 0.0f);
  }
  __device__ __forceinline__ void fill(int64_t row, float value) const { parts[row] = {value, value, value, value}; }
};

// For one thread of a row that has nothing to read: masked, or out of range.
template <class Sink>
__device__ __forceinline__ void skip_row(const Input& input, const Sink& sink, int64_t row, int64_t* bad_row) {
  const bool live = input.live(row);
  sink.fill(row, live ? NAN : 0.0f);
  if (live) atomicMax(reinterpret_cast<unsigned long long*>(bad_row), static_cast<unsigned long long>(row + 1));
}

// Merge for block_reduce and warp_reduce.
struct MergePartials {
  float scale;
  __device__ __forceinline__ Partial<float> operator()(const Partial<float>& a, const Partial<float>& b) const {
    return logprob::merge(a, b, scale);
  }
};

__device__ __forceinline__ float row_scale(const Input& input, int64_t row) {
  return static_cast<float>(logprob::kLog2E) / input.row_temperature(row);
}

// A block per row; the grid strides over the rows.
template <class T, class Sink>
__global__ void __launch_bounds__(kThreads)
    logprob_forward_kernel(const Input input, const int64_t vocab_total, const Sink sink, int64_t* bad_row) {
  __shared__ Partial<float> warps[kThreads / kWarp];
  for (int64_t row = blockIdx.x; row < input.rows; row += gridDim.x) {
    if (!input.live(row) || !row_is_valid(input, row, vocab_total)) {
      if (threadIdx.x == 0) skip_row(input, sink, row, bad_row);
      continue;
    }
    const T* x = static_cast<const T*>(input.logits) + row * input.row_stride;
    const float scale = row_scale(input, row);
    const RowCut cut = cut_row(x, input.vocab);
    const auto part = thread_partial(x, cut, Share{0, cut.vectors, cut.head, cut.tail}, scale);
    const auto total = block_reduce<kThreads>(part, MergePartials{scale}, logprob::empty_partial<float>(), warps);
    if (threadIdx.x == 0) sink.live(input, row, total);
  }
}

// Past L1, which may hold what another block read of the same cache line before this triple was written.
__device__ __forceinline__ Partial<float> load_shared_part(const Partial<float>* part) {
  return {__ldcg(&part->max), __ldcg(&part->sum), __ldcg(&part->weighted)};
}

// For few rows: grid (splits, rows). Every block leaves its triple in parts[row][split]; the one that arrives last at
// the row's counter merges them, always in the same order.
template <class T, class Sink>
__global__ void __launch_bounds__(kThreads)
    logprob_forward_split_kernel(const Input input, const int64_t vocab_total, const Sink sink, Partial<float>* parts,
                                 unsigned* arrivals, int64_t* bad_row) {
  __shared__ Partial<float> warps[kThreads / kWarp];
  const int64_t row = blockIdx.y;
  const unsigned split = blockIdx.x, splits = gridDim.x, thread = threadIdx.x;
  if (!input.live(row) || !row_is_valid(input, row, vocab_total)) {
    if (split == 0 && thread == 0) skip_row(input, sink, row, bad_row);
    return;
  }
  const T* x = static_cast<const T*>(input.logits) + row * input.row_stride;
  const MergePartials merge{row_scale(input, row)};
  const RowCut cut = cut_row(x, input.vocab);
  const int64_t each = (cut.vectors + splits - 1) / splits, begin = min(split * each, cut.vectors);
  const Share share{begin, min(begin + each, cut.vectors), split == 0 ? cut.head : 0,
                    split == splits - 1 ? cut.tail : 0};
  const auto part = thread_partial(x, cut, share, merge.scale);
  const auto total = block_reduce<kThreads>(part, merge, logprob::empty_partial<float>(), warps);
  if (thread >= kWarp) return;

  Partial<float>* row_parts = parts + row * splits;
  unsigned arrived = 0;
  if (thread == 0) {
    row_parts[split] = total;
    __threadfence();  // the triple is visible before the arrival is
    arrived = atomicAdd(arrivals + row, 1u);
    __threadfence();  // and the triples of those who arrived before
  }
  if (__shfl_sync(kFullWarp, arrived, 0) != splits - 1) return;
  __syncwarp();  // a shuffle orders no memory
  auto merged = logprob::empty_partial<float>();
  for (unsigned i = thread; i < splits; i += kWarp) merged = merge(merged, load_shared_part(row_parts + i));
  merged = warp_reduce(merged, merge);
  if (thread == 0) sink.live(input, row, merged);
}

// A thread per row; parts [ranks, rows].
__global__ void __launch_bounds__(kThreads)
    logprob_merge_kernel(const Input input, const LogprobPart<float>* parts, const int64_t ranks, const Output output) {
  const int64_t row = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (row >= input.rows) return;
  if (!input.live(row)) return store_row(output, row, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f);
  double row_max = 0;
  const auto result = logprob::merge_ranks(parts + row, ranks, input.rows, input.row_temperature(row), &row_max);
  store_row(output, row, static_cast<float>(result.logprob), static_cast<float>(result.entropy),
            static_cast<float>(result.lse), static_cast<float>(row_max), static_cast<float>(result.log_sum));
}

struct RowLabel {
  int64_t index;
  logprob::Upstream<float> up;
  float logprob;
  float entropy;
  float temperature;

  // Overwrites the label's element where it lies in the vector at `offset`; the one thread that holds it computes it.
  template <int kLength>
  __device__ __forceinline__ void patch(float (&x)[kLength], int64_t offset) const {
    if (index < offset || index >= offset + kLength) return;
    const float value = logprob::label_gradient(up, logprob, entropy, temperature);
#pragma unroll
    for (int k = 0; k < kLength; ++k) x[k] = offset + k == index ? value : x[k];
  }
};

__device__ __forceinline__ float value_or_zero(const float* values, int64_t row) {
  return values == nullptr ? 0.0f : values[row];
}

__device__ __forceinline__ RowLabel load_label(const Input& input, const Gradient& gradient, int64_t row) {
  return {input.labels[row] - input.vocab_start,  // in another shard: outside [0, vocab)
          {value_or_zero(gradient.grad_logprobs, row), value_or_zero(gradient.grad_entropy, row),
           value_or_zero(gradient.grad_lse, row)},
          gradient.logprobs[row],
          gradient.entropy[row],
          input.row_temperature(row)};
}

// Grid (tiles, rows); a tile is kThreads * kUnroll vectors of kLength elements, the first also takes the row's head and
// the last its tail. kLength is 1 where logits and gradient are not equally far from a 16-byte boundary.
template <class T, int kLength>
__global__ void __launch_bounds__(kThreads) logprob_backward_kernel(const Input input, const Gradient gradient) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = blockIdx.x * int64_t{kThreads * kUnroll} + thread;
  for (int64_t row = blockIdx.y; row < input.rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(input.logits) + row * input.row_stride;
    T* out = static_cast<T*>(gradient.grad_logits) + row * gradient.grad_row_stride;
    const RowLabel label = load_label(input, gradient, row);
    const auto math = input.live(row) ? logprob::row_gradient(label.up, gradient.row_max[row], gradient.log_sum[row],
                                                              label.entropy, label.temperature)
                                      : logprob::zero_row<float>();
    const RowCut cut = cut_row<T, kLength>(x, input.vocab);
    float v[kUnroll][kLength] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kThreads;
      if (!math.zero && i < cut.vectors) load_vector<false>(x + cut.head + i * kLength, v[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * kThreads, offset = cut.head + i * kLength;
      if (i >= cut.vectors) continue;
      if (!math.zero) {
        to_gradient(v[u], math);
        label.patch(v[u], offset);
      }
      store_vector(out + offset, v[u]);
    }
    const bool head = blockIdx.x == 0 && thread == kThreads - 1;
    const bool tail = blockIdx.x == gridDim.x - 1 && thread == kThreads - 2;
    if (head || tail) {
      const int64_t offset = head ? 0 : cut.head + cut.vectors * kLength;
      const int count = head ? cut.head : cut.tail;
      float ends[kLength] = {};
      if (!math.zero) {
        load_part(x + offset, count, 0.0f, ends);
        to_gradient(ends, math);
        label.patch(ends, offset);
      }
      store_part(out + offset, count, ends);
    }
  }
}

}  // namespace
}  // namespace areal::cuda
