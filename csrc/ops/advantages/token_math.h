// Per-token math of token_rewards.h and spread.h, the same on CPU and GPU.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "ops/advantages/spread.h"
#include "ops/advantages/token_rewards.h"

namespace areal::advantages {

inline constexpr double kMaxLogRatio = 20.0;

AREAL_HOST_DEVICE bool is_live(const bool* loss_mask, int64_t t) { return loss_mask == nullptr || loss_mask[t]; }

// log pi - log pi_ref, clamped.
AREAL_HOST_DEVICE double log_ratio(double logprob, double ref_logprob) {
  if (logprob == ref_logprob) return 0;
  const double d = logprob - ref_logprob;
  return d > kMaxLogRatio ? kMaxLogRatio : d < -kMaxLogRatio ? -kMaxLogRatio : d;
}

AREAL_HOST_DEVICE double kl_estimate(Kl kl, double d) {
  return kl == Kl::kK1 ? d : kl == Kl::kK2 ? 0.5 * d * d : std::expm1(-d) + d;
}

// Of a live token.
template <class Real>
AREAL_HOST_DEVICE double reward_at(const TokenRewards<Real>& a, int64_t t) {
  double reward = a.rewards != nullptr ? static_cast<double>(a.rewards[t]) : 0;
  if (a.logprobs != nullptr) {
    const double d = log_ratio(static_cast<double>(a.logprobs[t]), static_cast<double>(a.ref_logprobs[t]));
    reward -= a.beta * kl_estimate(a.kl, d);
  }
  return reward;
}

// Before the KL term.
template <class Real>
AREAL_HOST_DEVICE double sequence_advantage(const SpreadArgs<Real>& a, int64_t s) {
  const double score = a.scores[s];
  return score != score ? 0 : a.divisors != nullptr ? score / a.divisors[s] : score;
}

template <class Real>
AREAL_HOST_DEVICE Real token_advantage(const SpreadArgs<Real>& a, int64_t s, int64_t t) {
  if (!is_live(a.loss_mask, t)) return Real(0);
  const double score = a.scores[s];
  if (a.beta == 0 || score != score) return static_cast<Real>(sequence_advantage(a, s));
  const double d = log_ratio(static_cast<double>(a.logprobs[t]), static_cast<double>(a.ref_logprobs[t]));
  const double total = score + a.beta * std::expm1(-d);
  return static_cast<Real>(a.divisors != nullptr ? total / a.divisors[s] : total);
}

}  // namespace areal::advantages
