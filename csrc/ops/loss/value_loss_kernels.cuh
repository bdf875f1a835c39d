// Kernels of the value loss: blocks of kValueBlockTokens tokens, then one block that adds up their statistics in order.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/loss/value_loss_math.h"

namespace areal::cuda {
namespace {

using loss::ValueLossArgs;

constexpr int kValueThreads = 256;
constexpr int kValueFinishThreads = kWarp * loss::kValueStatCount;  // a warp per statistic

static_assert(loss::kValueBlockTokens % kValueThreads == 0);

template <class Real>
__global__ void __launch_bounds__(kValueThreads) value_loss_kernel(ValueLossArgs<Real> args) {
  __shared__ double warps[loss::kValueStatCount][kValueThreads / kWarp];
  const loss::ValueBounds<Real> bounds = {static_cast<Real>(args.clip), static_cast<Real>(args.huber_delta)};
  double sums[loss::kValueStatCount] = {};
  const int64_t begin = blockIdx.x * loss::kValueBlockTokens + threadIdx.x;
  for (int64_t offset = 0; offset < loss::kValueBlockTokens; offset += kValueThreads) {
    const int64_t t = begin + offset;
    if (t >= args.tokens) break;
    const bool live = args.loss_mask[t];
    const Real value = __ldg(args.values + t), target = __ldg(args.returns + t);
    const Real old_value = args.old_values != nullptr ? __ldg(args.old_values + t) : value;
    Real grad = 0;
    if (live) {
      const loss::ValueTerm<Real> term = loss::value_term<loss::ScalarLane<Real>>(bounds, value, old_value, target);
      loss::value_stats(term, value, target, sums);
      grad = term.grad;
    }
    args.grad[t] = grad;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int i = 0; i < loss::kValueStatCount; ++i) {
    const double sum = warp_reduce(sums[i], [](double a, double b) { return a + b; });
    if (lane == 0) warps[i][warp] = sum;
  }
  __syncthreads();
  const int stat = static_cast<int>(threadIdx.x);
  if (stat >= loss::kValueStatCount) return;
  double total = 0;
  for (int w = 0; w < kValueThreads / kWarp; ++w) total += warps[stat][w];
  args.scratch[stat * int64_t{gridDim.x} + blockIdx.x] = total;
}

// One block. Warp i adds up statistic i of all blocks: lanes stride over the blocks, then join in a fixed tree.
template <class Real>
__global__ void __launch_bounds__(kValueFinishThreads)
    value_loss_finish_kernel(ValueLossArgs<Real> args, int64_t blocks) {
  __shared__ double totals[loss::kValueStatCount];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, stat = static_cast<int>(threadIdx.x) / kWarp;
  double total = 0;
  for (int64_t b = lane; b < blocks; b += kWarp) total += args.scratch[stat * blocks + b];
  total = warp_reduce(total, [](double a, double b) { return a + b; });
  if (lane == 0) totals[stat] = total;
  __syncthreads();
  if (threadIdx.x == 0) loss::finish(args, totals);
}

}  // namespace
}  // namespace areal::cuda
