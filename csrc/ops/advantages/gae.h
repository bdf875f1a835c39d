// Generalised advantage estimation over packed sequences.
//
// Over the live tokens of a sequence, t+ being the next live token (value 0 after the last):
//   A_t = r_t + gamma V_t+ - V_t + gamma lam A_t+          returns_t = A_t + V_t
// Masked tokens have neither reward nor value: they are never read, the recurrence crosses them unchanged, and their
// advantage and return are 0. Without values and with lam = 1, returns are the discounted sums of the rewards to come.
//
// Computed as one affine recurrence B from the end, which needs no value of the next token and adds no rounding of the
// values to the rewards when lam = 1:
//   G_t = r_t + B_t+     A_t = G_t - V_t     returns_t = G_t     B_t = gamma lam G_t + gamma (1 - lam) V_t
// A terminal reward is the B that the recurrence starts from, and so lands on the last live token.
//
// Source: arXiv:1506.02438, eq. 16.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "base/segments.h"

namespace areal::advantages {

// Arrays of segments.tokens() elements, contiguous, on the device of the entry point; Real is float or double.
template <class Real>
struct GaeArgs {
  Segments segments;
  const Real* rewards;     // nullptr: 0
  const Real* values;      // nullptr: 0
  const double* terminal;  // [S], a reward for each sequence; NaN: a failed one, whose outputs are 0. nullptr: 0
  const bool* loss_mask;   // nullptr: every token is live
  double gamma;
  double lam;
  Real* advantages;  // nullptr: not wanted
  Real* returns;
};

void gae_cpu(const GaeArgs<float>& args);
void gae_cpu(const GaeArgs<double>& args);

}  // namespace areal::advantages

namespace areal {
// The sequences [begin, end).
AREAL_ISA_DECLARE(void gae_sequences(const advantages::GaeArgs<float>& args, int64_t begin, int64_t end))
AREAL_ISA_DECLARE(void gae_sequences(const advantages::GaeArgs<double>& args, int64_t begin, int64_t end))
}  // namespace areal

namespace areal::cuda {
// tokens: the size of the per-token arrays. cu_seqlens, which is not readable from the host, is cut to it, and tokens
// of no sequence get 0. stream is a cudaStream_t; no synchronisation.
void gae(const advantages::GaeArgs<float>& args, int64_t tokens, void* stream);
void gae(const advantages::GaeArgs<double>& args, int64_t tokens, void* stream);
}  // namespace areal::cuda
