// Kernels of the group scores: a warp per group, found at the first position of its run of sorted ids.
#pragma once

#include "cuda/port.cuh"
#include "cuda/reduce.cuh"
#include "ops/advantages/group_math.h"

namespace areal::cuda {
namespace {

using advantages::GroupArgs;
using advantages::SetStatistics;

constexpr int kGroupThreads = 128;
static_assert(sizeof(SetStatistics) <= kBatchScratchBytes);
constexpr int kGroupsPerBlock = kGroupThreads / kWarp;

// merge must be commutative: then every lane computes the same bits. Called by all 32 lanes.
template <class T, class Merge>
__device__ __forceinline__ T warp_all_reduce(T value, const Merge& merge) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = merge(value, __shfl_xor_sync(kFullWarp, value, mask));
  return value;
}

// set_statistics by a warp, members split over the lanes; the result is in every lane.
template <class Real>
__device__ __forceinline__ SetStatistics warp_set_statistics(const GroupArgs<Real>& args, int64_t begin, int64_t end) {
  const auto sum = [](double a, double b) { return a + b; };
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  SetStatistics s;
  double total = 0;
  for (int64_t i = begin + lane; i < end; i += kWarp) advantages::add_reward(args.rewards[args.order[i]], s, total);
  total = warp_all_reduce(total, sum);
  s.count = static_cast<int64_t>(warp_all_reduce(static_cast<double>(s.count), sum));
  s.min = warp_all_reduce(s.min, [](double a, double b) { return a < b ? a : b; });
  s.max = warp_all_reduce(s.max, [](double a, double b) { return a > b ? a : b; });
  s.mean = s.count > 0 ? total / static_cast<double>(s.count) : 0;
  for (int64_t i = begin + lane; i < end; i += kWarp) advantages::add_square(args.rewards[args.order[i]], s);
  s.squares = warp_all_reduce(s.squares, sum);
  return s;
}

// One warp: the statistics of all sequences.
template <class Real>
__global__ void __launch_bounds__(kWarp) batch_statistics_kernel(GroupArgs<Real> args, SetStatistics* batch) {
  const SetStatistics s = warp_set_statistics(args, 0, args.count);
  if (threadIdx.x == 0) *batch = s;
}

// The end of the run of ids that begins at `begin`: a binary search for the first greater id.
__device__ __forceinline__ int64_t run_end(const int64_t* sorted_ids, int64_t begin, int64_t count) {
  int64_t low = begin + 1, high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (sorted_ids[middle] > sorted_ids[begin]) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A warp per sorted position; those that start a group score it.
template <class Real>
__global__ void __launch_bounds__(kGroupThreads) group_scores_kernel(GroupArgs<Real> args, const SetStatistics* batch) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t begin = int64_t{blockIdx.x} * kGroupsPerBlock + warp;
  if (begin >= args.count) return;
  if (begin > 0 && args.sorted_ids[begin - 1] == args.sorted_ids[begin]) return;
  const int64_t end = run_end(args.sorted_ids, begin, args.count);
  const SetStatistics group = warp_set_statistics(args, begin, end);
  const SetStatistics all = batch != nullptr ? *batch : SetStatistics{};
  for (int64_t i = begin + lane; i < end; i += kWarp) {
    const int64_t s = args.order[i];
    args.scores[s] = advantages::score(static_cast<double>(args.rewards[s]), group, all, args.options);
  }
}

}  // namespace
}  // namespace areal::cuda
