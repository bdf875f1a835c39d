// Between sequences and their tokens: a score per sequence laid over its live tokens, and the log-ratio to the
// reference policy summed over them. Masked tokens are never read and get 0.
//
// The log-ratio log pi - log pi_ref is clamped to [-20, 20]; two equal logprobs, -inf included, have log-ratio 0.
#pragma once

#include <cstdint>

#include "base/segments.h"

namespace areal::advantages {

// Arrays of segments.tokens() elements, contiguous, on the device of the entry point; Real is float or double.
template <class Real>
struct TokenArgs {
  Segments segments;
  const bool* loss_mask;  // nullptr: every token is live
  const Real* logprobs;
  const Real* ref_logprobs;
};

// advantages_t = (scores_s + beta (pi_ref / pi - 1)) / (divide_by_length ? live tokens of s : 1). Logprobs may be
// nullptr when beta = 0.
template <class Real>
struct SpreadArgs {
  TokenArgs<Real> tokens;
  const double* scores;  // [S]
  double beta;
  bool divide_by_length;
  Real* advantages;
};

// sums_s = sum of log pi - log pi_ref over the live tokens of s.
template <class Real>
struct LogRatioSumArgs {
  TokenArgs<Real> tokens;
  double* sums;  // [S]
};

void spread_scores_cpu(const SpreadArgs<float>& args);
void spread_scores_cpu(const SpreadArgs<double>& args);
void log_ratio_sums_cpu(const LogRatioSumArgs<float>& args);
void log_ratio_sums_cpu(const LogRatioSumArgs<double>& args);

}  // namespace areal::advantages

namespace areal::cuda {
// tokens: the size of the per-token arrays. cu_seqlens, which is not readable from the host, is cut to it, and tokens
// of no sequence get 0. stream is a cudaStream_t; no synchronisation.
void spread_scores(const advantages::SpreadArgs<float>& args, int64_t tokens, void* stream);
void spread_scores(const advantages::SpreadArgs<double>& args, int64_t tokens, void* stream);
void log_ratio_sums(const advantages::LogRatioSumArgs<float>& args, int64_t tokens, void* stream);
void log_ratio_sums(const advantages::LogRatioSumArgs<double>& args, int64_t tokens, void* stream);
}  // namespace areal::cuda
