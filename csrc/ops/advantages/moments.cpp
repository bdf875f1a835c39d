#include "ops/advantages/moments.h"

#include <algorithm>

#include "base/threads.h"
#include "ops/advantages/moments_math.h"

namespace areal {
namespace {

using advantages::ExactSum;
using advantages::MomentArgs;
using advantages::Range;
using advantages::SumGrid;

Range range_of(const MomentArgs<float>& args, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(moment_range(args, begin, end));
}
Range range_of(const MomentArgs<double>& args, int64_t begin, int64_t end) {
  Range range = advantages::no_range();
  for (int64_t i = begin; i < end; ++i) {
    if (is_live(args, i)) add(args.numbers[i], range);
  }
  return range;
}

ExactSum sum_of(const MomentArgs<float>& args, const SumGrid& grid, const double* mean, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(moment_sum(args, grid, mean, begin, end));
}
ExactSum sum_of(const MomentArgs<double>& args, const SumGrid& grid, const double* mean, int64_t begin, int64_t end) {
  ExactSum sum;
  for (int64_t i = begin; i < end; ++i) {
    if (is_live(args, i)) add(term(args, i, mean), grid, sum);
  }
  return sum;
}

void normalize(const MomentArgs<float>& args, double mean, double scale, int64_t begin, int64_t end, float* out) {
  AREAL_ISA_DISPATCH(normalize_range(args, mean, scale, begin, end, out));
}
void normalize(const MomentArgs<double>& args, double mean, double scale, int64_t begin, int64_t end, double* out) {
  for (int64_t i = begin; i < end; ++i) out[i] = normalized(args, i, mean, scale);
}

// fn(part, begin, end) on each part of the tensor.
template <class Fn>
void for_each_part(int64_t count, const Fn& fn) {
  constexpr int64_t kParts = advantages::kParts, kGrainNumbers = 16384;
  const int64_t size = (count + kParts - 1) / kParts;
  parallel_for(0, kParts, kGrainNumbers / (size + 1) + 1, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) fn(p, std::min(p * size, count), std::min((p + 1) * size, count));
  });
}

}  // namespace
}  // namespace areal

namespace areal::advantages {

template <class Real>
void ranges_cpu(const MomentArgs<Real>& args, Range* parts) {
  for_each_part(args.count, [&](int64_t p, int64_t begin, int64_t end) { parts[p] = range_of(args, begin, end); });
}

template <class Real>
void sums_cpu(const MomentArgs<Real>& args, const Range* range, const double* mean, ExactSum* parts) {
  const SumGrid grid = grid_of(*range, mean != nullptr);
  for_each_part(args.count,
                [&](int64_t p, int64_t begin, int64_t end) { parts[p] = sum_of(args, grid, mean, begin, end); });
}

template <class Real>
void normalize_cpu(const MomentArgs<Real>& args, const double* mean, const double* scale, Real* out) {
  for_each_part(args.count,
                [&](int64_t, int64_t begin, int64_t end) { normalize(args, *mean, *scale, begin, end, out); });
}

template void ranges_cpu(const MomentArgs<float>&, Range*);
template void ranges_cpu(const MomentArgs<double>&, Range*);
template void sums_cpu(const MomentArgs<float>&, const Range*, const double*, ExactSum*);
template void sums_cpu(const MomentArgs<double>&, const Range*, const double*, ExactSum*);
template void normalize_cpu(const MomentArgs<float>&, const double*, const double*, float*);
template void normalize_cpu(const MomentArgs<double>&, const double*, const double*, double*);

}  // namespace areal::advantages
