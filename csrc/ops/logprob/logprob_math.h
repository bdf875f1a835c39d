// Row math of the logprob op, the same on CPU and GPU. A part of a row is summarised by a triple, relative to its
// own maximum; triples of parts merge into the triple of the row, in whatever order the caller fixes.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "ops/logprob/logprob.h"

namespace areal::logprob {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLn2 = 0.6931471805599453;

// With t_j = (x_j - max) log2(e) / temperature over the part's elements: sum = sum 2^t_j, weighted = sum 2^t_j t_j.
// A part without a finite element has max = -inf and sum = weighted = 0. NaN and +inf logits leave NaN in both sums
// (max itself never is NaN), and any merge keeps it.
template <class Real>
struct Partial {
  Real max;
  Real sum;
  Real weighted;
};

template <class Real>
AREAL_HOST_DEVICE Partial<Real> empty_partial() {
  return {-Real(INFINITY), Real(0), Real(0)};
}

// (x - max) * scale, where 2^result is 0 long before the bound: keeps -inf out of products with 0. NaN passes.
template <class Real>
AREAL_HOST_DEVICE Real shifted(Real x, Real max, Real scale) {
  if (x == max) return 0;  // both -inf, or both +inf
  const Real t = (x - max) * scale;
  return t < Real(-2000) ? Real(-2000) : t;
}

// scale = log2(e) / temperature.
template <class Real>
AREAL_HOST_DEVICE Partial<Real> merge(const Partial<Real>& a, const Partial<Real>& b, Real scale) {
  const Real max = a.max > b.max ? a.max : b.max;
  const Real ta = shifted(a.max, max, scale), tb = shifted(b.max, max, scale);
  const Real fa = std::exp2(ta), fb = std::exp2(tb);
  return {max, fa * a.sum + fb * b.sum, fa * (a.weighted + ta * a.sum) + fb * (b.weighted + tb * b.sum)};
}

// What a rank sends of its shard's triple, and the triple that arrives.
template <class Real>
AREAL_HOST_DEVICE LogprobPart<Real> to_part(const Partial<Real>& shard, Real label_logit) {
  return {shard.max, shard.sum - Real(1), shard.weighted, label_logit};
}
template <class Real>
AREAL_HOST_DEVICE Partial<double> from_part(const LogprobPart<Real>& part) {
  return {part.max, 1.0 + part.excess, part.weighted};
}

template <class Real>
struct RowResult {
  Real logprob;
  Real entropy;
  Real lse;
  Real log_sum;
};

// The row's outputs from its triple and the label's logit. The differences are taken before the logarithm is
// subtracted: logprob = (x_y - max) / temperature - ln(sum), never x_y / temperature - lse.
template <class Real>
AREAL_HOST_DEVICE RowResult<Real> finish_row(const Partial<Real>& row, Real label_logit, Real temperature) {
  if (row.weighted != row.weighted) return {row.weighted, row.weighted, row.weighted, row.weighted};
  if (row.max == -Real(INFINITY)) return {row.max, 0, row.max, row.max};
  const Real log_sum = std::log(row.sum);
  const Real entropy = log_sum - Real(kLn2) * row.weighted / row.sum;
  // Below 1e-30 it is rounding, or what is left of exponents that were clamped.
  return {(label_logit - row.max) / temperature - log_sum, entropy < Real(1e-30) ? Real(0) : entropy,
          row.max / temperature + log_sum, log_sum};
}

// The outputs of one row from the parts of all ranks, `stride` apart, in rank order. In double: with few ranks it
// costs nothing, and keeps what the parts hold.
template <class Real>
AREAL_HOST_DEVICE RowResult<double> merge_ranks(const LogprobPart<Real>* parts, int64_t ranks, int64_t stride,
                                                double temperature, double* row_max) {
  Partial<double> total = from_part(parts[0]);
  double label_logit = parts[0].label_logit;
  for (int64_t rank = 1; rank < ranks; ++rank) {
    total = merge(total, from_part(parts[rank * stride]), kLog2E / temperature);
    label_logit += parts[rank * stride].label_logit;
  }
  *row_max = total.max;
  return finish_row(total, label_logit, temperature);
}

template <class Real>
struct Upstream {
  Real logprob;
  Real entropy;
  Real lse;
};

// Gradient of one row: with t_j = log2 p_j = (x_j - max) scale - offset,
//   dL/dx_j = 2^t_j (constant + slope t_j)   for j != label; label_gradient() for j = label.
template <class Real>
struct RowGradient {
  bool zero;  // the whole row is exactly 0 and its logits need not be read
  Real max;
  Real scale;
  Real offset;
  Real constant;
  Real slope;
};

template <class Real>
AREAL_HOST_DEVICE RowGradient<Real> zero_row() {
  return {true, 0, 0, 0, 0, 0};
}

// A row without a finite logit, and a row whose upstream gradients are all 0, get an exactly zero gradient.
template <class Real>
AREAL_HOST_DEVICE RowGradient<Real> row_gradient(const Upstream<Real>& up, Real max, Real log_sum, Real entropy,
                                                 Real temperature) {
  const bool no_finite_logit = log_sum == -Real(INFINITY);
  if (no_finite_logit || (up.logprob == 0 && up.entropy == 0 && up.lse == 0)) return zero_row<Real>();
  const Real inverse = Real(1) / temperature;
  return {false,
          max,
          Real(kLog2E) / temperature,
          log_sum * Real(kLog2E),
          inverse * (up.lse - up.logprob - up.entropy * entropy),
          -inverse * Real(kLn2) * up.entropy};
}

// The label's p - 1 is taken as expm1(logprob): no cancellation when p is near 1.
template <class Real>
AREAL_HOST_DEVICE Real label_gradient(const Upstream<Real>& up, Real logprob, Real entropy, Real temperature) {
  const Real p = std::exp(logprob);
  const Real spread = p == 0 ? Real(0) : p * (up.lse - up.entropy * (logprob + entropy));
  return (spread - up.logprob * std::expm1(logprob)) / temperature;
}

}  // namespace areal::logprob
