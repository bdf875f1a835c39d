// The reward of a token, with the KL to the reference policy taken off, per token or summed over each sequence; and the
// number of live tokens of each sequence. Masked tokens are never read and get 0.
//
//   reward_t = rewards_t - beta kl_t,  with d = log pi - log pi_ref clamped to [-20, 20] (two equal logprobs: d = 0)
//   kl_t     = d (k1), d^2 / 2 (k2), e^-d - 1 + d (k3)
//
// Source: Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "base/segments.h"

namespace areal::advantages {

enum class Kl : int32_t { kK1 = 0, kK2 = 1, kK3 = 2 };

// Arrays of `tokens` elements, contiguous, on the device of the entry point; Real is float or double.
template <class Real>
struct TokenRewards {
  const Real* rewards;       // nullptr: 0
  const Real* logprobs;      // both nullptr: no KL
  const Real* ref_logprobs;  //
  const bool* loss_mask;     // nullptr: every token is live
  double beta;
  Kl kl;
};

template <class Real>
void token_rewards_cpu(const TokenRewards<Real>& rewards, int64_t tokens, Real* out);
// sums[s]: the reward of sequence s.
template <class Real>
void sequence_rewards_cpu(const TokenRewards<Real>& rewards, const Segments& segments, double* sums);
// counts[s]: the live tokens of sequence s, exactly.
void live_tokens_cpu(const Segments& segments, const bool* loss_mask, double* counts);

}  // namespace areal::advantages

namespace areal {
// Of the tokens [begin, end).
AREAL_ISA_DECLARE(void token_rewards_range(const advantages::TokenRewards<float>& rewards, int64_t begin, int64_t end,
                                           float* out))
AREAL_ISA_DECLARE(double sequence_reward(const advantages::TokenRewards<float>& rewards, int64_t begin, int64_t end))
}  // namespace areal

namespace areal::cuda {
// tokens: the size of the per-token arrays, which cu_seqlens, not readable from the host, is cut to. stream is a
// cudaStream_t; no synchronisation.
template <class Real>
void token_rewards(const advantages::TokenRewards<Real>& rewards, int64_t tokens, Real* out, void* stream);
template <class Real>
void sequence_rewards(const advantages::TokenRewards<Real>& rewards, const Segments& segments, int64_t tokens,
                      double* sums, void* stream);
void live_tokens(const Segments& segments, const bool* loss_mask, int64_t tokens, double* counts, void* stream);
}  // namespace areal::cuda
