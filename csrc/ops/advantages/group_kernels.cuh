// Kernels of the group scores: a warp per group, found at the first position of its run of sorted ids.
#pragma once

#include "cuda/port.cuh"
#include "cuda/reduce.cuh"
#include "ops/advantages/group_math.h"

namespace areal::cuda {
namespace {

using advantages::BatchStatistics;
using advantages::GroupArgs;
using advantages::GroupStatistics;

constexpr int kGroupThreads = 128;
constexpr int kGroupsPerBlock = kGroupThreads / kWarp;

// Merges the values of the lanes, in any order; the result is in every lane. Called by all 32 lanes.
template <class T>
__device__ __forceinline__ T merge_lanes(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(double) == 0);
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    double words[sizeof(T) / sizeof(double)];
    memcpy(words, &value, sizeof value);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(double)); ++i) {
      words[i] = __shfl_xor_sync(kFullWarp, words[i], mask);
    }
    T other;
    memcpy(&other, words, sizeof other);
    value = merge(value, other);
  }
  return value;
}

// Of the members order[begin, end), split over the lanes of a warp; the result is in every lane.
template <class Real>
__device__ __forceinline__ GroupStatistics warp_group_statistics(const GroupArgs<Real>& args, int64_t begin,
                                                                 int64_t end) {
  const int64_t first = begin + static_cast<int>(threadIdx.x) % kWarp;
  GroupStatistics g;
  for (int64_t i = first; i < end; i += kWarp) g.extent = merge(g.extent, extent_of(member_at(args, i)));
  g.extent = merge_lanes(g.extent);
  advantages::RewardSums sums;
  const advantages::RewardGrids grids = reward_grids(g.extent);
  for (int64_t i = first; i < end; i += kWarp) add(member_at(args, i), grids, sums);
  sums = merge_lanes(sums);
  g.mean = sums.plain.value() / g.extent.count;
  g.weighted_mean = sums.weighted.value() / g.extent.length;
  advantages::ExactSum squares;
  const advantages::SumGrid grid = advantages::square_grid(g.extent.min, g.extent.max, g.extent.count);
  for (int64_t i = first; i < end; i += kWarp) {
    advantages::add_square(member_at(args, i).reward, g.mean, grid, squares);
  }
  g.squares = merge_lanes(squares).value();
  return g;
}

// One warp: the statistics of all sequences.
template <class Real>
__global__ void __launch_bounds__(kWarp) batch_statistics_kernel(GroupArgs<Real> args, BatchStatistics* out) {
  const GroupStatistics all = warp_group_statistics(args, 0, args.count);
  if (threadIdx.x == 0) *out = advantages::as_batch(all);
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
__global__ void __launch_bounds__(kGroupThreads) group_scores_kernel(GroupArgs<Real> args) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t begin = int64_t{blockIdx.x} * kGroupsPerBlock + warp;
  if (begin >= args.count) return;
  if (begin > 0 && args.sorted_ids[begin - 1] == args.sorted_ids[begin]) return;
  const int64_t end = run_end(args.sorted_ids, begin, args.count);
  const GroupStatistics group = warp_group_statistics(args, begin, end);
  const BatchStatistics batch = args.batch != nullptr ? *args.batch : BatchStatistics{};
  for (int64_t i = begin + lane; i < end; i += kWarp) {
    const int64_t s = args.order[i];
    const double reward = static_cast<double>(args.rewards[s]);
    args.scores[s] = advantages::score(reward, group, batch, args.options);
    if (args.has_signal != nullptr) args.has_signal[s] = advantages::has_signal(reward, group);
    if (args.mean_lengths != nullptr) args.mean_lengths[s] = advantages::mean_length(group);
  }
}

}  // namespace
}  // namespace areal::cuda
