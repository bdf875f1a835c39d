// Per-token math of the value loss, shared by CPU and CUDA.
#pragma once

#include <cmath>

#include "ops/loss/loss_lanes.h"
#include "ops/loss/value_loss.h"

namespace areal::loss {

template <class Value>
struct ValueBounds {
  Value clip, huber_delta;
};

template <class Value>
struct ValueTerm {
  Value term, grad, clipped;  // clipped: 1 or 0
};

// l of the header.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value error_loss(Value error, Value delta) {
  const Value half = Lane::splat(0.5), size = Lane::select(error < Lane::splat(0), -error, error);
  return Lane::select(size > delta, delta * (size - half * delta), half * error * error);
}

template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE Value bounded(Value x, Value bound) {
  const Value raised = Lane::select(x < -bound, -bound, x);
  return Lane::select(raised > bound, bound, raised);
}

// Lane: as in loss_lanes.h. Comparisons are written so that NaN takes the unclipped branch, and shows.
template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE ValueTerm<Value> value_term(const ValueBounds<Value>& bounds, Value value, Value old_value,
                                              Value target) {
  const Value zero = Lane::splat(0), one = Lane::splat(1), error = value - target;
  const Value step = value - old_value, allowed = bounded<Lane>(step, bounds.clip);
  const Value free = error_loss<Lane>(error, bounds.huber_delta);
  const Value held = error_loss<Lane>(old_value + allowed - target, bounds.huber_delta);
  const Value moved = Lane::select(allowed == step, zero, one);
  const Value clipped = Lane::select(held > free, moved, zero);
  return {Lane::select(clipped > zero, held, free),
          Lane::select(clipped > zero, zero, bounded<Lane>(error, bounds.huber_delta)), clipped};
}

// Adds a live token.
template <class Real>
AREAL_HOST_DEVICE void value_stats(const ValueTerm<Real>& term, Real value, Real target,
                                   double (&sums)[kValueStatCount]) {
  const double wide_target = static_cast<double>(target), error = wide_target - static_cast<double>(value);
  sums[kValueLiveTokens] += 1;
  sums[kValueTerm] += static_cast<double>(term.term);
  sums[kValueClipped] += static_cast<double>(term.clipped);
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
