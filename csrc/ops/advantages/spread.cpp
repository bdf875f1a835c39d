#include "ops/advantages/spread.h"

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
void spread(const SpreadArgs<Real>& args) {
  const Segments& segments = args.tokens.segments;
  for_each_sequence(segments, [&](int64_t s) {
    int64_t live = 0;
    if (args.divide_by_length) {
      for (int64_t t = segments.begin(s); t < segments.end(s); ++t) live += is_live(args.tokens, t);
    }
    const double divisor = args.divide_by_length ? static_cast<double>(live) : 1.0;
    for (int64_t t = segments.begin(s); t < segments.end(s); ++t) {
      args.advantages[t] = token_advantage(args, t, args.scores[s], divisor);
    }
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
