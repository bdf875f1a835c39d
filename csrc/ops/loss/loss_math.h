// Per-token math of the policy loss, written once. A Lane says what one step works on: ScalarLane<float> on the GPU,
// ScalarLane<double> for fp64, a whole SIMD vector in the CPU kernel. It provides Value, Mask, splat(double),
// select(mask, yes, no) and exp_terms(Value).
//
// Masked tokens enter as zeros, whatever memory held for them: their differences are then 0 and their ratios 1, and
// only the sums that a 1 would change need the mask.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/host_device.h"
#include "ops/loss/loss.h"

namespace areal::loss {

inline constexpr double kMaxLogRatio = 20.0;
// Above exp(kMaxLogRatio): where a running minimum of ratios starts, finite so that empty statistics are too.
inline constexpr double kRatioBound = 5e8;

// exp(y), exp(y) - 1 and the k3 estimator exp(y) - 1 - y, each accurate to a few ulp of itself. NaN gives NaN.
template <class Value>
struct ExpTerms {
  Value exp;
  Value expm1;
  Value k3;
};

template <class Real>
struct ScalarLane {
  using Value = Real;
  using Mask = bool;
  static AREAL_HOST_DEVICE Real splat(double x) { return static_cast<Real>(x); }
  static AREAL_HOST_DEVICE Real select(bool mask, Real yes, Real no) { return mask ? yes : no; }

