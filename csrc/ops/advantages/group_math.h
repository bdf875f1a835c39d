// Statistics of a group of rewards and the score they give, the same on CPU and GPU. The passes over the members are
// the caller's: extent, then sums, then squares, each merged in any order.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "ops/advantages/exact_sum.h"
#include "ops/advantages/group.h"

namespace areal::advantages {

// A reward and the length of its sequence.
struct Member {
  double reward;
  double length;
};

template <class Real>
AREAL_HOST_DEVICE Member member_at(const GroupArgs<Real>& args, int64_t sorted_position) {
  const int64_t s = args.order[sorted_position];
  return {static_cast<double>(args.rewards[s]), args.lengths != nullptr ? args.lengths[s] : 0};
}

// Failed samples, whose reward is NaN, are in none of the statistics.
struct Extent {
  double count = 0;
  double min = INFINITY;
  double max = -INFINITY;
  double min_count = 0;  // of the rewards equal to min
  double max_count = 0;
  double length = 0;  // in total: exact, because lengths are integers
  double max_length = 0;
};

AREAL_HOST_DEVICE Extent extent_of(const Member& m) {
  if (m.reward != m.reward) return {};
  return {1, m.reward, m.reward, 1, 1, m.length, m.length};
}
AREAL_HOST_DEVICE Extent merge(const Extent& a, const Extent& b) {
  return {a.count + b.count,
          a.min < b.min ? a.min : b.min,
          a.max > b.max ? a.max : b.max,
          (a.min <= b.min ? a.min_count : 0) + (b.min <= a.min ? b.min_count : 0),
          (a.max >= b.max ? a.max_count : 0) + (b.max >= a.max ? b.max_count : 0),
          a.length + b.length,
          a.max_length > b.max_length ? a.max_length : b.max_length};
}

AREAL_HOST_DEVICE double largest(const Extent& e) {
  const double low = std::fabs(e.min), high = std::fabs(e.max);
  return low > high ? low : high;
}

// Sums of the rewards, plain and weighted by length.
struct RewardSums {
  ExactSum plain;
  ExactSum weighted;
};
struct RewardGrids {
  SumGrid plain;
  SumGrid weighted;
};

AREAL_HOST_DEVICE RewardGrids reward_grids(const Extent& e) {
  return {sum_grid(largest(e), e.count), sum_grid(largest(e) * e.max_length, e.count)};
}
AREAL_HOST_DEVICE void add(const Member& m, const RewardGrids& grids, RewardSums& sums) {
  if (m.reward != m.reward) return;
  add(m.reward, grids.plain, sums.plain);
  add(product(m.reward, m.length), grids.weighted, sums.weighted);
}
AREAL_HOST_DEVICE RewardSums merge(const RewardSums& a, const RewardSums& b) {
  return {merge(a.plain, b.plain), merge(a.weighted, b.weighted)};
}

// Grid of the squares of what deviates from a mean by no more than the range (4: the mean is rounded).
AREAL_HOST_DEVICE SumGrid square_grid(double min, double max, double count) {
  return sum_grid(4 * (max - min) * (max - min), count);
}
AREAL_HOST_DEVICE void add_square(double x, double mean, const SumGrid& grid, ExactSum& squares) {
  const double d = x - mean;
  if (x == x) add(product(d, d), grid, squares);
}

struct GroupStatistics {
  Extent extent;
  double mean = 0;
  double weighted_mean = 0;
  double squares = 0;
};

AREAL_HOST_DEVICE BatchStatistics as_batch(const GroupStatistics& g) {
  return {g.extent.count, g.mean, g.squares, g.extent.min, g.extent.max};
}

AREAL_HOST_DEVICE BatchStatistics set_at(Level level, const GroupStatistics& g, const BatchStatistics& batch) {
  return level == Level::kBatch ? batch : as_batch(g);
}

// The variance without one reward; 0 where the others are equal, which rounding would hide.
AREAL_HOST_DEVICE double variance_of_others(double reward, const GroupStatistics& g, int32_t ddof) {
  const Extent& e = g.extent;
  const double n = e.count, d = reward - g.mean;
  const bool others_equal = (reward == e.max && e.max_count == 1 && e.min_count == n - 1) ||
                            (reward == e.min && e.min_count == 1 && e.max_count == n - 1);
  const double squares = g.squares - d * d * (n / (n - 1));
  return others_equal || squares <= 0 || n - 1 <= ddof ? 0 : squares / (n - 1 - ddof);
}

AREAL_HOST_DEVICE double with_eps(double variance, const GroupOptions& o) {
  return o.eps_in_root ? std::sqrt(variance + o.eps) : std::sqrt(variance) + o.eps;
}

AREAL_HOST_DEVICE double normalized(double reward, const GroupStatistics& group, const BatchStatistics& batch,
                                    const GroupOptions& o) {
  double centred = reward, scale = 1;
  if (o.mean != Level::kNone) {
    const BatchStatistics s = set_at(o.mean, group, batch);
    if (s.count == 1) return o.singleton == Singleton::kRaw ? reward : 0;
    if (s.min == s.max) return 0;
    centred = reward - (o.length_weighted ? group.weighted_mean : s.mean);
    if (o.leave_one_out) centred *= s.count / (s.count - 1);  // r - mean of the others
    if (o.divide_by_mean) scale = s.mean + o.eps;
  }
  if (o.std != Level::kNone) {
    const BatchStatistics s = set_at(o.std, group, batch);
    if (s.count == 1) return o.singleton == Singleton::kRaw ? reward : 0;
    if (s.min == s.max) return 0;
    if (o.leave_one_out_std) {
      const double variance = variance_of_others(reward, group, o.ddof);
      scale = variance > 0 ? with_eps(variance, o) : 1;
    } else {
      scale = with_eps(s.squares / (s.count - o.ddof), o);
    }
  }
  return scale != 0 ? centred / scale : 0;
}

AREAL_HOST_DEVICE double score(double reward, const GroupStatistics& group, const BatchStatistics& batch,
                               const GroupOptions& o) {
  if (reward != reward) return reward;
  if (o.length_weighted && group.extent.length == 0) return 0;  // nobody has a token
  const double result = normalized(reward, group, batch, o);
  return result == result ? result : INFINITY;  // infinity minus itself
}

AREAL_HOST_DEVICE double mean_length(const GroupStatistics& group) {
  return group.extent.length > 0 ? group.extent.length / group.extent.count : 1;
}

AREAL_HOST_DEVICE bool has_signal(double reward, const GroupStatistics& group) {
  return reward == reward && group.extent.min < group.extent.max;
}

}  // namespace areal::advantages
