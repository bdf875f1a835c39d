#include "ops/advantages/token_rewards.h"

#include <algorithm>

#include "ops/advantages/sequence_loop.h"
#include "ops/advantages/token_math.h"

namespace areal {
namespace {

using advantages::TokenRewards;

void rewards_of_range(const TokenRewards<float>& rewards, int64_t begin, int64_t end, float* out) {
  AREAL_ISA_DISPATCH(token_rewards_range(rewards, begin, end, out));
}
void rewards_of_range(const TokenRewards<double>& rewards, int64_t begin, int64_t end, double* out) {
  for (int64_t t = begin; t < end; ++t) {
    out[t] = advantages::is_live(rewards.loss_mask, t) ? advantages::reward_at(rewards, t) : 0;
  }
}

double sum_of_range(const TokenRewards<float>& rewards, int64_t begin, int64_t end) {
  AREAL_ISA_DISPATCH(sequence_reward(rewards, begin, end));
}
double sum_of_range(const TokenRewards<double>& rewards, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t t = begin; t < end; ++t) {
    if (advantages::is_live(rewards.loss_mask, t)) sum += advantages::reward_at(rewards, t);
  }
  return sum;
}

}  // namespace
}  // namespace areal

namespace areal::advantages {

template <class Real>
void token_rewards_cpu(const TokenRewards<Real>& rewards, int64_t tokens, Real* out) {
  constexpr int64_t kGrainTokens = 16384;
  parallel_for(0, tokens, kGrainTokens,
               [&](int64_t begin, int64_t end) { rewards_of_range(rewards, begin, end, out); });
}

template <class Real>
void sequence_rewards_cpu(const TokenRewards<Real>& rewards, const Segments& segments, double* sums) {
  for_each_sequence(segments, [&](int64_t s) { sums[s] = sum_of_range(rewards, segments.begin(s), segments.end(s)); });
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