  // Near 0, k3 = y^2/2 (1 + y/3 (1 + y/4 (...))): the plain difference would cancel to nothing.
  static AREAL_HOST_DEVICE ExpTerms<Real> exp_terms(Real y) {
    constexpr int kLastDivisor = std::is_same_v<Real, double> ? 20 : 12;
    const Real e = std::exp(y);
    if (!(y > Real(-1) && y < Real(1))) return {e, e - Real(1), e - Real(1) - y};
    Real series = Real(1);
    for (int divisor = kLastDivisor; divisor >= 3; --divisor) {
      series = Real(1) + series * y * (Real(1) / Real(divisor));
    }
    const Real k3 = Real(0.5) * y * y * series;
    return {e, y + k3, k3};
  }
};

template <class Lane>
struct TokenInputs {
  using Value = typename Lane::Value;
  Value logprob, proximal, advantage, behavior, reference, entropy;
};

// The parameters, and which inputs there are, in lanes.
template <class Lane>
struct LossConstants {
  using Value = typename Lane::Value;
  Value ratio_low, ratio_high, dual_clip, behavior_low, behavior_cap, kl_coef, entropy_coef, max_log_ratio;
  bool has_behavior, has_reference, has_entropy, masks_weights;
  bool penalises_kl, rewards_entropy;  // false with a coefficient of 0: the input then feeds statistics only
  KlEstimator kl_estimator;
};

template <class Lane, class Real>
AREAL_HOST_DEVICE LossConstants<Lane> loss_constants(const PolicyLossArgs<Real>& args) {
  const PolicyLossParams& p = args.params;
  LossConstants<Lane> c;
  c.ratio_low = Lane::splat(p.ratio_low);
  c.ratio_high = Lane::splat(p.ratio_high);
  c.dual_clip = Lane::splat(p.dual_clip);
  c.behavior_low = Lane::splat(p.behavior_low);
  c.behavior_cap = Lane::splat(p.behavior_cap);
  c.kl_coef = Lane::splat(p.kl_coef);
  c.entropy_coef = Lane::splat(p.entropy_coef);
  c.max_log_ratio = Lane::splat(kMaxLogRatio);
  c.has_behavior = args.behavior_logprobs != nullptr;
  c.has_reference = args.ref_logprobs != nullptr;
  c.has_entropy = args.entropy != nullptr;
  c.masks_weights = p.behavior_mode == BehaviorMode::kMask;
  c.penalises_kl = c.has_reference && p.kl_coef != 0;
  c.rewards_entropy = c.has_entropy && p.entropy_coef != 0;
  c.kl_estimator = p.kl_estimator;
  return c;
}

// What a statistic starts from, and how two parts of it join.
AREAL_HOST_DEVICE double empty_stat(int stat) { return stat == kNegativeRatioMin ? -kRatioBound : 0.0; }
AREAL_HOST_DEVICE double join_stat(int stat, double a, double b) {
  if (stat < kSumCount) return a + b;
  return a > b ? a : b;
}

// Running statistics of some tokens; Value is one lane or a vector of them.
template <class Value>
struct Accumulator {
  Value sum[kSumCount];
  Value max[kMaxCount];  // of statistic kSumCount + i
};

template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE void reset(Accumulator<Value>& acc) {
  for (int i = 0; i < kSumCount; ++i) acc.sum[i] = Lane::splat(0);
  for (int i = 0; i < kMaxCount; ++i) acc.max[i] = Lane::splat(empty_stat(kSumCount + i));
}

template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE void raise_max(Accumulator<Value>& acc, Stat stat, Value x) {
  Value& max = acc.max[stat - kSumCount];
  max = Lane::select(x > max, x, max);
}

// log p - log q clamped to +-bound, and the factor its gradient carries: 1, or 0 beyond the bound. -inf against -inf is
// 0 without gradient.
template <class Lane>
struct LogRatio {
  typename Lane::Value value;
  typename Lane::Value slope;
};

template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE LogRatio<Lane> log_ratio(Value log_p, Value log_q, Value bound) {
  const Value difference = log_p - log_q;
  const Value defined = Lane::select(log_p == log_q, Lane::splat(0), difference);
  const Value raised = Lane::select(defined < -bound, -bound, defined);
  const Value value = Lane::select(raised > bound, bound, raised);
  return {value, Lane::select(value == difference, Lane::splat(1), Lane::splat(0))};
}

// w of the header, 0 where masked.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value behavior_weight(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                        typename Lane::Mask live, Accumulator<Value>& acc) {
  const Value zero = Lane::splat(0), one = Lane::splat(1);
  Value raw = Lane::select(live, one, zero);
  Value applied = raw;
  if (c.has_behavior) {
    const Value log_w = log_ratio<Lane>(x.proximal, x.behavior, c.max_log_ratio).value;
    const ExpTerms<Value> w = Lane::exp_terms(log_w);
    raw = Lane::select(live, w.exp, zero);
    const Value above = Lane::select(raw > c.behavior_cap, one, zero);
    if (c.masks_weights) {
      const Value dropped = Lane::select(live, Lane::select(w.exp < c.behavior_low, one, above), zero);
      applied = Lane::select(dropped > zero, zero, raw);
      acc.sum[kBehaviorMasked] += dropped;
    } else {
      applied = Lane::select(above > zero, c.behavior_cap, raw);
      acc.sum[kBehaviorCapped] += above;
    }
    acc.sum[kKlBehaviorProximalK1] -= log_w;
    acc.sum[kKlBehaviorProximalK3] += w.k3;
  }
  acc.sum[kBehaviorWeight] += raw;
  acc.sum[kAppliedWeight] += applied;
  acc.sum[kAppliedWeightSquare] += applied * applied;
  raise_max<Lane>(acc, kBehaviorWeightMax, raw);
  return applied;
}

// A term of the loss and its gradient with respect to the logprob.
template <class Value>
struct Term {
  Value value;
  Value grad;
};

