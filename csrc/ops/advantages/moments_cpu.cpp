// The passes of moments.h over float numbers, a vector at a time.
#include "ops/advantages/moments_math.h"
#include "ops/advantages/vector_tokens.h"

namespace areal::AREAL_ISA {
namespace {

using advantages::ExactSum;
using advantages::MomentArgs;
using advantages::Range;
using advantages::SumGrid;

AREAL_INLINE VecI live_at(const MomentArgs<float>& a, int64_t i, int64_t count) {
  return load_live(a.loss_mask != nullptr ? a.loss_mask + i : nullptr, count);
}

// exact_sum.h for half of the lanes.
struct HalfSum {
  VecD coarse{}, fine{};

  AREAL_INLINE void add(VecD term, const SumGrid& grid) {
    const VecD coarse_grid = grid.coarse - VecD{}, fine_grid = grid.fine - VecD{};
    const VecD rounded = (term + coarse_grid) - coarse_grid;
    coarse += rounded;
    fine += ((term - rounded) + fine_grid) - fine_grid;
  }
};

}  // namespace

Range moment_range(const MomentArgs<float>& a, int64_t begin, int64_t end) {
  const VecF infinity = splat(kInf);
  VecF low = infinity, high = -infinity;
  VecI live_counts{};  // of a part, of less than 2^31 numbers
  for_each_vector(begin, end, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const VecF x = load_some(a.numbers + i, count);
    const VecI live = live_at(a, i, count);
    live_counts -= live;
    low = select(live & (x < low), x, low);
    high = select(live & (x > high), x, high);
  });
  Range range = advantages::no_range();
  for (int i = 0; i < kLanes; ++i) {
    const Range lane = {static_cast<double>(live_counts[i]), static_cast<double>(low[i]), static_cast<double>(high[i])};
    range = advantages::merge(range, lane);
  }
  return range;
}

ExactSum moment_sum(const MomentArgs<float>& a, const SumGrid& grid, const double* mean, int64_t begin, int64_t end) {
  HalfSum low, high;
  const VecD centre = (mean != nullptr ? *mean : 0) - VecD{};
  for_each_vector(begin, end, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const VecI live = live_at(a, i, count);
    const VecF x = select(live, load_some(a.numbers + i, count), splat(0.0f));
    if (mean == nullptr) {
      low.add(widen<0>(x), grid);
      high.add(widen<1>(x), grid);
    } else {
      const VecD dl = widen<0>(x) - centre, dh = widen<1>(x) - centre;
      low.add(widen<0>(live) ? dl * dl : VecD{}, grid);  // a select, which also keeps the product out of an fma
      high.add(widen<1>(live) ? dh * dh : VecD{}, grid);
    }
  });
  ExactSum sum;
  for (int i = 0; i < kLanes / 2; ++i) {
    sum = advantages::merge(sum, ExactSum{low.coarse[i] + high.coarse[i], low.fine[i] + high.fine[i]});
  }
  return sum;
}

void normalize_range(const MomentArgs<float>& a, double mean, double scale, int64_t begin, int64_t end, float* out) {
  const VecF high = splat(static_cast<float>(mean)), low = splat(static_cast<float>(mean - static_cast<float>(mean)));
  const VecF factor = splat(static_cast<float>(scale));
  for_each_vector(begin, end, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const VecF normal = ((load_some(a.numbers + i, count) - high) - low) * factor;
    store_some(out + i, select(live_at(a, i, count), normal, splat(0.0f)), count);
  });
}

}  // namespace areal::AREAL_ISA
