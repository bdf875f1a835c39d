// A score per sequence laid over its live tokens, with the KL term of GRPO. Masked tokens are never read and get 0.
//
// Source: GRPO, arXiv:2402.03300, eq. 4: the KL term is minus the gradient of k3 in token_rewards.h, d clamped alike.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "base/segments.h"

namespace areal::advantages {

// advantages_t = (scores_s + beta (pi_ref / pi - 1)) / divisors_s; 0 where the score is NaN, that of a failed sample.
// Arrays of segments.tokens() elements, contiguous, on the device of the entry point; Real is float or double.
template <class Real>
struct SpreadArgs {
  Segments segments;
  const double* scores;      // [S]
  const double* divisors;    // [S]; nullptr: 1
  const bool* loss_mask;     // nullptr: every token is live
  const Real* logprobs;      // both may be nullptr when beta = 0
  const Real* ref_logprobs;  //
  double beta;
  Real* advantages;
};

void spread_scores_cpu(const SpreadArgs<float>& args);
void spread_scores_cpu(const SpreadArgs<double>& args);

}  // namespace areal::advantages

namespace areal {
// The tokens [begin, end) of one sequence, with the KL term.
AREAL_ISA_DECLARE(void spread_with_kl(const advantages::SpreadArgs<float>& args, double score, double divisor,
                                      int64_t begin, int64_t end))
}  // namespace areal

namespace areal::cuda {
// tokens: the size of the per-token arrays. cu_seqlens, which is not readable from the host, is cut to it, and tokens
// of no sequence get 0. stream is a cudaStream_t; no synchronisation.
void spread_scores(const advantages::SpreadArgs<float>& args, int64_t tokens, void* stream);
void spread_scores(const advantages::SpreadArgs<double>& args, int64_t tokens, void* stream);
}  // namespace areal::cuda
