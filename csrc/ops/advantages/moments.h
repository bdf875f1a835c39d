// Mean and variance of the live numbers of a tensor, over a batch that ranks may share, and the numbers normalised by
// them. Three passes, between which the caller adds up the partial results (and those of other ranks): count and range,
// sum, sum of squares about the mean. Sums are exact (exact_sum.h), so nothing depends on how the batch was split.
// Masked numbers are never read.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "ops/advantages/exact_sum.h"

namespace areal::advantages {

// Partial results of a pass, whatever the device: what a tensor is cut into.
inline constexpr int64_t kParts = 128;

struct Range {
  double count;
  double min;  // infinity when count = 0
  double max;  // -infinity
};

template <class Real>
struct MomentArgs {
  int64_t count;
  const Real* numbers;    // [count]
  const bool* loss_mask;  // [count]; nullptr: all are live
};

template <class Real>
void ranges_cpu(const MomentArgs<Real>& args, Range* parts);
// range: of the whole batch. mean: nullptr for the sum of the numbers, else that of (x - mean)^2.
template <class Real>
void sums_cpu(const MomentArgs<Real>& args, const Range* range, const double* mean, ExactSum* parts);
// out = (x - mean) scale; 0 where masked.
template <class Real>
void normalize_cpu(const MomentArgs<Real>& args, const double* mean, const double* scale, Real* out);

}  // namespace areal::advantages

namespace areal {
// Of the numbers [begin, end).
AREAL_ISA_DECLARE(advantages::Range moment_range(const advantages::MomentArgs<float>& args, int64_t begin, int64_t end))
AREAL_ISA_DECLARE(advantages::ExactSum moment_sum(const advantages::MomentArgs<float>& args,
                                                  const advantages::SumGrid& grid, const double* mean, int64_t begin,
                                                  int64_t end))
AREAL_ISA_DECLARE(void normalize_range(const advantages::MomentArgs<float>& args, double mean, double scale,
                                       int64_t begin, int64_t end, float* out))
}  // namespace areal

namespace areal::cuda {
// stream is a cudaStream_t; no synchronisation.
template <class Real>
void ranges(const advantages::MomentArgs<Real>& args, advantages::Range* parts, void* stream);
template <class Real>
void sums(const advantages::MomentArgs<Real>& args, const advantages::Range* range, const double* mean,
          advantages::ExactSum* parts, void* stream);
template <class Real>
void normalize(const advantages::MomentArgs<Real>& args, const double* mean, const double* scale, Real* out,
               void* stream);
}  // namespace areal::cuda
