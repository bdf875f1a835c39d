// Statistics of a set of rewards and the score they give, the same on CPU and GPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "ops/advantages/group.h"

namespace areal::advantages {

// Of the rewards that are not NaN.
struct SetStatistics {
  int64_t count = 0;
  double mean = 0;
  double squares = 0;  // sum of (r - mean)^2
  double min = INFINITY;
  double max = -INFINITY;
};

// The two passes: every reward once through add_reward, then, with the mean set, once through add_square.
AREAL_HOST_DEVICE void add_reward(double reward, SetStatistics& s, double& sum) {
  if (reward != reward) return;
  ++s.count;
  sum += reward;
  s.min = reward < s.min ? reward : s.min;
  s.max = reward > s.max ? reward : s.max;
}
AREAL_HOST_DEVICE void add_square(double reward, SetStatistics& s) {
  const double d = reward - s.mean;
  if (reward == reward) s.squares += d * d;
}

// Field by field: choosing between two addresses would put both sets in local memory.
AREAL_HOST_DEVICE SetStatistics set_at(Level level, const SetStatistics& group, const SetStatistics& batch) {
  const bool whole = level == Level::kBatch;
  return {whole ? batch.count : group.count, whole ? batch.mean : group.mean, whole ? batch.squares : group.squares,
          whole ? batch.min : group.min, whole ? batch.max : group.max};
}

AREAL_HOST_DEVICE double score(double reward, const SetStatistics& group, const SetStatistics& batch,
                               const GroupOptions& options) {
  if (reward != reward) return 0;
  double centred = reward;
  double scale = 1;
  if (options.mean != Level::kNone) {
    const SetStatistics s = set_at(options.mean, group, batch);
    if (s.count == 1) return options.singleton == Singleton::kRaw ? reward : 0;
    if (s.min == s.max) return 0;
    const double n = static_cast<double>(s.count);
    centred = reward - s.mean;
    if (options.leave_one_out) centred *= n / (n - 1);  // r - mean of the others
    if (options.divide_by_mean) scale = s.mean + options.eps;
  }
  if (options.std != Level::kNone) {
    const SetStatistics s = set_at(options.std, group, batch);
    if (s.count == 1) return options.singleton == Singleton::kRaw ? reward : 0;
    if (s.min == s.max) return 0;
    const double variance = s.squares / static_cast<double>(s.count - options.ddof);
    scale = options.eps_in_root ? std::sqrt(variance + options.eps) : std::sqrt(variance) + options.eps;
  }
  return scale != 0 ? centred / scale : 0;
}

}  // namespace areal::advantages
