// Kernel of best_of.h: a thread per group, which walks it.
#pragma once

#include "cuda/port.cuh"
#include "ops/advantages/best_of_math.h"
#include "ops/advantages/group_kernels.cuh"

namespace areal::cuda {
namespace {

using advantages::BestOfArgs;

constexpr int kBestOfThreads = 64;

// A thread per sorted position; those that start a group score it.
template <class Real>
__global__ void __launch_bounds__(kBestOfThreads) best_of_scores_kernel(BestOfArgs<Real> args) {
  const int64_t begin = int64_t{blockIdx.x} * kBestOfThreads + threadIdx.x;
  if (begin >= args.count) return;
  if (begin > 0 && args.sorted_ids[begin - 1] == args.sorted_ids[begin]) return;
  advantages::score_group(args, begin, run_end(args.sorted_ids, begin, args.count));
}

}  // namespace
}  // namespace areal::cuda
