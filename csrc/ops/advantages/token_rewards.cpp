#include "ops/advantages/token_rewards.h"

#include <algorithm>

#include "ops/advantages/sequence_loop.h"
#include "ops/advantages/token_math.h"

namespace areal::advantages {

template <class Real>
void token_rewards_cpu(const TokenRewards<Real>& rewards, int64_t tokens, Real* out) {
  constexpr int64_t kGrainTokens = 16384;
  parallel_for(0, tokens, kGrainTokens, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      out[t] = is_live(rewards.loss_mask, t) ? static_cast<Real>(reward_at(rewards, t)) : Real(0);
    }
  });
}

template <class Real>
void sequence_rewards_cpu(const TokenRewards<Real>& rewards, const Segments& segments, double* sums) {
  for_each_sequence(segments, [&](int64_t s) {
    double sum = 0;
    for (int64_t t = segments.begin(s); t < segments.end(s); ++t) {
      if (is_live(rewards.loss_mask, t)) sum += reward_at(rewards, t);
    }
    sums[s] = sum;
  });
}

void live_tokens_cpu(const Segments& segments, const bool* loss_mask, double* counts) {
  for_each_sequence(segments, [&](int64_t s) {
    const int64_t begin = segments.begin(s), end = segments.end(s);
    counts[s] =
        static_cast<double>(loss_mask != nullptr ? std::count(loss_mask + begin, loss_mask + end, true) : end - begin);
  });
}

template void token_rewards_cpu(const TokenRewards<float>&, int64_t, float*);
template void token_rewards_cpu(const TokenRewards<double>&, int64_t, double*);
template void sequence_rewards_cpu(const TokenRewards<float>&, const Segments&, double*);
template void sequence_rewards_cpu(const TokenRewards<double>&, const Segments&, double*);

}  // namespace areal::advantages
