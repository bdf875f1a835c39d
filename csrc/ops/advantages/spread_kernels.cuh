// Kernels between sequences and tokens: a block per sequence.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/advantages/bounded_segments.cuh"
#include "ops/advantages/spread_math.h"

namespace areal::cuda {
namespace {

using advantages::LogRatioSumArgs;
using advantages::SpreadArgs;

constexpr int kSpreadThreads = 256;

// The sum over the threads of a block, in every thread. Called by all threads.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kSpreadThreads / kWarp];
  __shared__ double total;
  value = block_reduce<kSpreadThreads>(value, [](double a, double b) { return a + b; }, 0.0, warps);
  if (threadIdx.x == 0) total = value;
  __syncthreads();
  const double result = total;
  __syncthreads();  // total is free for the next call
  return result;
}

template <class Real>
__global__ void __launch_bounds__(kSpreadThreads) spread_scores_kernel(SpreadArgs<Real> args, int64_t tokens) {
  zero_tail(args.tokens.segments, tokens, args.advantages);
  for (int64_t s = blockIdx.x; s < args.tokens.segments.count; s += gridDim.x) {
    const TokenRange range = sequence_range(args.tokens.segments, s, tokens);
    const int64_t begin = range.begin + threadIdx.x, end = range.end;
    double divisor = 1;
    if (args.divide_by_length) {
      double live = 0;
      for (int64_t t = begin; t < end; t += kSpreadThreads) live += advantages::is_live(args.tokens, t) ? 1 : 0;
      divisor = block_sum(live);
    }
    for (int64_t t = begin; t < end; t += kSpreadThreads) {
      args.advantages[t] = advantages::token_advantage(args, t, args.scores[s], divisor);
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kSpreadThreads) log_ratio_sums_kernel(LogRatioSumArgs<Real> args, int64_t tokens) {
  for (int64_t s = blockIdx.x; s < args.tokens.segments.count; s += gridDim.x) {
    const TokenRange range = sequence_range(args.tokens.segments, s, tokens);
    const int64_t begin = range.begin + threadIdx.x, end = range.end;
    double sum = 0;
    for (int64_t t = begin; t < end; t += kSpreadThreads) {
      if (advantages::is_live(args.tokens, t)) sum += advantages::log_ratio(args.tokens, t);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) args.sums[s] = sum;
  }
}

}  // namespace
}  // namespace areal::cuda