// -w min(u A, clip(u) A), dual-clipped: -w A times u held below ratio_high (A >= 0) or between ratio_low and
// dual_clip (A < 0). Where u is held, the gradient is 0.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Term<Value> policy_term(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                          typename Lane::Mask live, Value weight, Accumulator<Value>& acc) {
  const Value zero = Lane::splat(0), one = Lane::splat(1);
  const LogRatio<Lane> log_u = log_ratio<Lane>(x.logprob, x.proximal, c.max_log_ratio);
  const ExpTerms<Value> u = Lane::exp_terms(log_u.value);
  const Value low = Lane::select(x.advantage >= zero, zero, c.ratio_low);
  const Value high = Lane::select(x.advantage >= zero, c.ratio_high, c.dual_clip);
  const Value held_low = Lane::select(u.exp < low, one, zero);
  const Value held_high = Lane::select(u.exp > high, one, zero);
  const Value held = Lane::select(held_high > zero, high, Lane::select(held_low > zero, low, u.exp));
  const Value slope = Lane::select(held_low + held_high > zero, zero, log_u.slope);
  const Value weighted = weight * x.advantage;

  acc.sum[kRatio] += Lane::select(live, u.exp, zero);
  acc.sum[kClipLow] += held_low;
  acc.sum[kClipHigh] += Lane::select(x.advantage > zero, held_high, zero);
  acc.sum[kDualClip] += Lane::select(x.advantage < zero, held_high, zero);
  acc.sum[kKlProximalCurrentK1] -= log_u.value;
  acc.sum[kKlProximalCurrentK3] += u.k3;
  raise_max<Lane>(acc, kRatioMax, Lane::select(live, u.exp, zero));
  raise_max<Lane>(acc, kNegativeRatioMin, Lane::select(live, -u.exp, Lane::splat(-kRatioBound)));
  acc.sum[kPolicyLoss] -= weighted * held;
  return {-(weighted * held), -(weighted * u.exp * slope)};
}

// kl_coef KL(current || reference), with y = log reference - log current.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Term<Value> kl_term(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                      Accumulator<Value>& acc) {
  const LogRatio<Lane> y = log_ratio<Lane>(x.reference, x.logprob, c.max_log_ratio);
  const ExpTerms<Value> e = Lane::exp_terms(y.value);
  acc.sum[kKlCurrentReferenceK1] -= y.value;
  acc.sum[kKlCurrentReferenceK3] += e.k3;
  if (!c.penalises_kl) return {Lane::splat(0), Lane::splat(0)};
  switch (c.kl_estimator) {
    case KlEstimator::kK1:
      return {-c.kl_coef * y.value, c.kl_coef * y.slope};
    case KlEstimator::kK2:
      return {c.kl_coef * y.value * y.value * Lane::splat(0.5), -c.kl_coef * y.value * y.slope};
    case KlEstimator::kK3:
      break;
  }
  return {c.kl_coef * e.k3, -c.kl_coef * e.expm1 * y.slope};
}

// Accumulates the live tokens' terms and statistics; returns the gradient with respect to the logprobs.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value accumulate_tokens(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                          typename Lane::Mask live, Accumulator<Value>& acc) {
  const Value zero = Lane::splat(0);
  acc.sum[kLiveTokens] += Lane::select(live, Lane::splat(1), zero);
  const Value weight = behavior_weight<Lane>(c, x, live, acc);
  Term<Value> term = policy_term<Lane>(c, x, live, weight, acc);
  if (c.has_reference) {
    const Term<Value> kl = kl_term<Lane>(c, x, acc);
    term.value += kl.value;
    term.grad += Lane::select(live, kl.grad, zero);
  }
  if (c.has_entropy) acc.sum[kEntropy] += x.entropy;
  if (c.rewards_entropy) term.value -= c.entropy_coef * x.entropy;
  acc.sum[kLoss] += term.value;
  return Lane::select(live, term.grad, zero);
}

// The outputs of the pass from the totals of all blocks (kStatCount doubles).
template <class Real>
AREAL_HOST_DEVICE void finish(const PolicyLossArgs<Real>& args, const double* totals) {
  const double live = totals[kLiveTokens];
  const double normalizer = args.normalizer != nullptr ? *args.normalizer : live;
  *args.loss = static_cast<Real>(live > 0 ? totals[kLoss] / normalizer : 0.0);
  *args.scale = static_cast<Real>(live > 0 ? 1.0 / normalizer : 0.0);
  for (int i = 0; i < kStatCount; ++i) args.stats[i] = totals[i];
}

}  // namespace areal::loss
