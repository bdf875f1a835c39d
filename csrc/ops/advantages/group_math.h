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

// Members order[begin..end).
template <class Real>
AREAL_HOST_DEVICE SetStatistics set_statistics(const Real* rewards, const int64_t* order, int64_t begin, int64_t end) {
  SetStatistics s;
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double r = static_cast<double>(rewards[order[i]]);
    if (r != r) continue;
    ++s.count;
    sum += r;
    s.min = r < s.min ? r : s.min;
    s.max = r > s.max ? r : s.max;
  }
  if (s.count == 0) return s;
  s.mean = sum / static_cast<double>(s.count);
  for (int64_t i = begin; i < end; ++i) {
    const double d = static_cast<double>(rewards[order[i]]) - s.mean;
    if (d == d) s.squares += d * d;
  }
  return s;
}

AREAL_HOST_DEVICE double score(double reward, const SetStatistics& group, const SetStatistics& batch,
                               const GroupOptions& options) {
  if (reward != reward) return 0;
  double centred = reward;
  double scale = 1;
  if (options.mean != Level::kNone) {
    const SetStatistics& s = options.mean == Level::kGroup ? group : batch;
    if (s.count == 1) return options.singleton == Singleton::kRaw ? reward : 0;
    if (s.min == s.max) return 0;
    const double n = static_cast<double>(s.count);
    centred = reward - s.mean;
    if (options.leave_one_out) centred *= n / (n - 1);  // r - mean of the others
    if (options.divide_by_mean) scale = s.mean + options.eps;
  }
  if (options.std != Level::kNone) {
    const SetStatistics& s = options.std == Level::kGroup ? group : batch;
    if (s.count == 1) return options.singleton == Singleton::kRaw ? reward : 0;
    if (s.min == s.max) return 0;
    const double variance = s.squares / static_cast<double>(s.count - options.ddof);
    scale = options.eps_in_root ? std::sqrt(variance + options.eps) : std::sqrt(variance) + options.eps;
  }
  return scale != 0 ? centred / scale : 0;
}

}  // namespace areal::advantages
