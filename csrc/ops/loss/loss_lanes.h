// What the math of the policy loss works on. A Lane says what one step takes: ScalarLane<float> on the GPU,
// ScalarLane<double> for fp64, a whole SIMD vector in the CPU kernel. It provides Value, Mask, splat(double),
// select(mask, yes, no) and exp_terms(Value).
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "base/host_device.h"
#include "ops/loss/loss_stats.h"

namespace areal::loss {

inline constexpr double kMaxLogRatio = 20.0;

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

// The parts of PolicyLossParams that change the code of the inner loop.
template <Objective kObjectiveOfVariant, bool kSequenceRatioOfVariant>
struct Variant {
  static constexpr Objective kObjective = kObjectiveOfVariant;
  static constexpr bool kSequenceRatio = kSequenceRatioOfVariant;  // u is SequenceTerms::ratio
};

// Calls fn(Variant<...>{}) with the variant of the parameters.
template <class Fn>
AREAL_HOST_DEVICE void with_variant(const PolicyLossParams& p, const Fn& fn) {
  const bool sequence = p.ratio_level == RatioLevel::kSequence || p.ratio_level == RatioLevel::kSequenceProduct;
  switch (p.objective) {
    case Objective::kPpo:
      return sequence ? fn(Variant<Objective::kPpo, true>{}) : fn(Variant<Objective::kPpo, false>{});
    case Objective::kCispo:
      return sequence ? fn(Variant<Objective::kCispo, true>{}) : fn(Variant<Objective::kCispo, false>{});
    case Objective::kSapo:
      return sequence ? fn(Variant<Objective::kSapo, true>{}) : fn(Variant<Objective::kSapo, false>{});
    case Objective::kGmpo:
      return fn(Variant<Objective::kGmpo, true>{});
    case Objective::kReinforce:
      return sequence ? fn(Variant<Objective::kReinforce, true>{}) : fn(Variant<Objective::kReinforce, false>{});
  }
}

template <class Lane>
struct TokenInputs {
  using Value = typename Lane::Value;
  Value logprob, proximal, advantage, behavior, reference, entropy, teacher;
  typename Lane::Mask live, keep;  // keep counts where LossConstants::has_keep_mask
};

// SequenceValues in lanes. Without sequences: {0, 0, 0, 1}.
template <class Lane>
struct SequenceTerms {
  typename Lane::Value ratio, weight, gradient, token_weight;
};

// The parameters, and which inputs there are, in lanes.
template <class Lane>
struct LossConstants {
  using Value = typename Lane::Value;
  Value ratio_low, ratio_high, log_ratio_low, log_ratio_high, dual_clip, tau_positive, tau_negative;
  Value behavior_low, behavior_cap, kl_coef, entropy_coef, distill_coef, max_log_ratio;
  bool has_behavior, has_reference, has_entropy, has_teacher, has_keep_mask;
  bool masks_weights, sequence_weights, has_ratio;
  bool penalises_kl, rewards_entropy;  // false with a coefficient of 0: the input then feeds statistics only
  KlEstimator kl_estimator;
};

template <class Lane, class Real>
AREAL_HOST_DEVICE LossConstants<Lane> loss_constants(const PolicyLossArgs<Real>& args) {
  const PolicyLossParams& p = args.params;
  LossConstants<Lane> c;
  c.ratio_low = Lane::splat(p.ratio_low);
  c.ratio_high = Lane::splat(p.ratio_high);
  c.log_ratio_low = Lane::splat(p.ratio_low > 0 ? std::log(p.ratio_low) : -kMaxLogRatio);
  c.log_ratio_high = Lane::splat(std::log(p.ratio_high));
  c.dual_clip = Lane::splat(p.dual_clip);
  c.tau_positive = Lane::splat(p.tau_positive);
  c.tau_negative = Lane::splat(p.tau_negative);
  c.behavior_low = Lane::splat(p.behavior_low);
  c.behavior_cap = Lane::splat(p.behavior_cap);
  c.kl_coef = Lane::splat(p.kl_coef);
  c.entropy_coef = Lane::splat(p.entropy_coef);
  c.distill_coef = Lane::splat(p.distill_coef);
  c.max_log_ratio = Lane::splat(kMaxLogRatio);
  c.has_behavior = args.behavior_logprobs != nullptr;
  c.has_reference = args.ref_logprobs != nullptr;
  c.has_entropy = args.entropy != nullptr;
  c.has_teacher = args.teacher_logprobs != nullptr;
  c.has_keep_mask = args.keep_mask != nullptr;
  c.masks_weights = p.behavior_mode == BehaviorMode::kMask;
  c.sequence_weights = p.behavior_level != BehaviorLevel::kToken;
  c.has_ratio = p.ratio_level != RatioLevel::kOff;
  c.penalises_kl = c.has_reference && p.kl_coef != 0;
  c.rewards_entropy = c.has_entropy && p.entropy_coef != 0;
  c.kl_estimator = p.kl_estimator;
  return c;
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

// The token's log-ratio to the proximal policy, and its exp.
template <class Lane>
struct TokenRatio {
  LogRatio<Lane> log;
  ExpTerms<typename Lane::Value> exp;
};

// A term of the loss and its gradient with respect to the logprob.
template <class Value>
struct Term {
  Value value;
  Value grad;
};

}  // namespace areal::loss
