// Kernels of the policy loss: blocks of kBlockTokens tokens, then one block that joins their statistics in order.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/loss/loss_math.h"

namespace areal::cuda {
namespace {

using loss::Accumulator;
using loss::LossConstants;
using loss::PolicyLossArgs;
using loss::ScalarLane;
using loss::TokenInputs;

constexpr int kLossThreads = 256;
constexpr int kLossUnroll = 4;  // tokens a thread has in flight
constexpr int kLossWarps = kLossThreads / kWarp;
constexpr int kFinishThreads = kWarp * loss::kStatCount;  // a warp per statistic

static_assert(loss::kBlockTokens % (kLossThreads * kLossUnroll) == 0);
static_assert(kFinishThreads <= 1024);

// The inputs of token t, zeros unless live. Everything is loaded, live or not, so that no load waits for the mask.
template <class Real>
__device__ __forceinline__ TokenInputs<ScalarLane<Real>> load_token(const PolicyLossArgs<Real>& args, int64_t t,
                                                                    bool* live) {
  TokenInputs<ScalarLane<Real>> x = {};
  *live = false;
  if (t >= args.tokens) return x;
  const auto load = [&](const Real* p) { return p != nullptr ? __ldg(p + t) : Real(0); };
  const bool is_live = args.loss_mask[t];
  const Real logprob = load(args.logprobs), proximal = load(args.proximal_logprobs), advantage = load(args.advantages);
  const Real behavior = load(args.behavior_logprobs), reference = load(args.ref_logprobs), entropy = load(args.entropy);
  if (is_live) x = {logprob, proximal, advantage, behavior, reference, entropy};
  *live = is_live;
  return x;
}

// Every thread of the block contributes; thread i writes statistic i of the block.
template <class Real>
__device__ __forceinline__ void store_block_stats(const PolicyLossArgs<Real>& args, const Accumulator<Real>& acc) {
  __shared__ Real warps[loss::kStatCount][kLossWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < loss::kSumCount; ++i) {
    const Real sum = warp_reduce(acc.sum[i], [](Real a, Real b) { return a + b; });
    if (lane == 0) warps[i][warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < loss::kMaxCount; ++i) {
    const Real max = warp_reduce(acc.max[i], [](Real a, Real b) { return a > b ? a : b; });
    if (lane == 0) warps[loss::kSumCount + i][warp] = max;
  }
  __syncthreads();
  const int stat = static_cast<int>(threadIdx.x);
  if (stat >= loss::kStatCount) return;
  double total = loss::empty_stat(stat);
  for (int w = 0; w < kLossWarps; ++w) total = loss::join_stat(stat, total, static_cast<double>(warps[stat][w]));
  args.scratch[stat * int64_t{gridDim.x} + blockIdx.x] = total;
}

template <class Real>
__global__ void __launch_bounds__(kLossThreads) policy_loss_kernel(PolicyLossArgs<Real> args) {
  using Lane = ScalarLane<Real>;
  const LossConstants<Lane> constants = loss::loss_constants<Lane>(args);
  Accumulator<Real> acc;
  loss::reset<Lane>(acc);
  const int64_t begin = blockIdx.x * loss::kBlockTokens + threadIdx.x;
  for (int64_t round = 0; round < loss::kBlockTokens; round += kLossThreads * kLossUnroll) {
    TokenInputs<Lane> x[kLossUnroll];
    bool live[kLossUnroll];
#pragma unroll
    for (int u = 0; u < kLossUnroll; ++u) x[u] = load_token(args, begin + round + u * kLossThreads, &live[u]);
#pragma unroll
    for (int u = 0; u < kLossUnroll; ++u) {
      const Real grad = loss::accumulate_tokens<Lane>(constants, x[u], live[u], acc);
      const int64_t t = begin + round + u * kLossThreads;
      if (t < args.tokens) args.grad_logprobs[t] = grad;
    }
  }
  store_block_stats(args, acc);
}

// One block. Warp i joins statistic i of all blocks: lanes stride over the blocks, then join in a fixed tree.
template <class Real>
__global__ void __launch_bounds__(kFinishThreads) policy_loss_finish_kernel(PolicyLossArgs<Real> args, int64_t blocks) {
  __shared__ double totals[loss::kStatCount];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, stat = static_cast<int>(threadIdx.x) / kWarp;
  double total = loss::empty_stat(stat);
  for (int64_t b = lane; b < blocks; b += kWarp) total = loss::join_stat(stat, total, args.scratch[stat * blocks + b]);
  total = warp_reduce(total, [stat](double a, double b) { return loss::join_stat(stat, a, b); });
  if (lane == 0) totals[stat] = total;
  __syncthreads();
  if (threadIdx.x == 0) loss::finish(args, totals);
}

}  // namespace
}  // namespace areal::cuda
