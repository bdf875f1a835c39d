// Kernels of moments.h: a block makes a part, or a thread a number.
#pragma once

#include "cuda/reduce.cuh"
#include "ops/advantages/moments_math.h"

namespace areal::cuda {
namespace {

using advantages::ExactSum;
using advantages::MomentArgs;
using advantages::Range;

constexpr int kMomentThreads = 256;

// Calls fn(i) for the live numbers of this block's part, one thread each.
template <class Real, class Fn>
__device__ __forceinline__ void for_each_live(const MomentArgs<Real>& args, const Fn& fn) {
  const int64_t threads = int64_t{gridDim.x} * kMomentThreads;
  for (int64_t i = int64_t{blockIdx.x} * kMomentThreads + threadIdx.x; i < args.count; i += threads) {
    if (advantages::is_live(args, i)) fn(i);
  }
}

template <class Real>
__global__ void __launch_bounds__(kMomentThreads) ranges_kernel(MomentArgs<Real> args, Range* parts) {
  __shared__ Range warps[kMomentThreads / kWarp];
  Range range = advantages::no_range();
  for_each_live(args, [&](int64_t i) { advantages::add(static_cast<double>(args.numbers[i]), range); });
  const auto merged = [](const Range& a, const Range& b) { return advantages::merge(a, b); };
  range = block_reduce<kMomentThreads>(range, merged, advantages::no_range(), warps);
  if (threadIdx.x == 0) parts[blockIdx.x] = range;
}

template <class Real>
__global__ void __launch_bounds__(kMomentThreads)
    moment_sums_kernel(MomentArgs<Real> args, const Range* range, const double* mean, ExactSum* parts) {
  __shared__ ExactSum warps[kMomentThreads / kWarp];
  const advantages::SumGrid grid = advantages::grid_of(*range, mean != nullptr);
  ExactSum sum;
  for_each_live(args, [&](int64_t i) { advantages::add(advantages::term(args, i, mean), grid, sum); });
  const auto merged = [](const ExactSum& a, const ExactSum& b) { return advantages::merge(a, b); };
  sum = block_reduce<kMomentThreads>(sum, merged, ExactSum{}, warps);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

template <class Real>
__global__ void __launch_bounds__(kMomentThreads)
    normalize_kernel(MomentArgs<Real> args, const double* mean, const double* scale, Real* out) {
  const int64_t threads = int64_t{gridDim.x} * kMomentThreads;
  for (int64_t i = int64_t{blockIdx.x} * kMomentThreads + threadIdx.x; i < args.count; i += threads) {
    out[i] = advantages::normalized(args, i, *mean, *scale);
  }
}

}  // namespace
}  // namespace areal::cuda
