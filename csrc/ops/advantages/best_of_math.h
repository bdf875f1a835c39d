// The scores of one group of best_of.h, the same on CPU and GPU.
//
// With the rewards r_1 <= ... <= r_n, the best of a k-subset is r_i with probability w_i = C(i-1, k-1) / C(n, k). Given
// that the subset has j, it is r_j with u_j = C(j-1, k-1) / C(n-1, k-1), and r_i, i > j, with z_i = C(i-2, k-2) /
// C(n-1, k-1). All three follow from their value at n by a ratio, so one walk from the largest reward does it.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "ops/advantages/best_of.h"

namespace areal::advantages {

template <class Real>
AREAL_HOST_DEVICE double sorted_reward(const BestOfArgs<Real>& args, int64_t position) {
  return static_cast<double>(args.rewards[args.order[position]]);
}

// Calls fn(i, r_i - r_1, w_i) for i = n .. k. Differences, so that an offset of all rewards costs no digits.
template <class Real, class Fn>
AREAL_HOST_DEVICE void for_each_best(const BestOfArgs<Real>& args, int64_t begin, int64_t n, const Fn& fn) {
  const int64_t k = args.options.k;
  const double lowest = sorted_reward(args, begin);
  double w = static_cast<double>(k) / static_cast<double>(n);
  for (int64_t i = n; i >= k; --i) {
    fn(i, sorted_reward(args, begin + i - 1) - lowest, w);
    if (i > 1) w *= static_cast<double>(i - k) / static_cast<double>(i - 1);
  }
}

// The members [begin, end) of sorted positions.
template <class Real>
AREAL_HOST_DEVICE void score_group(const BestOfArgs<Real>& args, int64_t begin, int64_t end) {
  const BestOfOptions& o = args.options;
  int64_t n = 0;  // the failed come last
  while (begin + n < end && sorted_reward(args, begin + n) == sorted_reward(args, begin + n)) ++n;
  const double unscored = n == 1 && o.singleton_raw ? sorted_reward(args, begin) : 0;
  for (int64_t i = begin; i < end; ++i) args.scores[args.order[i]] = i - begin < n ? unscored : NAN;
  const bool is_constant =
      n < o.k || n < 2 || sorted_reward(args, begin + o.k - 1) == sorted_reward(args, begin + n - 1);
  if (is_constant) return;
  double mean = 0, variance = 0;
  for_each_best(args, begin, n, [&](int64_t, double r, double w) { mean += w * r; });
  for_each_best(args, begin, n, [&](int64_t, double r, double w) { variance += w * (r - mean) * (r - mean); });
  double scale = 1;
  if (o.divide_by_std) scale = o.eps_in_root ? std::sqrt(variance + o.eps) : std::sqrt(variance) + o.eps;
  const double lowest = sorted_reward(args, begin);
  const double k = static_cast<double>(o.k);
  double u = 1, z = (k - 1) / static_cast<double>(n - 1), above = 0, previous = NAN, score = 0;
  for (int64_t j = n; j >= 1; --j) {
    const double r = sorted_reward(args, begin + j - 1) - lowest;
    if (r != previous) score = (r * u + above - mean) / scale;                   // equal rewards get equal bits
    args.scores[args.order[begin + j - 1]] = score == score ? score : INFINITY;  // infinity minus itself
    previous = r;
    above += z * r;
    const double left = static_cast<double>(j - o.k);
    u *= j > 1 && left > 0 ? left / static_cast<double>(j - 1) : 0;
    z *= j > 2 && left > 0 ? left / static_cast<double>(j - 2) : 0;
  }
}

}  // namespace areal::advantages
