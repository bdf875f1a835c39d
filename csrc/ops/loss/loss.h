// Policy loss of one packed batch: decoupled PPO, its gradient and its statistics in a single pass over T tokens.
//
//   u = exp(logprob - proximal)      w = exp(proximal - behavior), capped or masked, 1 without behavior logprobs
//   term = -w min(u A, clip(u, ratio_low, ratio_high) A)              (for A < 0 at most dual_clip w |A|)
//          + kl_coef kl(logprob, reference) - entropy_coef entropy
//   loss = sum of term over the live tokens / normalizer
//
// Every log-ratio is clamped to [-20, 20] before exp (kMaxLogRatio); beyond the bound its gradient is 0. -inf against
// -inf has log-ratio 0 and no gradient. The inputs of masked tokens are never used, whatever they hold.
// At a clip edge (u equal to a bound) the gradient is that of the unclipped branch.
//
// Source: PPO, arXiv:1707.06347, eq. 7; decoupled objective, arXiv:2110.00641; dual clip, arXiv:1912.09729;
// KL estimators k1, k2, k3, http://joschu.net/blog/kl-approx.html.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "base/isa.h"

namespace areal::loss {

enum class BehaviorMode : int32_t {
  kTruncate = 0,  // weights above behavior_cap become behavior_cap
  kMask = 1,      // weights outside [behavior_low, behavior_cap] become 0
};
enum class KlEstimator : int32_t { kK1 = 0, kK2 = 1, kK3 = 2 };

struct PolicyLossParams {
  double ratio_low;
  double ratio_high;
  double dual_clip;  // +infinity: off
  BehaviorMode behavior_mode;
  double behavior_low;
  double behavior_cap;  // +infinity: off
  KlEstimator kl_estimator;
  double kl_coef;
  double entropy_coef;
};

// What a pass accumulates. Sums add and maxima maximise across blocks, micro-batches and ranks. All are finite when no
// token is live. kl_<p>_<q> estimates KL(p || q) from samples of p: with y = log q - log p, k1 = -y and
// k3 = exp(y) - 1 - y.
enum Stat : int32_t {
  kLiveTokens,
  kLoss,
  kPolicyLoss,
  kRatio,
  kClipLow,
  kClipHigh,
  kDualClip,
  kKlProximalCurrentK1,
  kKlProximalCurrentK3,
  kKlBehaviorProximalK1,
  kKlBehaviorProximalK3,
  kKlCurrentReferenceK1,
  kKlCurrentReferenceK3,
  kBehaviorWeight,       // before capping or masking
  kAppliedWeight,        // after it
  kAppliedWeightSquare,  // with the one above: effective sample size
  kBehaviorCapped,
  kBehaviorMasked,
  kEntropy,
  kSumCount,
  kRatioMax = kSumCount,
  kNegativeRatioMin,
  kBehaviorWeightMax,
  kStatCount,
};
inline constexpr int32_t kMaxCount = kStatCount - kSumCount;

// Tokens are accumulated in blocks of this size, combined in block order: results do not depend on threads.
inline constexpr int64_t kBlockTokens = 2048;
AREAL_HOST_DEVICE constexpr int64_t block_count(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// All pointers are to contiguous arrays of `tokens` elements on the device of the entry point; Real is float or double.
template <class Real>
struct PolicyLossArgs {
  PolicyLossParams params;
  int64_t tokens;
  const Real* logprobs;
  const Real* proximal_logprobs;
  const Real* advantages;
  const bool* loss_mask;
  const Real* behavior_logprobs;  // nullptr: weight 1
  const Real* ref_logprobs;       // nullptr: no KL
  const Real* entropy;            // nullptr: no entropy
  const double* normalizer;       // one element; nullptr: the live tokens of this call

  Real* loss;           // [1]
  double* stats;        // [kStatCount]
  Real* grad_logprobs;  // [tokens], of the sum of terms; times *scale it is the gradient of the loss
  Real* scale;          // [1], 1 / normalizer; 0 when no token is live
  double* scratch;      // [kStatCount * block_count(tokens)], statistic-major
};

void policy_loss_cpu(const PolicyLossArgs<float>& args);
void policy_loss_cpu(const PolicyLossArgs<double>& args);

// The grad_logprobs of one block and its statistics, at scratch[stat * block_count(tokens) + block].

}  // namespace areal::loss

namespace areal {
AREAL_ISA_DECLARE(void policy_loss_block(const loss::PolicyLossArgs<float>& args, int64_t block))
AREAL_ISA_DECLARE(void policy_loss_block(const loss::PolicyLossArgs<double>& args, int64_t block))
}  // namespace areal

namespace areal::cuda {

// stream is a cudaStream_t. Two launches, no synchronisation, no float atomics.
void policy_loss(const loss::PolicyLossArgs<float>& args, void* stream);
void policy_loss(const loss::PolicyLossArgs<double>& args, void* stream);

}  // namespace areal::cuda
