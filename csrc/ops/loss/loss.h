// Policy loss of one packed batch: the clipped objectives, their gradient and their statistics in a single pass over T
// tokens, with a pass over the sequences before it where an option speaks of sequences.
//
//   u = exp(logprob - proximal)                 the token's ratio, or one ratio of its sequence (RatioLevel)
//   w = exp(proximal - behavior)                capped or masked, 1 without behavior logprobs (BehaviorLevel, -Mode)
//   A = advantage + distill_coef (teacher - proximal)
//   term = -w A f(u) + kl_coef kl(logprob, reference) - entropy_coef entropy            f: see Objective
//   loss = sum over live tokens of token_weight term / normalizer                       token_weight: see Aggregation
//
// Every log-ratio is clamped to [-20, 20] before exp (kMaxLogRatio), those of tokens before they are added up and the
// result again; beyond the bound its gradient is 0. -inf against -inf has log-ratio 0 and no gradient. The inputs of
// masked tokens are never used, whatever they hold. At a clip edge (u equal to a bound) the gradient is that of the
// unclipped branch. The gradient is that of the loss as stated: with a ratio per sequence every token of the sequence
// gets d u / d logprob times the sum of what multiplies u in its sequence.
//
// Sources: PPO, arXiv:1707.06347, eq. 7; decoupled objective, arXiv:2110.00641; dual clip, arXiv:1912.09729; GSPO,
// arXiv:2507.18071; GMPO, arXiv:2507.20673; CISPO, arXiv:2506.13585; SAPO, arXiv:2511.20347; KL estimators k1, k2, k3,
// http://joschu.net/blog/kl-approx.html; ratio-weighted k3, arXiv:2512.02556.
#pragma once

#include <cstdint>
#include <limits>

#include "base/host_device.h"
#include "base/isa.h"

