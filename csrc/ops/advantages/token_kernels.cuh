// Kernels of token_rewards.h and spread.h: a block per sequence, or a thread per token.
#pragma once

#include "cuda/bounded_segments.cuh"
#include "cuda/reduce.cuh"
#include "ops/advantages/token_math.h"

namespace areal::cuda {
namespace {

using advantages::SpreadArgs;
using advantages::TokenRewards;

constexpr int kTokenThreads = 256;

// The sum over the threads of a block, in every thread. Called by all threads.
__device__ __forceinline__ double block_sum(double value) {
  __shared__ double warps[kTokenThreads / kWarp];
  __shared__ double total;
  value = block_reduce<kTokenThreads>(value, [](double a, double b) { return a + b; }, 0.0, warps);
  if (threadIdx.x == 0) total = value;
  __syncthreads();
  const double result = total;
  __syncthreads();  // total is free for the next call
  return result;
}

// The sum of term(t) over the tokens [begin, end), in every thread. Called by all threads of the block.
template <class Term>
__device__ __forceinline__ double sum_tokens(const TokenRange& range, const Term& term) {
  double sum = 0;
  for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kTokenThreads) sum += term(t);
  return block_sum(sum);
}

template <class Real>
__global__ void __launch_bounds__(kTokenThreads) spread_scores_kernel(SpreadArgs<Real> args, int64_t tokens) {
  zero_tail(args.segments, tokens, args.advantages);
  for (int64_t s = blockIdx.x; s < args.segments.count; s += gridDim.x) {
    const TokenRange range = sequence_range(args.segments, s, tokens);
    for (int64_t t = range.begin + threadIdx.x; t < range.end; t += kTokenThreads) {
      args.advantages[t] = advantages::token_advantage(args, s, t);
    }
  }
}

template <class Real>
__global__ void __launch_bounds__(kTokenThreads)
    token_rewards_kernel(TokenRewards<Real> rewards, int64_t tokens, Real* out) {
  const int64_t threads = int64_t{gridDim.x} * kTokenThreads;
  for (int64_t t = int64_t{blockIdx.x} * kTokenThreads + threadIdx.x; t < tokens; t += threads) {
    out[t] = advantages::is_live(rewards.loss_mask, t) ? static_cast<Real>(advantages::reward_at(rewards, t)) : Real(0);
  }
}

template <class Real>
__global__ void __launch_bounds__(kTokenThreads)
    sequence_rewards_kernel(TokenRewards<Real> rewards, Segments segments, int64_t tokens, double* sums) {
  for (int64_t s = blockIdx.x; s < segments.count; s += gridDim.x) {
    const double sum = sum_tokens(sequence_range(segments, s, tokens), [&](int64_t t) {
      return advantages::is_live(rewards.loss_mask, t) ? advantages::reward_at(rewards, t) : 0.0;
    });
    if (threadIdx.x == 0) sums[s] = sum;
  }
}

__global__ void __launch_bounds__(kTokenThreads)
    live_tokens_kernel(Segments segments, const bool* loss_mask, int64_t tokens, double* counts) {
  for (int64_t s = blockIdx.x; s < segments.count; s += gridDim.x) {
    const double count = sum_tokens(sequence_range(segments, s, tokens),
                                    [&](int64_t t) { return advantages::is_live(loss_mask, t) ? 1.0 : 0.0; });
    if (threadIdx.x == 0) counts[s] = count;
  }
}

}  // namespace
}  // namespace areal::cuda
