#include "ops/advantages/spread.h"

#include <algorithm>

#include "ops/advantages/sequence_loop.h"
#include "ops/advantages/token_math.h"

namespace areal {
namespace {

void fill_with_kl(const advantages::SpreadArgs<float>& args, int64_t s, int64_t begin, int64_t end) {
  const double divisor = args.divisors != nullptr ? args.divisors[s] : 1;
  AREAL_ISA_DISPATCH(spread_with_kl(args, args.scores[s], divisor, begin, end));
}
void fill_with_kl(const advantages::SpreadArgs<double>& args, int64_t s, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) args.advantages[t] = advantages::token_advantage(args, s, t);
}

}  // namespace
}  // namespace areal

namespace areal::advantages {
namespace {

// One value for the live tokens, without a branch: masks of tool output are as good as random.
template <class Real>
void fill_live(const bool* mask, int64_t count, Real value, Real* out) {
  if (mask == nullptr) {
    std::fill(out, out + count, value);
    return;
  }
  const Real choices[2] = {Real(0), value};
  for (int64_t t = 0; t < count; ++t) out[t] = choices[mask[t]];
}

template <class Real>
void spread(const SpreadArgs<Real>& args) {
  const bool* mask = args.loss_mask;
  for_each_sequence(args.segments, [&](int64_t s) {
    const int64_t begin = args.segments.begin(s), end = args.segments.end(s);
    if (args.beta == 0 || args.scores[s] != args.scores[s]) {
      const Real value = static_cast<Real>(sequence_advantage(args, s));
      return fill_live(mask != nullptr ? mask + begin : nullptr, end - begin, value, args.advantages + begin);
    }
    fill_with_kl(args, s, begin, end);
  });
}

}  // namespace

void spread_scores_cpu(const SpreadArgs<float>& args) { spread(args); }
void spread_scores_cpu(const SpreadArgs<double>& args) { spread(args); }

}  // namespace areal::advantages
