#include "ops/logprob/logprob_cpu.h"

#include "base/simd.h"

namespace areal::AREAL_ISA {
namespace {

// exp2_in_range's lower bound. A term below 2^-125 counts as 2^-125: nothing against a sum that is at least 1.
constexpr float kMinExponent = -125.0f;

// Calls fn with a vector of the elements at each offset; past the end it is filled up with -inf.
template <class T, class Fn>
AREAL_INLINE void for_each_vector(const T* x, int64_t count, const Fn& fn) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) fn(i, load(x + i));
  if (i == count) return;
  float tail[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) tail[lane] = i + lane < count ? to_float(x[i + lane]) : -kInf;
  fn(i, load(tail));
}

// Four maxima, or the latency of one would bound the loop. NaN is passed over: max keeps its second argument then.
template <class T>
AREAL_INLINE float block_max(const T* x, int64_t count) {
  VecF a = splat(-kInf), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    a = max(load(x + i), a);
    b = max(load(x + i + kLanes), b);
    c = max(load(x + i + 2 * kLanes), c);
    d = max(load(x + i + 3 * kLanes), d);
  }
  for_each_vector(x + i, count - i, [&](int64_t, VecF v) { a = max(v, a); });
  return reduce_max(max(max(a, b), max(c, d)));
}

// In double: of a sum near 1, as where one token is all but sure, the digits behind the 1 are what matters.
AREAL_INLINE double wide_sum(VecF v) {
  float lane[kLanes];
  store(lane, v);
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += static_cast<double>(lane[i]);
  return sum;
}

template <class T>
logprob::Partial<double> forward_block(const T* x, int64_t count, float scale) {
  const float top = block_max(x, count);
  const float shift = top == -kInf ? 0.0f : top;  // -inf - -inf would be NaN

  VecF sum = splat(0.0f), weighted = splat(0.0f);
  for_each_vector(x, count, [&](int64_t i, VecF v) {
    __builtin_prefetch(x + i + count);  // the next block, while this one computes: 85 -> 55 us a row (AVX2, L3)
    const VecF t = max(splat(kMinExponent), (v - shift) * scale);  // a NaN stays
    const VecF e = exp2_in_range(t);
    sum += e;
    weighted = fma(e, t, weighted);
  });
  const double total = wide_sum(sum), total_weighted = wide_sum(weighted);
  if (top == -kInf) return {top, total_weighted * 0, total_weighted * 0};  // 0, or NaN if a logit is NaN
  return {top, total, total_weighted};
}

AREAL_INLINE VecF gradient(VecF x, const logprob::RowGradient<float>& row) {
  const VecF t = (x - row.max) * row.scale - row.offset;
  const VecF p = exp2_in_range(max(splat(kMinExponent), t));
  return select(t < kMinExponent, splat(0.0f), p * fma(splat(row.slope), t, splat(row.constant)));
}

template <class T>
void backward_block(const T* x, T* grad, int64_t count, logprob::RowGradient<float> row) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(grad + i, gradient(load(x + i), row));
  if (i < count) {
    float tail[kLanes] = {};
    for (int lane = 0; i + lane < count; ++lane) tail[lane] = to_float(x[i + lane]);
    store(tail, gradient(load(tail), row));
    for (int lane = 0; i + lane < count; ++lane) from_float(tail[lane], grad + i + lane);
  }
}

// Calls fn with a null pointer of the element type. (dispatch_dtype would emit the code of its exception here.)
template <class Fn>
AREAL_INLINE auto with_type(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(static_cast<const BFloat16*>(nullptr));
    case DType::kFloat16:
      return fn(static_cast<const Float16*>(nullptr));
    default:
      return fn(static_cast<const float*>(nullptr));
  }
}

}  // namespace

float logprob_load(const void* element, DType dtype) {
  return with_type(dtype, [&](auto tag) { return to_float(*static_cast<decltype(tag)>(element)); });
}

void logprob_store(float value, void* element, DType dtype) {
  with_type(dtype, [&](auto tag) {
    from_float(value, static_cast<std::remove_const_t<std::remove_pointer_t<decltype(tag)>>*>(element));
  });
}

logprob::Partial<double> logprob_forward_block(const void* logits, DType dtype, int64_t count, float scale) {
  return with_type(dtype, [&](auto tag) { return forward_block(static_cast<decltype(tag)>(logits), count, scale); });
}

void logprob_backward_block(const void* logits, void* grad, DType dtype, int64_t count,
                            const logprob::RowGradient<float>& row) {
  with_type(dtype, [&](auto tag) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    backward_block(static_cast<const T*>(logits), static_cast<T*>(grad), count, row);
  });
}

}  // namespace areal::AREAL_ISA
