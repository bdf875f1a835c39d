// What the tokens of a sequence add up to, and the SequenceValues that follow: the ratio or the weight that they share,
// and the gradient of the sequence's policy terms with respect to a logprob.
//
// With a ratio per sequence, the terms are sum_t -w_t A_t f(u, sign A_t), and f knows A by its sign alone. So
//   d / d log u = -(f'(u, +) sum of w_t A_t over A_t >= 0  +  f'(u, -) sum over A_t < 0)
// and two sums per sequence give the gradient before any token is looked at again.
#pragma once

#include "ops/loss/loss_math.h"

namespace areal::loss {

// Of tokens without cu_seqlens.
AREAL_HOST_DEVICE SequenceValues no_sequence() { return {1, 1, 0, 1}; }

template <class Value>
struct SequenceSums {
  Value live, log_ratio, log_weight, positive, negative;  // positive, negative: sums of w A by the sign of A
};

template <class Variant, class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE void accumulate_sequence(const LossConstants<Lane>& c, const TokenInputs<Lane>& x,
                                           SequenceSums<Value>& sums) {
  const Value zero = Lane::splat(0), one = Lane::splat(1);
  NoStatistics<Value> none = {zero};
  sums.live += Lane::select(x.live, one, zero);
  Value weight = one;
  if (c.has_behavior && c.sequence_weights) {
    sums.log_weight += log_ratio<Lane>(x.proximal, x.behavior, c.max_log_ratio).value;
  }
  if constexpr (Variant::kSequenceRatio) {
    if (!c.sequence_weights) weight = behavior_weight<Lane>(c, x, zero, none);
    const Value advantage = shaped_advantage<Lane>(c, x, none);
    const LogRatio<Lane> l = log_ratio<Lane>(x.logprob, x.proximal, c.max_log_ratio);
    sums.log_ratio += Variant::kObjective == Objective::kGmpo ? held_log_ratio<Lane>(c, l, advantage).value : l.value;
    const Value weighted = Lane::select(x.live, kept_weight<Lane>(c, x, weight, none) * advantage, zero);
    sums.positive += Lane::select(advantage >= zero, weighted, zero);
    sums.negative += Lane::select(advantage >= zero, zero, weighted);
  }
}

// x clamped to the bound of log-ratios, its exp, and the factor that its gradient carries.
AREAL_HOST_DEVICE TokenRatio<ScalarLane<double>> bounded_ratio(double x) {
  TokenRatio<ScalarLane<double>> ratio;
  ratio.log = log_ratio<ScalarLane<double>>(x, 0.0, kMaxLogRatio);
  ratio.exp = ScalarLane<double>::exp_terms(ratio.log.value);
  return ratio;
}

template <class Variant, class Real>
AREAL_HOST_DEVICE SequenceValues sequence_values(const PolicyLossArgs<Real>& args, const SequenceSums<double>& sums) {
  using Lane = ScalarLane<double>;
  const PolicyLossParams& p = args.params;
  if (!(sums.live > 0)) return {1, 1, 0, 0};
  const LossConstants<Lane> c = loss_constants<Lane>(args);
  const double mean = 1 / sums.live;
  SequenceValues values;
  values.token_weight = p.aggregation == Aggregation::kSequenceMeanTokenMean ? mean : 1.0;
  values.weight =
      bounded_ratio(p.behavior_level == BehaviorLevel::kGeometric ? sums.log_weight * mean : sums.log_weight).exp.exp;
  const double per_token = p.ratio_level == RatioLevel::kSequenceProduct ? 1.0 : mean;  // d log u / d logprob
  const TokenRatio<Lane> u = bounded_ratio(sums.log_ratio * per_token);
  values.ratio = u.exp.exp;
  const double positive = response<Variant::kObjective, Lane>(c, values.ratio, 1.0).slope * sums.positive;
  const double negative = response<Variant::kObjective, Lane>(c, values.ratio, -1.0).slope * sums.negative;
  const double weight = c.sequence_weights ? bounded_weight<Lane>(c, values.weight).weight : 1.0;
  values.gradient = -weight * (positive + negative) * per_token * u.log.slope;
  return values;
}

// Whether SequenceSums holds more than `live`.
template <class Variant, class Lane>
AREAL_HOST_DEVICE bool sums_logprobs(const LossConstants<Lane>& c) {
  return Variant::kSequenceRatio || (c.has_behavior && c.sequence_weights);
}

// The sequence among [first, last] that holds token t: the last that begins at or before it. Empty ones hold none.
AREAL_HOST_DEVICE int64_t sequence_at(const int64_t* cu_seqlens, int64_t first, int64_t last, int64_t t) {
  while (first < last) {
    const int64_t middle = first + (last - first + 1) / 2;
    if (cu_seqlens[middle] <= t) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

template <class Lane>
AREAL_HOST_DEVICE SequenceTerms<Lane> sequence_terms(const SequenceValues& v) {
  return {Lane::splat(v.ratio), Lane::splat(v.weight), Lane::splat(v.gradient), Lane::splat(v.token_weight)};
}

}  // namespace areal::loss
