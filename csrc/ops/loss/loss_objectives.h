// The policy term -w A f(u) of every Objective.
#pragma once

#include "ops/loss/loss_lanes.h"

namespace areal::loss {

// f of the header for kPpo, kSapo and kReinforce as a function of u and the sign of A, and d f / d log u; 1 in `low` or
// `high` where u is held at that bound.
template <class Value>
struct Response {
  Value value, slope, low, high;
};

// -w A f with f = u held below ratio_high (A >= 0) or between ratio_low and dual_clip (A < 0).
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Response<Value> clipped_response(const LossConstants<Lane>& c, Value u, Value advantage) {
  const Value zero = Lane::splat(0), one = Lane::splat(1);
  const Value low = Lane::select(advantage >= zero, zero, c.ratio_low);
  const Value high = Lane::select(advantage >= zero, c.ratio_high, c.dual_clip);
  const Value held_low = Lane::select(u < low, one, zero);
  const Value held_high = Lane::select(u > high, one, zero);
  const Value held = Lane::select(held_high > zero, high, Lane::select(held_low > zero, low, u));
  return {held, Lane::select(held_low + held_high > zero, zero, u), held_low, held_high};
}

// With e = exp(-tau (u - 1)): sigmoid = 1 / (1 + e), and its derivative is e sigmoid^2.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Response<Value> gated_response(const LossConstants<Lane>& c, Value u, Value advantage) {
  const Value zero = Lane::splat(0), one = Lane::splat(1), four = Lane::splat(4), largest = Lane::splat(80);
  const Value tau = Lane::select(advantage > zero, c.tau_positive, c.tau_negative);
  Value x = tau * (u - one);
  x = Lane::select(x > largest, largest, Lane::select(x < -largest, -largest, x));
  const Value e = Lane::exp_terms(-x).exp, sigmoid = one / (one + e);
  return {four / tau * sigmoid, four * u * e * sigmoid * sigmoid, zero, zero};
}

template <Objective kObjective, class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Response<Value> response(const LossConstants<Lane>& c, Value u, Value advantage) {
  if constexpr (kObjective == Objective::kPpo) return clipped_response<Lane>(c, u, advantage);
  if constexpr (kObjective == Objective::kSapo) return gated_response<Lane>(c, u, advantage);
  return {u, u, Lane::splat(0), Lane::splat(0)};
}

// The l of kGmpo: a log-ratio held below log_ratio_high (A >= 0) or above log_ratio_low (A < 0), and the factor its
// gradient carries.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Response<Value> held_log_ratio(const LossConstants<Lane>& c, const LogRatio<Lane>& l,
                                                 Value advantage) {
  const Value zero = Lane::splat(0), one = Lane::splat(1);
  const Value low = Lane::select(advantage >= zero, zero, Lane::select(l.value < c.log_ratio_low, one, zero));
  const Value high = Lane::select(advantage >= zero, Lane::select(l.value > c.log_ratio_high, one, zero), zero);
  const Value held = Lane::select(high > zero, c.log_ratio_high, Lane::select(low > zero, c.log_ratio_low, l.value));
  return {held, Lane::select(low + high > zero, zero, l.slope), low, high};
}

// weighted logprob, 0 for a weight of 0 even if the logprob is -inf.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value weighted_logprob(Value weighted, Value logprob) {
  return Lane::select(weighted == Lane::splat(0), Lane::splat(0), weighted * logprob);
}

// x, or 0 for a masked token of a sequence with a ratio of its own. (Where the ratio is the token's, masked tokens have
// ratio 1 and are not held.)
template <class Variant, class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value unless_masked(const TokenInputs<Lane>& x, Value value) {
  return Variant::kSequenceRatio ? Lane::select(x.live, value, Lane::splat(0)) : value;
}

// -w A f(u).
template <class Variant, class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Term<Value> policy_term(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                          const SequenceTerms<Lane>& s, const TokenRatio<Lane>& token, Value advantage,
                                          Value weight, Statistics& acc) {
  constexpr Objective kObjective = Variant::kObjective;
  const Value zero = Lane::splat(0), one = Lane::splat(1), weighted = weight * advantage;
  const Value u = Variant::kSequenceRatio ? s.ratio : token.exp.exp;
  Term<Value> term;
  Value low = zero, high = zero;
  if constexpr (kObjective == Objective::kCispo) {
    low = Lane::select(u < c.ratio_low, one, zero);
    high = Lane::select(u > c.ratio_high, one, zero);
    const Value bounded = Lane::select(low > zero, c.ratio_low, Lane::select(high > zero, c.ratio_high, u));
    term = {-weighted_logprob<Lane>(weighted * bounded, x.logprob), -(weighted * bounded)};
  } else if constexpr (kObjective == Objective::kGmpo) {
    const Response<Value> l = held_log_ratio<Lane>(c, token.log, advantage);
    low = l.low;
    high = l.high;
    term = {-(weighted * u), s.gradient * l.slope};
  } else {
    const Response<Value> f = response<kObjective, Lane>(c, u, advantage);
    low = f.low;
    high = f.high;
    term.value = -(weighted * f.value);
    term.grad = Variant::kSequenceRatio ? s.gradient * token.log.slope : -(weighted * f.slope * token.log.slope);
  }
  if (kObjective == Objective::kReinforce && !c.has_ratio) {
    term = {-weighted_logprob<Lane>(weighted, x.logprob), -weighted};
  }
  if constexpr (kObjective == Objective::kPpo) {
    acc.add(kDualClip, unless_masked<Variant>(x, Lane::select(advantage < zero, high, zero)));
    high = Lane::select(advantage > zero, high, zero);
  }
  acc.add(kClipLow, unless_masked<Variant>(x, low));
  acc.add(kClipHigh, unless_masked<Variant>(x, high));
  acc.add(kRatio, Lane::select(x.live, u, zero));
  raise_max<Lane>(acc, kRatioMax, Lane::select(x.live, u, zero));
  raise_max<Lane>(acc, kNegativeRatioMin, Lane::select(x.live, -u, Lane::splat(-kRatioBound)));
  return term;
}

}  // namespace areal::loss
