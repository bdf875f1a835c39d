// The value loss of one block of tokens: fp32 a vector at a time, fp64 token by token. Statistics are summed in fp64.
#include "base/simd.h"
#include "ops/loss/value_loss_math.h"

namespace areal::AREAL_ISA {
namespace {

using loss::ValueLossArgs;

typedef uint8_t VecB __attribute__((vector_size(kLanes)));
typedef float HalfF __attribute__((vector_size(kLanes * 2)));
typedef double HalfD __attribute__((vector_size(kLanes * 4)));

struct VectorLane {
  using Value = VecF;
  using Mask = VecI;
  static AREAL_INLINE VecF splat(double x) { return AREAL_ISA::splat(static_cast<float>(x)); }
  static AREAL_INLINE VecF select(VecI mask, VecF yes, VecF no) { return mask ? yes : no; }
};

// fp64 sums of the lower and of the upper half of the lanes.
struct WideSums {
  HalfD half[loss::kValueStatCount][2] = {};

  AREAL_INLINE void add(loss::ValueStat stat, VecF x) {
    HalfF parts[2];
    std::memcpy(parts, &x, sizeof x);
    for (int i = 0; i < 2; ++i) half[stat][i] += __builtin_convertvector(parts[i], HalfD);
  }
  AREAL_INLINE void add_target(VecF value, VecF target) {
    HalfF values[2], targets[2];
    std::memcpy(values, &value, sizeof value);
    std::memcpy(targets, &target, sizeof target);
    for (int i = 0; i < 2; ++i) {
      const HalfD wide = __builtin_convertvector(targets[i], HalfD);
      const HalfD error = wide - __builtin_convertvector(values[i], HalfD);
      half[loss::kReturnSum][i] += wide;
      half[loss::kReturnSquare][i] += wide * wide;
      half[loss::kErrorSum][i] += error;
      half[loss::kErrorSquare][i] += error * error;
    }
  }
};

// kLanes tokens from arrays that hold so many.
AREAL_INLINE void add_vector(const loss::ValueBounds<VecF>& bounds, const float* values, const float* old_values,
                             const float* returns, const bool* mask, float* grad, WideSums& sums) {
  VecB bytes;
  std::memcpy(&bytes, mask, sizeof bytes);
  const VecI live = __builtin_convertvector(bytes, VecI) != 0;
  const VecF zero = splat(0.0f), value = select(live, load(values), zero), target = select(live, load(returns), zero);
  const VecF old_value = select(live, load(old_values), zero);
  const loss::ValueTerm<VecF> result = loss::value_term<VectorLane>(bounds, value, old_value, target);
  store(grad, result.grad);
  sums.add(loss::kValueLiveTokens, select(live, splat(1.0f), zero));
  sums.add(loss::kValueTerm, result.term);
  sums.add(loss::kValueClipped, result.clipped);
  sums.add(loss::kValueSum, value);
  sums.add_target(value, target);
}

AREAL_INLINE void accumulate(const ValueLossArgs<float>& a, int64_t begin, int64_t end,
                             double (&totals)[loss::kValueStatCount]) {
  const loss::ValueBounds<VecF> bounds = {VectorLane::splat(a.clip), VectorLane::splat(a.huber_delta)};
  const float* const old_values = a.old_values != nullptr ? a.old_values : a.values;
  WideSums sums;
  int64_t t = begin;
  for (; t + kLanes <= end; t += kLanes) {
    add_vector(bounds, a.values + t, old_values + t, a.returns + t, a.loss_mask + t, a.grad + t, sums);
  }
  if (t < end) {  // copied to full vectors whose last lanes are masked
    float lanes[4][kLanes] = {};
    bool mask[kLanes] = {};
    const size_t count = static_cast<size_t>(end - t), bytes = count * sizeof(float);
    std::memcpy(lanes[0], a.values + t, bytes);
    std::memcpy(lanes[1], old_values + t, bytes);
    std::memcpy(lanes[2], a.returns + t, bytes);
    std::memcpy(mask, a.loss_mask + t, count);
    add_vector(bounds, lanes[0], lanes[1], lanes[2], mask, lanes[3], sums);
    std::memcpy(a.grad + t, lanes[3], bytes);
  }
  for (int stat = 0; stat < loss::kValueStatCount; ++stat) {
    for (int i = 0; i < kLanes; ++i) totals[stat] += sums.half[stat][i / (kLanes / 2)][i % (kLanes / 2)];
  }
}

AREAL_INLINE void accumulate(const ValueLossArgs<double>& a, int64_t begin, int64_t end,
                             double (&totals)[loss::kValueStatCount]) {
  for (int64_t t = begin; t < end; ++t) {
    a.grad[t] = 0;
    if (!a.loss_mask[t]) continue;
    const double old_value = a.old_values != nullptr ? a.old_values[t] : a.values[t];
    const loss::ValueTerm<double> result =
        loss::value_term<loss::ScalarLane<double>>({a.clip, a.huber_delta}, a.values[t], old_value, a.returns[t]);
    loss::value_stats(result, a.values[t], a.returns[t], totals);
    a.grad[t] = result.grad;
  }
}

template <class Real>
AREAL_INLINE void run_block(const ValueLossArgs<Real>& a, int64_t block) {
  const int64_t begin = block * loss::kValueBlockTokens, limit = begin + loss::kValueBlockTokens;
  const int64_t blocks = loss::value_block_count(a.tokens);
  double totals[loss::kValueStatCount] = {};
  accumulate(a, begin, limit < a.tokens ? limit : a.tokens, totals);
  for (int stat = 0; stat < loss::kValueStatCount; ++stat) a.scratch[stat * blocks + block] = totals[stat];
}

}  // namespace

void value_loss_block(const ValueLossArgs<float>& args, int64_t block) { run_block(args, block); }
void value_loss_block(const ValueLossArgs<double>& args, int64_t block) { run_block(args, block); }

}  // namespace areal::AREAL_ISA
