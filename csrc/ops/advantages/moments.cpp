#include "ops/advantages/moments.h"

#include <algorithm>

#include "base/threads.h"
#include "ops/advantages/moments_math.h"

namespace areal::advantages {
namespace {

constexpr int64_t kGrainParts = 4;

// fn(part, begin, end) on each part of the tensor.
template <class Fn>
void for_each_part(int64_t count, const Fn& fn) {
  const int64_t size = (count + kParts - 1) / kParts;
  parallel_for(0, kParts, kGrainParts, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) fn(p, std::min(p * size, count), std::min((p + 1) * size, count));
  });
}

}  // namespace

template <class Real>
void ranges_cpu(const MomentArgs<Real>& args, Range* parts) {
  for_each_part(args.count, [&](int64_t p, int64_t begin, int64_t end) {
    Range range = no_range();
    for (int64_t i = begin; i < end; ++i) {
      if (is_live(args, i)) add(static_cast<double>(args.numbers[i]), range);
    }
    parts[p] = range;
  });
}

template <class Real>
void sums_cpu(const MomentArgs<Real>& args, const Range* range, const double* mean, ExactSum* parts) {
  const SumGrid grid = grid_of(*range, mean != nullptr);
  for_each_part(args.count, [&](int64_t p, int64_t begin, int64_t end) {
    ExactSum sum;
    for (int64_t i = begin; i < end; ++i) {
      if (is_live(args, i)) add(term(args, i, mean), grid, sum);
    }
    parts[p] = sum;
  });
}

template <class Real>
void normalize_cpu(const MomentArgs<Real>& args, const double* mean, const double* scale, Real* out) {
  for_each_part(args.count, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = normalized(args, i, *mean, *scale);
  });
}

template void ranges_cpu(const MomentArgs<float>&, Range*);
template void ranges_cpu(const MomentArgs<double>&, Range*);
template void sums_cpu(const MomentArgs<float>&, const Range*, const double*, ExactSum*);
template void sums_cpu(const MomentArgs<double>&, const Range*, const double*, ExactSum*);
template void normalize_cpu(const MomentArgs<float>&, const double*, const double*, float*);
template void normalize_cpu(const MomentArgs<double>&, const double*, const double*, double*);

}  // namespace areal::advantages
