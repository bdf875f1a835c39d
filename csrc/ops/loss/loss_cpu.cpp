// The policy loss of one block of tokens: fp32 a vector at a time, fp64 token by token.
#include "base/simd.h"
#include "ops/loss/loss_math.h"

namespace areal::AREAL_ISA {
namespace {

using loss::Accumulator;
using loss::ExpTerms;
using loss::LossConstants;
using loss::PolicyLossArgs;
using loss::ScalarLane;
using loss::TokenInputs;

typedef uint8_t VecB __attribute__((vector_size(kLanes)));

struct VectorLane {
  using Value = VecF;
  using Mask = VecI;
  static AREAL_INLINE VecF splat(double x) { return AREAL_ISA::splat(static_cast<float>(x)); }
  static AREAL_INLINE VecF select(VecI mask, VecF yes, VecF no) { return mask ? yes : no; }
  static AREAL_INLINE ExpTerms<VecF> exp_terms(VecF y) {
    const ExpParts e = exp_parts(y);
    const VecF tail = e.r * e.r * e.p, body = e.r + tail;  // e^r = 1 + body
    const VecF expm1 = fma(e.scale, body, e.scale - splat(1));
    return {fma(e.scale, body, e.scale), expm1, select(e.scale == splat(1), tail, expm1 - y)};
  }
};

AREAL_INLINE VecI load_live(const bool* mask) {
  VecB bytes;
  std::memcpy(&bytes, mask, sizeof bytes);
  return __builtin_convertvector(bytes, VecI) != 0;
}

AREAL_INLINE bool none(const bool* mask) {
  uint64_t words[(kLanes + 7) / 8] = {}, any = 0;
  std::memcpy(words, mask, kLanes);
  for (const uint64_t word : words) any |= word;
  return any == 0;
}

// The lane's element where live, else 0: whatever a masked token holds is dropped here.
AREAL_INLINE VecF load_live_or_zero(const float* p, VecI live) { return select(live, load(p), splat(0.0f)); }

AREAL_INLINE void accumulate_vector(const LossConstants<VectorLane>& c, const PolicyLossArgs<float>& a, int64_t t,
                                    Accumulator<VecF>& acc) {
  if (none(a.loss_mask + t)) return store(a.grad_logprobs + t, splat(0.0f));
  const VecI live = load_live(a.loss_mask + t);
  TokenInputs<VectorLane> x = {};
  x.logprob = load_live_or_zero(a.logprobs + t, live);
  x.proximal = load_live_or_zero(a.proximal_logprobs + t, live);
  x.advantage = load_live_or_zero(a.advantages + t, live);
  if (c.has_behavior) x.behavior = load_live_or_zero(a.behavior_logprobs + t, live);
  if (c.has_reference) x.reference = load_live_or_zero(a.ref_logprobs + t, live);
  if (c.has_entropy) x.entropy = load_live_or_zero(a.entropy + t, live);
  store(a.grad_logprobs + t, loss::accumulate_tokens<VectorLane>(c, x, live, acc));
}

// The tail of the array: copied to a padded vector whose last lanes are masked.
AREAL_INLINE void accumulate_tail(const LossConstants<VectorLane>& c, const PolicyLossArgs<float>& a, int64_t t,
                                  int64_t count, Accumulator<VecF>& acc) {
  float lanes[7][kLanes] = {};
  bool mask[kLanes] = {};
  const auto copy = [&](float* to, const float* from) {
    if (from != nullptr) std::memcpy(to, from + t, static_cast<size_t>(count) * sizeof(float));
    return from != nullptr ? to : nullptr;
  };
  std::memcpy(mask, a.loss_mask + t, static_cast<size_t>(count));
  PolicyLossArgs<float> padded = a;
  padded.loss_mask = mask;
  padded.logprobs = copy(lanes[0], a.logprobs);
  padded.proximal_logprobs = copy(lanes[1], a.proximal_logprobs);
  padded.advantages = copy(lanes[2], a.advantages);
  padded.behavior_logprobs = copy(lanes[3], a.behavior_logprobs);
  padded.ref_logprobs = copy(lanes[4], a.ref_logprobs);
  padded.entropy = copy(lanes[5], a.entropy);
  padded.grad_logprobs = lanes[6];
  accumulate_vector(c, padded, 0, acc);
  std::memcpy(a.grad_logprobs + t, lanes[6], static_cast<size_t>(count) * sizeof(float));
}

// fp32 lanes hold the sums of kRunVectors tokens each; runs are added in fp64.
constexpr int64_t kRunVectors = 16;

AREAL_INLINE void drain(Accumulator<VecF>& run, Accumulator<double>& block) {
  for (int i = 0; i < loss::kSumCount; ++i) block.sum[i] += static_cast<double>(reduce_add(run.sum[i]));
  for (int i = 0; i < loss::kMaxCount; ++i) {
    const double max = static_cast<double>(reduce_max(run.max[i]));
    if (max > block.max[i]) block.max[i] = max;
  }
  loss::reset<VectorLane>(run);
}

AREAL_INLINE void accumulate(const PolicyLossArgs<float>& a, int64_t begin, int64_t end, Accumulator<double>& block) {
  const LossConstants<VectorLane> c = loss::loss_constants<VectorLane>(a);
  Accumulator<VecF> run;
  loss::reset<VectorLane>(run);
  int64_t t = begin;
  while (t + kLanes <= end) {
    const int64_t full = begin + (end - begin) / kLanes * kLanes, stop = t + kRunVectors * kLanes;
    for (; t < (stop < full ? stop : full); t += kLanes) accumulate_vector(c, a, t, run);
    drain(run, block);
  }
  if (t < end) {
    accumulate_tail(c, a, t, end - t, run);
    drain(run, block);
  }
}

AREAL_INLINE void accumulate(const PolicyLossArgs<double>& a, int64_t begin, int64_t end, Accumulator<double>& block) {
  using Lane = ScalarLane<double>;
  const LossConstants<Lane> c = loss::loss_constants<Lane>(a);
  for (int64_t t = begin; t < end; ++t) {
    a.grad_logprobs[t] = 0;
    if (!a.loss_mask[t]) continue;
    TokenInputs<Lane> x = {};
    x.logprob = a.logprobs[t];
    x.proximal = a.proximal_logprobs[t];
    x.advantage = a.advantages[t];
    if (c.has_behavior) x.behavior = a.behavior_logprobs[t];
    if (c.has_reference) x.reference = a.ref_logprobs[t];
    if (c.has_entropy) x.entropy = a.entropy[t];
    a.grad_logprobs[t] = loss::accumulate_tokens<Lane>(c, x, true, block);
  }
}

template <class Real>
AREAL_INLINE void run_block(const PolicyLossArgs<Real>& args, int64_t block) {
  const int64_t begin = block * loss::kBlockTokens, limit = begin + loss::kBlockTokens;
  const int64_t blocks = loss::block_count(args.tokens);
  Accumulator<double> acc;
  loss::reset<ScalarLane<double>>(acc);
  accumulate(args, begin, limit < args.tokens ? limit : args.tokens, acc);
  for (int i = 0; i < loss::kSumCount; ++i) args.scratch[i * blocks + block] = acc.sum[i];
  for (int i = 0; i < loss::kMaxCount; ++i) args.scratch[(loss::kSumCount + i) * blocks + block] = acc.max[i];
}

}  // namespace

void policy_loss_block(const PolicyLossArgs<float>& args, int64_t block) { run_block(args, block); }
void policy_loss_block(const PolicyLossArgs<double>& args, int64_t block) { run_block(args, block); }

}  // namespace areal::AREAL_ISA
