// Per-token math of the policy loss, written once for CPU and GPU: token_loss turns one token's inputs into
// {term, grad_logprob, grad_entropy}. Masked tokens enter as zeros, whatever memory held for them: their differences
// are then 0 and their ratios 1, and only the sums that a 1 would change need the mask.
#pragma once

#include "ops/loss/loss_objectives.h"

namespace areal::loss {

// A of the header.
template <class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value shaped_advantage(const LossConstants<Lane>& c, const TokenInputs<Lane>& x, Statistics& acc) {
  if (!c.has_teacher) return x.advantage;
  const Value y = log_ratio<Lane>(x.teacher, x.proximal, c.max_log_ratio).value;
  acc.add(kKlProximalTeacherK1, -y);
  acc.add(kKlProximalTeacherK3, Lane::exp_terms(y).k3);
  return x.advantage + c.distill_coef * y;
}

// A weight within its bounds, and 1 where it was capped or masked.
template <class Value>
struct BoundedWeight {
  Value weight, moved;
};

template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE BoundedWeight<Value> bounded_weight(const LossConstants<Lane>& c, Value raw) {
  const Value zero = Lane::splat(0), one = Lane::splat(1);
  const Value above = Lane::select(raw > c.behavior_cap, one, zero);
  if (!c.masks_weights) return {Lane::select(above > zero, c.behavior_cap, raw), above};
  const Value outside = Lane::select(raw < c.behavior_low, one, above);
  return {Lane::select(outside > zero, zero, raw), outside};
}

// w of the header.
template <class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value behavior_weight(const LossConstants<Lane>& c, const TokenInputs<Lane>& x, Value sequence_weight,
                                        Statistics& acc) {
  const Value zero = Lane::splat(0);
  BoundedWeight<Value> w = {Lane::splat(1), zero};
  Value raw = w.weight;
  if (c.has_behavior) {
    const Value log_w = log_ratio<Lane>(x.proximal, x.behavior, c.max_log_ratio).value;
    const ExpTerms<Value> token = Lane::exp_terms(log_w);
    raw = c.sequence_weights ? sequence_weight : token.exp;
    w = bounded_weight<Lane>(c, raw);
    const Value moved = Lane::select(x.live, w.moved, zero);
    if (c.masks_weights) {
      acc.add(kBehaviorMasked, moved);
    } else {
      acc.add(kBehaviorCapped, moved);
    }
    acc.add(kKlBehaviorProximalK1, -log_w);
    acc.add(kKlBehaviorProximalK3, token.k3);
  }
  raw = Lane::select(x.live, raw, zero);
  acc.add(kBehaviorWeight, raw);
  raise_max<Lane>(acc, kBehaviorWeightMax, raw);
  return Lane::select(x.live, w.weight, zero);
}

// w where the policy term of the token is kept, else 0.
template <class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value kept_weight(const LossConstants<Lane>& c, const TokenInputs<Lane>& x, Value weight,
                                    Statistics& acc) {
  const Value zero = Lane::splat(0);
  if (c.has_keep_mask) {
    acc.add(kDropped, Lane::select(x.live, Lane::select(x.keep, zero, Lane::splat(1)), zero));
    weight = Lane::select(x.keep, weight, zero);
  }
  acc.add(kAppliedWeight, weight);
  acc.add(kAppliedWeightSquare, weight * weight);
  return weight;
}

// kl_coef KL(current || reference), with y = log reference - log current; weight: w of the header.
template <class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Term<Value> kl_term(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                      const TokenRatio<Lane>& token, Value weight, Statistics& acc) {
  const LogRatio<Lane> y = log_ratio<Lane>(x.reference, x.logprob, c.max_log_ratio);
  const ExpTerms<Value> e = Lane::exp_terms(y.value);
  acc.add(kKlCurrentReferenceK1, -y.value);
  acc.add(kKlCurrentReferenceK3, e.k3);
  if (!c.penalises_kl) return {Lane::splat(0), Lane::splat(0)};
  switch (c.kl_estimator) {
    case KlEstimator::kK1:
      return {-c.kl_coef * y.value, c.kl_coef * y.slope};
    case KlEstimator::kK2:
      return {c.kl_coef * y.value * y.value * Lane::splat(0.5), -c.kl_coef * y.value * y.slope};
    case KlEstimator::kK3:
      break;
    case KlEstimator::kK3Unbiased: {  // d (u k3) = u (k3 - expm1), which is -u y but for the bounds
      const Value factor = c.kl_coef * weight * token.exp.exp;
      const Value apart = token.log.slope * e.k3 - y.slope * e.expm1;
      return {factor * e.k3, factor * Lane::select(token.log.slope == y.slope, -y.slope * y.value, apart)};
    }
  }
  return {c.kl_coef * e.k3, -c.kl_coef * e.expm1 * y.slope};
}

// A token's part of the sum of terms, weighted by token_weight, and its derivatives; zeros for a masked token. Times
// 1 / normalizer they are parts of the loss and its gradient.
template <class Value>
struct TokenLoss {
  Value term, grad_logprob, grad_entropy;
};

// Statistics: Accumulator<Value>, or NoStatistics<Value> where only the loss is wanted.
template <class Variant, class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE TokenLoss<Value> token_loss(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                              const SequenceTerms<Lane>& s, Statistics& acc) {
  const Value zero = Lane::splat(0);
  acc.add(kLiveTokens, Lane::select(x.live, Lane::splat(1), zero));
  TokenRatio<Lane> token;
  token.log = log_ratio<Lane>(x.logprob, x.proximal, c.max_log_ratio);
  token.exp = Lane::exp_terms(token.log.value);
  acc.add(kKlProximalCurrentK1, -token.log.value);
  acc.add(kKlProximalCurrentK3, token.exp.k3);

  const Value advantage = shaped_advantage<Lane>(c, x, acc);
  const Value weight = behavior_weight<Lane>(c, x, s.weight, acc);
  const Value policy_weight = kept_weight<Lane>(c, x, weight, acc);
  Term<Value> term = policy_term<Variant, Lane>(c, x, s, token, advantage, policy_weight, acc);
  acc.add(kPolicyLoss, s.token_weight * term.value);
  Value grad_entropy = zero;
  if (c.has_reference) {
    const Term<Value> kl = kl_term<Lane>(c, x, token, weight, acc);
    term.value += kl.value;
    term.grad += kl.grad;
  }
  if (c.has_entropy) acc.add(kEntropy, x.entropy);
  if (c.rewards_entropy) {
    term.value -= c.entropy_coef * x.entropy;
    grad_entropy = Lane::select(x.live, -(c.entropy_coef * s.token_weight), zero);
  }
  term.value = s.token_weight * term.value;
  acc.add(kLoss, term.value);
  return {term.value, Lane::select(x.live, s.token_weight * term.grad, zero), grad_entropy};
}

// The outputs of the pass from the totals of all blocks (kStatCount doubles, kLossWeight still to be set).
template <class Real>
AREAL_HOST_DEVICE void finish(const PolicyLossArgs<Real>& args, double* totals) {
  const Aggregation aggregation = args.params.aggregation;
  const bool by_sequence =
      aggregation == Aggregation::kSequenceMeanTokenSum || aggregation == Aggregation::kSequenceMeanTokenMean;
  totals[kLossWeight] = totals[by_sequence ? kLiveSequences : kLiveTokens];
  const bool any = totals[kLiveTokens] > 0;
  const double normalizer = args.normalizer != nullptr ? *args.normalizer : totals[kLossWeight];
  *args.loss = static_cast<Real>(any ? totals[kLoss] / normalizer : 0.0);
  *args.scale = static_cast<Real>(any ? 1.0 / normalizer : 0.0);
  for (int i = 0; i < kStatCount; ++i) args.stats[i] = totals[i];
}

}  // namespace areal::loss
