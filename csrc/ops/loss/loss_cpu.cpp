// The policy loss of some sequences, and of one block of tokens: fp32 a vector at a time, fp64 token by token.
#include "base/simd.h"
#include "ops/loss/loss_sequence.h"

namespace areal::AREAL_ISA {
namespace {

using loss::Accumulator;
using loss::ExpTerms;
using loss::LossConstants;
using loss::PolicyLossArgs;
using loss::ScalarLane;
using loss::SequenceSums;
using loss::SequenceTerms;
using loss::SequenceValues;
using loss::TokenInputs;
using loss::TokenLoss;

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
using DoubleLane = ScalarLane<double>;

AREAL_INLINE VecI load_mask(const bool* mask) {
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

AREAL_INLINE VecI first_lanes(int64_t count) {
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane < static_cast<int32_t>(count < kLanes ? count : kLanes);
}

// The lane's element where live, else 0: whatever a masked token holds is dropped here.
AREAL_INLINE VecF load_live_or_zero(const float* p, VecI live) { return select(live, load(p), splat(0.0f)); }

AREAL_INLINE TokenInputs<VectorLane> load_tokens(const LossConstants<VectorLane>& c, const PolicyLossArgs<float>& a,
                                                 int64_t t, VecI live) {
  TokenInputs<VectorLane> x = {};
  x.live = live;
  x.logprob = load_live_or_zero(a.logprobs + t, live);
  x.proximal = load_live_or_zero(a.proximal_logprobs + t, live);
  x.advantage = load_live_or_zero(a.advantages + t, live);
  if (c.has_behavior) x.behavior = load_live_or_zero(a.behavior_logprobs + t, live);
  if (c.has_reference) x.reference = load_live_or_zero(a.ref_logprobs + t, live);
  if (c.has_entropy) x.entropy = load_live_or_zero(a.entropy + t, live);
  if (c.has_teacher) x.teacher = load_live_or_zero(a.teacher_logprobs + t, live);
  if (c.has_keep_mask) x.keep = load_mask(a.keep_mask + t);
  return x;
}

AREAL_INLINE TokenInputs<DoubleLane> load_token(const PolicyLossArgs<double>& a, int64_t t) {
  TokenInputs<DoubleLane> x = {};
  x.live = true;
  x.logprob = a.logprobs[t];
  x.proximal = a.proximal_logprobs[t];
  x.advantage = a.advantages[t];
  if (a.behavior_logprobs != nullptr) x.behavior = a.behavior_logprobs[t];
  if (a.ref_logprobs != nullptr) x.reference = a.ref_logprobs[t];
  if (a.entropy != nullptr) x.entropy = a.entropy[t];
  if (a.teacher_logprobs != nullptr) x.teacher = a.teacher_logprobs[t];
  if (a.keep_mask != nullptr) x.keep = a.keep_mask[t];
  return x;
}

// Fewer than a vector of tokens at the end of an array: copies, padded with masked tokens. The gradients land in the
// copy too; store() takes them home.
struct PaddedTokens {
  float lanes[9][kLanes] = {};
  bool mask[kLanes] = {}, keep[kLanes] = {};
  PolicyLossArgs<float> args;

  AREAL_INLINE PaddedTokens(const PolicyLossArgs<float>& a, int64_t t, int64_t count) : args(a) {
    std::memcpy(mask, a.loss_mask + t, static_cast<size_t>(count));
    if (a.keep_mask != nullptr) std::memcpy(keep, a.keep_mask + t, static_cast<size_t>(count));
    args.loss_mask = mask;
    args.keep_mask = a.keep_mask != nullptr ? keep : nullptr;
    args.logprobs = copy(0, a.logprobs, t, count);
    args.proximal_logprobs = copy(1, a.proximal_logprobs, t, count);
    args.advantages = copy(2, a.advantages, t, count);
    args.behavior_logprobs = copy(3, a.behavior_logprobs, t, count);
    args.ref_logprobs = copy(4, a.ref_logprobs, t, count);
    args.entropy = copy(5, a.entropy, t, count);
    args.teacher_logprobs = copy(6, a.teacher_logprobs, t, count);
    args.grad_logprobs = lanes[7];
    args.grad_entropy = a.grad_entropy != nullptr ? lanes[8] : nullptr;
  }
  AREAL_INLINE const float* copy(int i, const float* from, int64_t t, int64_t count) {
    if (from != nullptr) std::memcpy(lanes[i], from + t, static_cast<size_t>(count) * sizeof(float));
    return from != nullptr ? lanes[i] : nullptr;
  }
  AREAL_INLINE void store(const PolicyLossArgs<float>& a, int64_t t, int64_t count) const {
    std::memcpy(a.grad_logprobs + t, lanes[7], static_cast<size_t>(count) * sizeof(float));
    if (a.grad_entropy != nullptr) {
      std::memcpy(a.grad_entropy + t, lanes[8], static_cast<size_t>(count) * sizeof(float));
    }
  }
};

// fp32 lanes hold the sums of kRunVectors vectors each; runs are added in fp64.
constexpr int64_t kRunVectors = 16;

typedef float HalfF __attribute__((vector_size(kLanes * 2)));
typedef double HalfD __attribute__((vector_size(kLanes * 4)));

// Statistics of a block. Sums of a run of vectors are in fp32 lanes, sums of runs in fp64 lanes, two halves of them.
struct VectorTally {
  Accumulator<VecF> run;
  HalfD runs[loss::kSumCount][2] = {};
  Accumulator<double> block;
  int64_t vectors = 0;  // in the run, fewer than kRunVectors

  AREAL_INLINE VectorTally() {
    loss::reset<VectorLane>(run);
    loss::reset<DoubleLane>(block);
  }
  AREAL_INLINE void count_vectors(int64_t count) {
    vectors += count;
    if (vectors == kRunVectors) end_run();
  }
  AREAL_INLINE void end_run() {
    for (int i = 0; i < loss::kSumCount; ++i) {
      HalfF halves[2];
      std::memcpy(halves, &run.sum[i], sizeof halves);
      for (int h = 0; h < 2; ++h) runs[i][h] += __builtin_convertvector(halves[h], HalfD);
      run.sum[i] = splat(0.0f);
    }
    vectors = 0;
  }
  // Everything into `block`.
  AREAL_INLINE void finish() {
    end_run();
    for (int i = 0; i < loss::kSumCount; ++i) {
      const HalfD both = runs[i][0] + runs[i][1];
      for (int lane = 0; lane < kLanes / 2; ++lane) block.sum[i] += both[lane];
    }
    for (int i = 0; i < loss::kMaxCount; ++i) {
      const double max = static_cast<double>(reduce_max(run.max[i]));
      if (max > block.max[i]) block.max[i] = max;
    }
  }
};

struct DoubleTally {
  Accumulator<double> block;
  AREAL_INLINE DoubleTally() { loss::reset<DoubleLane>(block); }
  AREAL_INLINE void finish() {}
};

template <class Real>
struct Step {
  using Lane = VectorLane;
  using Tally = VectorTally;
};
template <>
struct Step<double> {
  using Lane = DoubleLane;
  using Tally = DoubleTally;
};

// The sums of a sequence. ---------------------------------------------------------------------------------------------

AREAL_INLINE int64_t count_live(const bool* mask, int64_t begin, int64_t end) {
  int64_t live = 0;
  for (int64_t t = begin; t < end; ++t) live += mask[t];
  return live;
}

AREAL_INLINE void drain(SequenceSums<VecF>& run, SequenceSums<double>& sums) {
  sums.live += static_cast<double>(reduce_add(run.live));
  sums.log_ratio += static_cast<double>(reduce_add(run.log_ratio));
  sums.log_weight += static_cast<double>(reduce_add(run.log_weight));
  sums.positive += static_cast<double>(reduce_add(run.positive));
  sums.negative += static_cast<double>(reduce_add(run.negative));
  run = SequenceSums<VecF>{};
}

template <class Variant>
AREAL_INLINE void sum_tokens(const LossConstants<VectorLane>& c, const PolicyLossArgs<float>& a, int64_t begin,
                             int64_t end, SequenceSums<double>& sums) {
  SequenceSums<VecF> run = {};
  int64_t vectors = 0, t = begin;
  for (; t + kLanes <= end; t += kLanes) {
    if (!none(a.loss_mask + t)) {
      loss::accumulate_sequence<Variant>(c, load_tokens(c, a, t, load_mask(a.loss_mask + t)), run);
    }
    if (++vectors % kRunVectors == 0) drain(run, sums);
  }
  if (t < end) {
    const PaddedTokens padded(a, t, end - t);
    loss::accumulate_sequence<Variant>(c, load_tokens(c, padded.args, 0, load_mask(padded.mask)), run);
  }
  drain(run, sums);
}

template <class Variant>
AREAL_INLINE void sum_tokens(const LossConstants<DoubleLane>& c, const PolicyLossArgs<double>& a, int64_t begin,
                             int64_t end, SequenceSums<double>& sums) {
  for (int64_t t = begin; t < end; ++t) {
    if (a.loss_mask[t]) loss::accumulate_sequence<Variant>(c, load_token(a, t), sums);
  }
}

template <class Variant, class Real>
void run_sequences(const PolicyLossArgs<Real>& a, int64_t begin, int64_t end) {
  const auto c = loss::loss_constants<typename Step<Real>::Lane>(a);
  for (int64_t s = begin; s < end; ++s) {
    SequenceSums<double> sums = {};
    if (loss::sums_logprobs<Variant>(c)) {
      sum_tokens<Variant>(c, a, a.cu_seqlens[s], a.cu_seqlens[s + 1], sums);
    } else {
      sums.live = static_cast<double>(count_live(a.loss_mask, a.cu_seqlens[s], a.cu_seqlens[s + 1]));
    }
    a.sequence_scratch[s] = loss::sequence_values<Variant>(a, sums);
  }
}

// A block of tokens. --------------------------------------------------------------------------------------------------

template <class Variant>
AREAL_INLINE void accumulate_vector(const LossConstants<VectorLane>& c, const PolicyLossArgs<float>& a, int64_t t,
                                    VecI lanes, const SequenceTerms<VectorLane>& s, Accumulator<VecF>& acc) {
  TokenLoss<VecF> token = {};
  if (!none(a.loss_mask + t)) {
    token = loss::token_loss<Variant>(c, load_tokens(c, a, t, load_mask(a.loss_mask + t) & lanes), s, acc);
  }
  store(a.grad_logprobs + t, token.grad_logprob);
  if (a.grad_entropy != nullptr) store(a.grad_entropy + t, token.grad_entropy);
}

// Tokens [begin, end) of one sequence. A vector may reach past `end`, up to `limit`: those lanes count as masked, and
// the gradients they get are overwritten by the piece that follows.
template <class Variant>
AREAL_INLINE void accumulate_piece(const LossConstants<VectorLane>& c, const PolicyLossArgs<float>& a, int64_t begin,
                                   int64_t end, int64_t limit, const SequenceValues& values, VectorTally& tally) {
  const SequenceTerms<VectorLane> s = loss::sequence_terms<VectorLane>(values);
  int64_t t = begin;
  while (t + kLanes <= end) {  // runs, so that the inner loop knows where sums go and may keep them in registers
    const int64_t room = kRunVectors - tally.vectors, full = (end - t) / kLanes, count = full < room ? full : room;
    for (int64_t v = 0; v < count; ++v, t += kLanes) accumulate_vector<Variant>(c, a, t, ~VecI{}, s, tally.run);
    tally.count_vectors(count);
  }
  if (t == end) return;
  if (t + kLanes <= limit) {
    accumulate_vector<Variant>(c, a, t, first_lanes(end - t), s, tally.run);
  } else {
    const PaddedTokens padded(a, t, end - t);
    accumulate_vector<Variant>(c, padded.args, 0, ~VecI{}, s, tally.run);
    padded.store(a, t, end - t);
  }
  tally.count_vectors(1);
}

template <class Variant>
AREAL_INLINE void accumulate_piece(const LossConstants<DoubleLane>& c, const PolicyLossArgs<double>& a, int64_t begin,
                                   int64_t end, int64_t, const SequenceValues& values, DoubleTally& tally) {
  const SequenceTerms<DoubleLane> s = loss::sequence_terms<DoubleLane>(values);
  for (int64_t t = begin; t < end; ++t) {
    TokenLoss<double> token = {};
    if (a.loss_mask[t]) token = loss::token_loss<Variant>(c, load_token(a, t), s, tally.block);
    a.grad_logprobs[t] = token.grad_logprob;
    if (a.grad_entropy != nullptr) a.grad_entropy[t] = token.grad_entropy;
  }
}

// A live token without a version (negative) counts as fresh.
template <class Real>
AREAL_INLINE void accumulate_staleness(const PolicyLossArgs<Real>& a, int64_t begin, int64_t end,
                                       Accumulator<double>& block) {
  const int64_t current = *a.current_version;
  int64_t sum = 0, max = 0;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t age = a.loss_mask[t] && a.versions[t] >= 0 ? current - a.versions[t] : 0;
    sum += age;
    max = age > max ? age : max;
  }
  block.sum[loss::kStaleness] += static_cast<double>(sum);
  block.max[loss::kStalenessMax - loss::kSumCount] = static_cast<double>(max);
}

template <class Variant, class Real>
void accumulate(const PolicyLossArgs<Real>& a, int64_t begin, int64_t end, typename Step<Real>::Tally& tally) {
  const auto c = loss::loss_constants<typename Step<Real>::Lane>(a);
  if (a.cu_seqlens == nullptr) return accumulate_piece<Variant>(c, a, begin, end, end, loss::no_sequence(), tally);
  int64_t s = loss::sequence_at(a.cu_seqlens, 0, a.sequences - 1, begin);
  for (int64_t t = begin; t < end;) {
    while (a.cu_seqlens[s + 1] <= t) ++s;
    const SequenceValues& values = a.sequence_scratch[s];
    if (a.cu_seqlens[s] == t) tally.block.sum[loss::kLiveSequences] += values.token_weight > 0;
    const int64_t piece_end = a.cu_seqlens[s + 1] < end ? a.cu_seqlens[s + 1] : end;
    accumulate_piece<Variant>(c, a, t, piece_end, end, values, tally);
    t = piece_end;
  }
}

template <class Real>
AREAL_INLINE void run_block(const PolicyLossArgs<Real>& args, int64_t block) {
  const int64_t begin = block * loss::kBlockTokens, limit = begin + loss::kBlockTokens;
  const int64_t blocks = loss::block_count(args.tokens), end = limit < args.tokens ? limit : args.tokens;
  typename Step<Real>::Tally tally;
  loss::with_variant(args.params, [&](auto variant) { accumulate<decltype(variant)>(args, begin, end, tally); });
  tally.finish();
  if (args.versions != nullptr) accumulate_staleness(args, begin, end, tally.block);
  for (int i = 0; i < loss::kSumCount; ++i) args.scratch[i * blocks + block] = tally.block.sum[i];
  for (int i = 0; i < loss::kMaxCount; ++i) args.scratch[(loss::kSumCount + i) * blocks + block] = tally.block.max[i];
}

}  // namespace

void policy_loss_sequences(const PolicyLossArgs<float>& args, int64_t begin, int64_t end) {
  loss::with_variant(args.params, [&](auto variant) { run_sequences<decltype(variant)>(args, begin, end); });
}
void policy_loss_sequences(const PolicyLossArgs<double>& args, int64_t begin, int64_t end) {
  loss::with_variant(args.params, [&](auto variant) { run_sequences<decltype(variant)>(args, begin, end); });
}
void policy_loss_block(const PolicyLossArgs<float>& args, int64_t block) { run_block(args, block); }
void policy_loss_block(const PolicyLossArgs<double>& args, int64_t block) { run_block(args, block); }

}  // namespace areal::AREAL_ISA
