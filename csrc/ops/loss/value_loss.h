// Value loss of one packed batch: squared or Huber error with the value clipped around its old value, its gradient and
// its statistics in one pass over T tokens.
//
//   term = max(l(value - return), l(old + clamp(value - old, -clip, clip) - return))
//   l(e) = e^2 / 2 where |e| <= huber_delta, else huber_delta (|e| - huber_delta / 2)
//   loss = sum of term over the live tokens / normalizer
//
// At a tie the gradient is that of the unclipped branch; where the clipped branch is larger it is 0. The inputs of
// masked tokens are never used, whatever they hold.
//
// Source: clipping, the PPO implementation of OpenAI baselines, "The 37 implementation details of PPO" (2022), 9.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/isa.h"

namespace areal::loss {

// Sums over live tokens; e = return - value. Their fp64 is what lets the variances come from sums.
enum ValueStat : int32_t {
  kValueLiveTokens,
  kValueTerm,
  kValueClipped,  // tokens whose clipped branch is larger
  kValueSum,
  kReturnSum,
  kReturnSquare,
  kErrorSum,
  kErrorSquare,
  kValueStatCount,
};

inline constexpr int64_t kValueBlockTokens = 2048;
AREAL_HOST_DEVICE constexpr int64_t value_block_count(int64_t tokens) {
  return (tokens + kValueBlockTokens - 1) / kValueBlockTokens;
}

// All pointers are to contiguous arrays of `tokens` elements on the device of the entry point; Real is float or double.
template <class Real>
struct ValueLossArgs {
  int64_t tokens;
  double clip;         // +infinity: off
  double huber_delta;  // +infinity: squared error
  const Real* values;
  const Real* old_values;  // nullptr with clip off
  const Real* returns;
  const bool* loss_mask;
  const double* normalizer;  // [1]; nullptr: the live tokens of this call

  Real* loss;       // [1]
  double* stats;    // [kValueStatCount]
  Real* grad;       // [tokens], of the sum of terms
  Real* scale;      // [1], 1 / normalizer; 0 when no token is live
  double* scratch;  // [kValueStatCount * value_block_count(tokens)], statistic-major
};

void value_loss_cpu(const ValueLossArgs<float>& args);
void value_loss_cpu(const ValueLossArgs<double>& args);

}  // namespace areal::loss

namespace areal {
// The gradients of one block and its statistics, at scratch[stat * value_block_count(tokens) + block].
AREAL_ISA_DECLARE(void value_loss_block(const loss::ValueLossArgs<float>& args, int64_t block))
AREAL_ISA_DECLARE(void value_loss_block(const loss::ValueLossArgs<double>& args, int64_t block))
}  // namespace areal

namespace areal::cuda {

// stream is a cudaStream_t. Two launches, no synchronisation, no float atomics.
void value_loss(const loss::ValueLossArgs<float>& args, void* stream);
void value_loss(const loss::ValueLossArgs<double>& args, void* stream);

}  // namespace areal::cuda
