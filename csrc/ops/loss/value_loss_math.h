// Per-token math of the value loss, shared by CPU and CUDA.
#pragma once

#include <cmath>

#include "ops/loss/value_loss.h"

namespace areal::loss {

template <class Real>
struct ValueBounds {
  Real clip, huber_delta;
};

template <class Real>
struct ValueTerm {
  Real term, grad;
  bool clipped;
};

// l of the header.
template <class Real>
AREAL_HOST_DEVICE Real error_loss(Real error, Real delta) {
  const Real size = std::fabs(error);
  return size <= delta ? Real(0.5) * error * error : delta * (size - Real(0.5) * delta);
}

// Comparisons are written so that NaN takes the unclipped branch, and shows.
template <class Real>
AREAL_HOST_DEVICE ValueTerm<Real> value_term(const ValueBounds<Real>& bounds, Real value, Real old_value, Real target) {
  const Real step = value - old_value;
  const Real raised = step < -bounds.clip ? -bounds.clip : step;
  const Real bounded = raised > bounds.clip ? bounds.clip : raised;
  const Real error = value - target;
  const Real free = error_loss(error, bounds.huber_delta);
  const Real held = error_loss(old_value + bounded - target, bounds.huber_delta);
  const bool clipped = bounded != step && held > free;
  const Real lowered = error > bounds.huber_delta ? bounds.huber_delta : error;
  const Real slope = lowered < -bounds.huber_delta ? -bounds.huber_delta : lowered;
  return {clipped ? held : free, clipped ? Real(0) : slope, clipped};
}

// The sums of one live token (0 in every statistic for a masked one).
template <class Real>
AREAL_HOST_DEVICE void value_stats(const ValueTerm<Real>& term, Real value, Real target,
                                   double (&sums)[kValueStatCount]) {
  const double wide_target = static_cast<double>(target), error = wide_target - static_cast<double>(value);
  sums[kValueLiveTokens] += 1;
  sums[kValueTerm] += static_cast<double>(term.term);
  sums[kValueClipped] += term.clipped;
  sums[kValueSum] += static_cast<double>(value);
  sums[kReturnSum] += wide_target;
  sums[kReturnSquare] += wide_target * wide_target;
  sums[kErrorSum] += error;
  sums[kErrorSquare] += error * error;
}

// The outputs of the pass from the totals of all blocks.
template <class Real>
AREAL_HOST_DEVICE void finish(const ValueLossArgs<Real>& args, const double* totals) {
  const double live = totals[kValueLiveTokens];
  const double normalizer = args.normalizer != nullptr ? *args.normalizer : live;
  *args.loss = static_cast<Real>(live > 0 ? totals[kValueTerm] / normalizer : 0.0);
  *args.scale = static_cast<Real>(live > 0 ? 1.0 / normalizer : 0.0);
  for (int i = 0; i < kValueStatCount; ++i) args.stats[i] = totals[i];
}

}  // namespace areal::loss
