// Rewards and advantages of float tokens, a vector at a time: token_math.h in float, where e^x - 1 and e^x - 1 - x do
// not cancel.
#include "ops/advantages/spread.h"
#include "ops/advantages/token_rewards.h"
#include "ops/advantages/vector_tokens.h"

namespace areal::AREAL_ISA {
namespace {

using advantages::Kl;
using advantages::SpreadArgs;
using advantages::TokenRewards;

// log pi - log pi_ref, clamped; NaN stays.
AREAL_INLINE VecF log_ratio(const float* logprobs, const float* ref_logprobs, int64_t count) {
  const VecF p = load_some(logprobs, count), q = load_some(ref_logprobs, count), most = splat(20.0f);
  const VecF d = p - q, high = select(d > most, most, d), clamped = select(high < -most, -most, high);
  return select(p == q, splat(0.0f), clamped);
}

struct ExpTerms {
  VecF expm1;
  VecF expm1_minus;  // e^x - 1 - x
};

AREAL_INLINE ExpTerms exp_terms(VecF x) {
  const ExpParts e = exp_parts(x);
  const VecF tail = e.r * e.r * e.p, body = e.r + tail;  // e^r = 1 + body
  const VecF expm1 = fma(e.scale, body, e.scale - splat(1.0f));
  return {expm1, select(e.scale == splat(1.0f), tail, expm1 - x)};
}

AREAL_INLINE VecF kl_estimate(Kl kl, VecF d) {
  if (kl == Kl::kK1) return d;
  return kl == Kl::kK2 ? splat(0.5f) * d * d : exp_terms(-d).expm1_minus;
}

// 0 where masked.
AREAL_INLINE VecF reward_at(const TokenRewards<float>& a, int64_t t, int64_t count) {
  VecF reward = a.rewards != nullptr ? load_some(a.rewards + t, count) : splat(0.0f);
  if (a.logprobs != nullptr) {
    const VecF d = log_ratio(a.logprobs + t, a.ref_logprobs + t, count);
    reward = reward - splat(static_cast<float>(a.beta)) * kl_estimate(a.kl, d);
  }
  return select(load_live(a.loss_mask != nullptr ? a.loss_mask + t : nullptr, count), reward, splat(0.0f));
}

}  // namespace

void token_rewards_range(const TokenRewards<float>& rewards, int64_t begin, int64_t end, float* out) {
  for_each_vector(begin, end, [&](int64_t t, int64_t count) __attribute__((always_inline)) {
    store_some(out + t, reward_at(rewards, t, count), count);
  });
}

double sequence_reward(const TokenRewards<float>& rewards, int64_t begin, int64_t end) {
  VecD low{}, high{};
  for_each_vector(begin, end, [&](int64_t t, int64_t count) __attribute__((always_inline)) {
    const VecF reward = reward_at(rewards, t, count);
    low += widen<0>(reward);
    high += widen<1>(reward);
  });
  double total = 0;
  for (int i = 0; i < kLanes / 2; ++i) total += low[i] + high[i];
  return total;
}

void spread_with_kl(const SpreadArgs<float>& a, double score, double divisor, int64_t begin, int64_t end) {
  const VecF base = splat(static_cast<float>(score)), beta = splat(static_cast<float>(a.beta));
  const VecF scale = splat(static_cast<float>(1 / divisor));
  for_each_vector(begin, end, [&](int64_t t, int64_t count) __attribute__((always_inline)) {
    const VecF d = log_ratio(a.logprobs + t, a.ref_logprobs + t, count);
    const VecI live = load_live(a.loss_mask != nullptr ? a.loss_mask + t : nullptr, count);
    const VecF advantage = fma(beta, exp_terms(-d).expm1, base) * scale;
    store_some(a.advantages + t, select(live, advantage, splat(0.0f)), count);
  });
}

}  // namespace areal::AREAL_ISA
