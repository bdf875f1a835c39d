#include "ops/advantages/spread.h"

#include <algorithm>

#include "base/threads.h"
#include "ops/advantages/spread_math.h"

namespace areal::advantages {
namespace {

template <class Fn>
void for_each_sequence(const Segments& segments, const Fn& fn) {
  if (segments.count == 0) return;
  constexpr int64_t kGrainTokens = 16384;
  const int64_t mean_tokens = segments.tokens() / segments.count + 1;
  parallel_for(0, segments.count, kGrainTokens / mean_tokens + 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) fn(s);
  });
}

template <class Real>
int64_t live_tokens(const SpreadArgs<Real>& args, int64_t begin, int64_t end) {
  if (args.tokens.loss_mask == nullptr) return end - begin;
  int64_t live = 0;
  for (int64_t t = begin; t < end; ++t) live += args.tokens.loss_mask[t];
  return live;
}

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
  const Segments& segments = args.tokens.segments;
  const bool* mask = args.tokens.loss_mask;
  for_each_sequence(segments, [&](int64_t s) {
    const int64_t begin = segments.begin(s), end = segments.end(s);
    const double divisor = args.divide_by_length ? static_cast<double>(live_tokens(args, begin, end)) : 1.0;
    if (args.beta == 0) {
      const Real value = static_cast<Real>(args.scores[s] / divisor);
      return fill_live(mask != nullptr ? mask + begin : nullptr, end - begin, value, args.advantages + begin);
    }
    for (int64_t t = begin; t < end; ++t) args.advantages[t] = token_advantage(args, t, args.scores[s], divisor);
  });
}

template <class Real>
void sum(const LogRatioSumArgs<Real>& args) {
  const Segments& segments = args.tokens.segments;
  for_each_sequence(segments, [&](int64_t s) {
    double total = 0;
    for (int64_t t = segments.begin(s); t < segments.end(s); ++t) {
      if (is_live(args.tokens, t)) total += log_ratio(args.tokens, t);
    }
    args.sums[s] = total;
  });
}

}  // namespace

void spread_scores_cpu(const SpreadArgs<float>& args) { spread(args); }
void spread_scores_cpu(const SpreadArgs<double>& args) { spread(args); }
void log_ratio_sums_cpu(const LogRatioSumArgs<float>& args) { sum(args); }
void log_ratio_sums_cpu(const LogRatioSumArgs<double>& args) { sum(args); }

}  // namespace areal::advantages
