// Per-token math of spread.h, the same on CPU and GPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "ops/advantages/spread.h"

namespace areal::advantages {

inline constexpr double kMaxLogRatio = 20.0;

template <class Real>
AREAL_HOST_DEVICE bool is_live(const TokenArgs<Real>& a, int64_t t) {
  return a.loss_mask == nullptr || a.loss_mask[t];
}

template <class Real>
AREAL_HOST_DEVICE double log_ratio(const TokenArgs<Real>& a, int64_t t) {
  const double p = static_cast<double>(a.logprobs[t]), q = static_cast<double>(a.ref_logprobs[t]);
  if (p == q) return 0;
  const double d = p - q;
  return d > kMaxLogRatio ? kMaxLogRatio : d < -kMaxLogRatio ? -kMaxLogRatio : d;
}

template <class Real>
AREAL_HOST_DEVICE Real token_advantage(const SpreadArgs<Real>& a, int64_t t, double score, double divisor) {
  if (!is_live(a.tokens, t)) return Real(0);
  const double kl = a.beta != 0 ? a.beta * std::expm1(-log_ratio(a.tokens, t)) : 0;
  return static_cast<Real>((score + kl) / divisor);
}

}  // namespace areal::advantages