namespace areal::loss {

// f(u), with [low, high] = [ratio_low, ratio_high] and sg = stop-gradient:
//   kPpo        A f = min(u A, clip(u, low, high) A), for A < 0 at least dual_clip A
//   kCispo      f = sg(clip(u, low, high)) logprob
//   kSapo       f = (4 / tau) sigmoid(tau (u - 1)), tau = tau_positive where A > 0, else tau_negative
//   kGmpo       f = exp(mean over the sequence of l), l = min(log u_t, log high) where A > 0, else max(log u_t, log
//   low) kReinforce  f = u; with RatioLevel::kOff f = logprob
enum class Objective : int32_t { kPpo, kCispo, kSapo, kGmpo, kReinforce };
inline constexpr int32_t kObjectiveCount = 5;

// The log of u: of the token; its mean (GSPO) or its sum over the live tokens of the sequence; no ratio.
enum class RatioLevel : int32_t { kToken, kSequence, kSequenceProduct, kOff };
inline constexpr int32_t kRatioLevelCount = 4;

// The log of w: of the token; its sum or its mean over the live tokens of the sequence.
enum class BehaviorLevel : int32_t { kToken, kSequence, kGeometric };
inline constexpr int32_t kBehaviorLevelCount = 3;

enum class BehaviorMode : int32_t {
  kTruncate,  // weights above behavior_cap become behavior_cap
  kMask,      // weights outside [behavior_low, behavior_cap] become 0
};
inline constexpr int32_t kBehaviorModeCount = 2;

// With y = log reference - log current: -y, y^2 / 2, exp(y) - 1 - y, and w u_t times the last, differentiated through
// u_t too (which makes value and gradient unbiased for tokens of an older policy).
enum class KlEstimator : int32_t { kK1, kK2, kK3, kK3Unbiased };
inline constexpr int32_t kKlEstimatorCount = 4;

// Of the live tokens of a sequence: the weight of each, and what the normalizer is where none is given.
enum class Aggregation : int32_t {
  kTokenMean,              // 1; live tokens
  kSequenceMeanTokenSum,   // 1; live sequences (those with a live token)
  kSequenceMeanTokenMean,  // 1 / live tokens of the sequence; live sequences
  kConstant,               // 1; the caller has to give one
};
inline constexpr int32_t kAggregationCount = 4;

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct PolicyLossParams {
  Objective objective = Objective::kPpo;
  RatioLevel ratio_level = RatioLevel::kToken;
  double ratio_low = 0.8;
  double ratio_high = 1.2;
  double dual_clip = kInfinity;  // +infinity: off
  double tau_positive = 1.0;
  double tau_negative = 1.05;
  BehaviorLevel behavior_level = BehaviorLevel::kToken;
  BehaviorMode behavior_mode = BehaviorMode::kTruncate;
  double behavior_low = 0.0;
  double behavior_cap = kInfinity;  // +infinity: off
  KlEstimator kl_estimator = KlEstimator::kK3;
  double kl_coef = 0.0;
  double entropy_coef = 0.0;
  double distill_coef = 0.0;
  Aggregation aggregation = Aggregation::kTokenMean;
};

// Whether an option needs cu_seqlens.
constexpr bool needs_sequences(const PolicyLossParams& p) {
  return p.objective == Objective::kGmpo || p.ratio_level == RatioLevel::kSequence ||
         p.ratio_level == RatioLevel::kSequenceProduct || p.behavior_level != BehaviorLevel::kToken ||
         p.aggregation == Aggregation::kSequenceMeanTokenSum || p.aggregation == Aggregation::kSequenceMeanTokenMean;
}

// What a pass accumulates. Sums add and maxima maximise across blocks, micro-batches and ranks. All are finite when no
// token is live. kl_<p>_<q> estimates KL(p || q) from samples of p: with y = log q - log p, k1 = -y and
// k3 = exp(y) - 1 - y.
enum Stat : int32_t {
  kLiveTokens,
  kLiveSequences,  // 0 without cu_seqlens
  kLossWeight,     // the default normalizer: live tokens or live sequences
  kLoss,           // sum of token_weight term
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
  kKlProximalTeacherK1,
  kKlProximalTeacherK3,
  kBehaviorWeight,       // before capping or masking
  kAppliedWeight,        // after it
  kAppliedWeightSquare,  // with the one above: effective sample size
  kBehaviorCapped,
  kBehaviorMasked,
  kDropped,  // by keep_mask
  kEntropy,
  kStaleness,
  kSumCount,
  kRatioMax = kSumCount,
  kNegativeRatioMin,
  kBehaviorWeightMax,
  kStalenessMax,
  kStatCount,
};
inline constexpr int32_t kMaxCount = kStatCount - kSumCount;

// Tokens are accumulated in blocks of this size, combined in block order: results do not depend on threads.
inline constexpr int64_t kBlockTokens = 2048;
AREAL_HOST_DEVICE constexpr int64_t block_count(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// What the tokens of a sequence share.
struct SequenceValues {
  double ratio;         // u, where it is the sequence's
  double weight;        // w before capping or masking, where it is the sequence's
  double gradient;      // of the sum of the sequence's -w A f(u) with respect to one logprob, where u is the sequence's
  double token_weight;  // of Aggregation; 0 without a live token
};

// All pointers are to contiguous arrays of `tokens` elements on the device of the entry point; Real is float or double.
template <class Real>
struct PolicyLossArgs {
  PolicyLossParams params;
  int64_t tokens;
  const Real* logprobs;
  const Real* proximal_logprobs;
  const Real* advantages;
  const bool* loss_mask;
  const Real* behavior_logprobs;   // nullptr: weight 1
  const Real* ref_logprobs;        // nullptr: no KL
  const Real* entropy;             // nullptr: no entropy
  const Real* teacher_logprobs;    // nullptr: no distillation
  const bool* keep_mask;           // nullptr: all; where false the policy term is left out
  const int64_t* versions;         // nullptr: no staleness
  const int64_t* current_version;  // [1], with versions
  const int64_t* cu_seqlens;       // [sequences + 1]; nullptr unless needs_sequences or for kLiveSequences
  int64_t sequences;               // 0 without cu_seqlens
  const double* normalizer;        // [1]; nullptr: kLossWeight of this call

  Real* loss;           // [1]
  double* stats;        // [kStatCount]
  Real* grad_logprobs;  // [tokens], of the sum of token_weight term; times *scale it is the gradient of the loss
  Real* grad_entropy;   // [tokens], likewise; nullptr with entropy_coef 0
  Real* scale;          // [1], 1 / normalizer; 0 when no token is live
  double* scratch;      // [kStatCount * block_count(tokens)], statistic-major
  SequenceValues* sequence_scratch;  // [sequences]
};

void policy_loss_cpu(const PolicyLossArgs<float>& args);
void policy_loss_cpu(const PolicyLossArgs<double>& args);

}  // namespace areal::loss

namespace areal {
// The SequenceValues of the sequences [begin, end).
AREAL_ISA_DECLARE(void policy_loss_sequences(const loss::PolicyLossArgs<float>& args, int64_t begin, int64_t end))
AREAL_ISA_DECLARE(void policy_loss_sequences(const loss::PolicyLossArgs<double>& args, int64_t begin, int64_t end))
// The gradients of one block and its statistics, at scratch[stat * block_count(tokens) + block].
AREAL_ISA_DECLARE(void policy_loss_block(const loss::PolicyLossArgs<float>& args, int64_t block))
AREAL_ISA_DECLARE(void policy_loss_block(const loss::PolicyLossArgs<double>& args, int64_t block))
}  // namespace areal

namespace areal::cuda {

// stream is a cudaStream_t. Two launches, three with cu_seqlens; no synchronisation, no float atomics.
void policy_loss(const loss::PolicyLossArgs<float>& args, void* stream);
void policy_loss(const loss::PolicyLossArgs<double>& args, void* stream);

}  // namespace areal::cuda
