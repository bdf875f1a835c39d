// Math of moments.h on one number and on partial results, the same on CPU and GPU.
#pragma once

#include <cmath>

#include "base/host_device.h"
#include "ops/advantages/moments.h"

namespace areal::advantages {

template <class Real>
AREAL_HOST_DEVICE bool is_live(const MomentArgs<Real>& args, int64_t i) {
  return args.loss_mask == nullptr || args.loss_mask[i];
}

AREAL_HOST_DEVICE Range no_range() { return {0, INFINITY, -INFINITY}; }
// NaN is counted and not seen: it reaches the sums.
AREAL_HOST_DEVICE void add(double x, Range& r) {
  r.count += 1;
  r.min = x < r.min ? x : r.min;
  r.max = x > r.max ? x : r.max;
}
AREAL_HOST_DEVICE Range merge(const Range& a, const Range& b) {
  return {a.count + b.count, a.min < b.min ? a.min : b.min, a.max > b.max ? a.max : b.max};
}

// A deviation from the mean is at most the range, or twice that, because the mean is rounded.
AREAL_HOST_DEVICE SumGrid grid_of(const Range& r, bool squares) {
  const double low = std::fabs(r.min), high = std::fabs(r.max), width = r.max - r.min;
  return sum_grid(squares ? 4 * width * width : low > high ? low : high, r.count);
}

template <class Real>
AREAL_HOST_DEVICE double term(const MomentArgs<Real>& args, int64_t i, const double* mean) {
  const double x = static_cast<double>(args.numbers[i]);
  return mean == nullptr ? x : product(x - *mean, x - *mean);
}

// In float the mean comes in two halves, of which the first takes off what would cost digits.
AREAL_HOST_DEVICE float normalized(float x, double mean, double scale) {
  const float high = static_cast<float>(mean), low = static_cast<float>(mean - high);
  return ((x - high) - low) * static_cast<float>(scale);
}
AREAL_HOST_DEVICE double normalized(double x, double mean, double scale) { return (x - mean) * scale; }

template <class Real>
AREAL_HOST_DEVICE Real normalized(const MomentArgs<Real>& args, int64_t i, double mean, double scale) {
  return is_live(args, i) ? normalized(args.numbers[i], mean, scale) : Real(0);
}

}  // namespace areal::advantages
