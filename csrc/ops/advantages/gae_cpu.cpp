// GAE of whole sequences, from their ends: a vector of live tokens at a time by a scan across the lanes, token by
// token where live and masked ones mix.
#include "base/simd.h"
#include "ops/advantages/gae.h"

namespace areal::AREAL_ISA {
namespace {

using advantages::GaeArgs;

// Lane i of the result is lane i + count of v; past the end, lanes of `beyond`.
template <int count>
AREAL_INLINE VecF shift_down(VecF v, VecF beyond) {
  VecI index;
  for (int i = 0; i < kLanes; ++i) index[i] = i + count;
  return __builtin_shuffle(v, beyond, index);
}

template <class Real>
struct Decay {
  Real reward;  // gamma lam: what a reward, and the recurrence, keep per live token
  Real value;   // gamma (1 - lam)
};

template <class Real>
AREAL_INLINE Decay<Real> make_decay(const GaeArgs<Real>& a) {
  return {static_cast<Real>(a.gamma * a.lam), static_cast<Real>(a.gamma * (1.0 - a.lam))};
}

// Tokens [begin, end), last first; carry is B of the token after, and becomes B of the first.
template <class Real>
AREAL_INLINE void scan_tokens(const GaeArgs<Real>& a, const Decay<Real>& decay, int64_t begin, int64_t end,
                              Real& carry) {
  for (int64_t t = end; t-- > begin;) {
    if (a.loss_mask != nullptr && !a.loss_mask[t]) {
      a.returns[t] = 0;
      if (a.advantages != nullptr) a.advantages[t] = 0;
      continue;
    }
    const Real value = a.values != nullptr ? a.values[t] : 0;
    const Real total = (a.rewards != nullptr ? a.rewards[t] : 0) + carry;
    a.returns[t] = total;
    if (a.advantages != nullptr) a.advantages[t] = total - value;
    carry = decay.reward * total + decay.value * value;
  }
}

// Powers of the decay: 1, 2, 4, 8 steps for the scan, and from each lane past the last one for the carry.
struct VectorDecay {
  VecF reward, value, step2, step4, step8, to_end;
};

AREAL_INLINE VectorDecay make_vector_decay(const GaeArgs<float>& a) {
  const double c = a.gamma * a.lam;
  VectorDecay d;
  d.reward = splat(static_cast<float>(c));
  d.value = splat(static_cast<float>(a.gamma * (1.0 - a.lam)));
  d.step2 = splat(static_cast<float>(c * c));
  d.step4 = splat(static_cast<float>(c * c * c * c));
  d.step8 = splat(static_cast<float>(c * c * c * c * c * c * c * c));
  double power = 1;
  for (int i = kLanes; i-- > 0;) d.to_end[i] = static_cast<float>(power *= c);
  return d;
}

// kLanes live tokens from t; carry holds B of token t + kLanes in every lane, and becomes B of token t.
AREAL_INLINE void scan_vector(const GaeArgs<float>& a, const VectorDecay& d, int64_t t, VecF& carry) {
  const VecF zero = splat(0.0f);
  const VecF reward = a.rewards != nullptr ? load(a.rewards + t) : zero;
  const VecF value = a.values != nullptr ? load(a.values + t) : zero;
  VecF b = fma(d.reward, reward, d.value * value);
  b = fma(d.reward, shift_down<1>(b, zero), b);
  b = fma(d.step2, shift_down<2>(b, zero), b);
  if constexpr (kLanes > 4) b = fma(d.step4, shift_down<4>(b, zero), b);
  if constexpr (kLanes > 8) b = fma(d.step8, shift_down<8>(b, zero), b);
  b = fma(d.to_end, carry, b);
  const VecF total = reward + shift_down<1>(b, carry);
  store(a.returns + t, total);
  if (a.advantages != nullptr) store(a.advantages + t, total - value);
  carry = splat(b[0]);
}

enum class Live { kNone, kSome, kAll };

AREAL_INLINE Live live_tokens(const bool* mask) {
  constexpr int kWordBytes = kLanes < 8 ? kLanes : 8;
  uint64_t any = 0, all = 0x0101010101010101u;
  for (int i = 0; i < kLanes; i += kWordBytes) {
    uint64_t word = kLanes < 8 ? 0x0101010100000000u : 0;
    std::memcpy(&word, mask + i, kWordBytes);
    any |= kLanes < 8 ? word & 0xffffffffu : word;
    all &= word;
  }
  return any == 0 ? Live::kNone : all == 0x0101010101010101u ? Live::kAll : Live::kSome;
}

AREAL_INLINE void scan_sequence(const GaeArgs<float>& a, const Decay<float>& decay, const VectorDecay& vector_decay,
                                int64_t begin, int64_t end, float terminal) {
  VecF carry = splat(terminal);
  int64_t t = end;
  for (; t - begin >= kLanes; t -= kLanes) {
    const int64_t first = t - kLanes;
    switch (a.loss_mask == nullptr ? Live::kAll : live_tokens(a.loss_mask + first)) {
      case Live::kAll:
        scan_vector(a, vector_decay, first, carry);
        break;
      case Live::kNone:
        if (a.advantages != nullptr) store(a.advantages + first, splat(0.0f));
        store(a.returns + first, splat(0.0f));
        break;
      case Live::kSome:
        float last = carry[0];
        scan_tokens(a, decay, first, t, last);
        carry = splat(last);
        break;
    }
  }
  float last = carry[0];
  scan_tokens(a, decay, begin, t, last);
}

// Calls scan(begin, end, terminal reward) for the sequences [begin, end); the outputs of failed ones are zeroed.
template <class Real, class Scan>
AREAL_INLINE void for_each_scan(const GaeArgs<Real>& a, int64_t begin, int64_t end, const Scan& scan) {
  for (int64_t s = begin; s < end; ++s) {
    const int64_t first = a.segments.cu_seqlens[s], last = a.segments.cu_seqlens[s + 1];
    const double terminal = a.terminal != nullptr ? a.terminal[s] : 0;
    if (terminal == terminal) {
      scan(first, last, static_cast<Real>(terminal));
      continue;
    }
    for (int64_t t = first; t < last; ++t) {
      a.returns[t] = 0;
      if (a.advantages != nullptr) a.advantages[t] = 0;
    }
  }
}

}  // namespace

void gae_sequences(const GaeArgs<float>& args, int64_t begin, int64_t end) {
  const Decay<float> decay = make_decay(args);
  const VectorDecay vector_decay = make_vector_decay(args);
  for_each_scan(args, begin, end, [&](int64_t first, int64_t last, float terminal) __attribute__((always_inline)) {
    scan_sequence(args, decay, vector_decay, first, last, terminal);
  });
}

void gae_sequences(const GaeArgs<double>& args, int64_t begin, int64_t end) {
  const Decay<double> decay = make_decay(args);
  for_each_scan(args, begin, end, [&](int64_t first, int64_t last, double terminal) __attribute__((always_inline)) {
    scan_tokens(args, decay, first, last, terminal);
  });
}

}  // namespace areal::AREAL_ISA
