// The token-level policy loss of given logits, fused: one pass that reads [T, V] logits once and writes their gradient
// over them once. What logprob_from_logits, ppo_loss and their backwards compute one after the other, without the reads
// and writes between them.
//
//   logprob, entropy, lse of a row as in ops/logprob; term of a token and its derivatives as in ops/loss;
//   dlogits = scale (d term/d logprob  d logprob/d logits + d term/d entropy  d entropy/d logits)
//
// Loss and statistics come from policy_loss on the [T] arrays that this writes.
#pragma once

#include <cstdint>

#include "ops/logprob/logprob.h"
#include "ops/loss/loss.h"

namespace areal {

struct FusedLossArgs {
  LogprobInput<float> input;  // whose logits become the gradient; 0 in rows that are not live
  // Arrays of input.rows entries. Read: params and the inputs of each token; where loss_mask is false, the row's
  // gradient is 0. `entropy` says by not being nullptr that the loss has one. Neither read nor written: logprobs,
  // versions, what speaks of sequences, and the outputs.
  loss::PolicyLossArgs<float> loss;
  const float* scale = nullptr;  // [1], of the terms' sum: 1 / normalizer, times the gradient from above
  LogprobOutput<float> output;   // row_max and log_sum may be nullptr
  int64_t* bad_row = nullptr;    // as in LogprobCudaScratch; the rows' gradient is NaN
};

// Whether the current device and the problem allow it: sm_90, float32, bfloat16 or float16, no term that spans tokens,
// rows that fit into the shared memory of a cluster (V up to 150,000 in float32, 300,000 in 16 bits).
bool fused_loss_fits(const FusedLossArgs& args);

// Returns false, and does nothing, where it does not fit. Asynchronous on `stream` (a cudaStream_t), bitwise the same
// from run to run.
bool fused_loss_cuda(const FusedLossArgs& args, void* stream);

// CPU: a few rows at a time, which are still in cache when their gradient is written. `tokens` are the rows' inputs and
// params as in FusedLossArgs; row_max and log_sum of the output are written too. Bitwise what the three passes give,
// for any number of threads. Throws areal::Error on a live row whose label or temperature is out of range; nothing has
// been written then.
void fused_loss_cpu(const LogprobInput<float>& input, const loss::PolicyLossArgs<float>& tokens, float scale,
                    const LogprobOutput<float>& output);
void fused_loss_cpu(const LogprobInput<double>& input, const loss::PolicyLossArgs<double>& tokens, double scale,
                    const LogprobOutput<double>& output);

}  // namespace areal
