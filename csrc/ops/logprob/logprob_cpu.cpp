#include "ops/logprob/logprob_cpu.h"

#include "base/simd.h"

namespace areal::AREAL_ISA {
namespace {

// exp2_of_product's lower bound. A term below 2^-125 counts as 2^-125: nothing against a sum that is at least 1.
constexpr float kMinExponent = -125.0f;
constexpr int kPair = 2 * kLanes;
constexpr uintptr_t kPageBytes = 4096, kLineBytes = 64;

// The hardware prefetcher follows a page to its end and has to find each new one: the first lines of the pages that
// begin in the next block are asked for before this one is read. Fp32, V = 151,936, from memory: 58 -> 50 us a row
// (AVX-512, a core that reads 13 GB/s), 62 -> 53 (AVX2).
template <class T>
AREAL_INLINE void announce_pages(const T* next, int64_t count) {
  const auto begin = reinterpret_cast<uintptr_t>(next), end = begin + static_cast<uintptr_t>(count) * sizeof(T);
  for (uintptr_t page = (begin + kPageBytes - 1) / kPageBytes * kPageBytes; page < end; page += kPageBytes) {
    for (uintptr_t line = 0; line < 4; ++line) {
      __builtin_prefetch(reinterpret_cast<const char*>(page + line * kLineBytes), 0, 2);
    }
  }
}

// Fetches the pair at p to L1.
template <class T>
AREAL_INLINE void fetch_pair(const T* p) {
  for (size_t i = 0; i < kPair * sizeof(T); i += kLineBytes) __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

// The last elements of a block, fewer than a pair, filled up.
template <class T>
AREAL_INLINE void load_tail(const T* x, int64_t count, float fill, VecF& a, VecF& b) {
  float tail[kPair];
  for (int i = 0; i < kPair; ++i) tail[i] = i < count ? to_float(x[i]) : fill;
  load_pair(tail, a, b);
}

// Four maxima, or the latency of one would bound the loop. NaN is passed over: max keeps its second argument then.
template <class T>
AREAL_INLINE float block_max(const T* x, int64_t count) {
  VecF top[4] = {splat(-kInf), splat(-kInf), splat(-kInf), splat(-kInf)}, a, b;
  int64_t i = 0;
  for (; i + 2 * kPair <= count; i += 2 * kPair) {
    for (int half = 0; half < 2; ++half) {
      load_pair(x + i + half * kPair, a, b);
      top[2 * half] = max(a, top[2 * half]);
      top[2 * half + 1] = max(b, top[2 * half + 1]);
    }
  }
  for (; i < count; i += kPair) {
    load_tail(x + i, count - i, -kInf, a, b);
    top[0] = max(a, top[0]);
    top[1] = max(b, top[1]);
  }
  return reduce_max(max(max(top[0], top[1]), max(top[2], top[3])));
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
AREAL_INLINE logprob::Partial<double> forward_block(const T* x, int64_t count, float scale) {
  announce_pages(x + count, count);
  const float top = block_max(x, count);
  const float shift = top == -kInf ? 0.0f : top;  // -inf - -inf would be NaN

  const VecF scales = splat(scale), least = splat(kMinExponent / scale);
  VecF sum = splat(0.0f), weighted = splat(0.0f), a, b;
  const auto add = [&](VecF v) __attribute__((always_inline)) {
    const VecF d = max(least, v - shift);  // a NaN stays
    const VecF e = exp2_of_product(d, scales);
    sum += e;
    weighted = fma(e, d, weighted);
  };
  int64_t i = 0;
  for (; i + kPair <= count; i += kPair) {
    fetch_pair(x + i + count);  // of the next block, while this one computes
    load_pair(x + i, a, b);
    add(a);
    add(b);
  }
  if (i < count) {
    load_tail(x + i, count - i, -kInf, a, b);
    add(a);
    add(b);
  }
  const double total = wide_sum(sum), total_weighted = wide_sum(weighted) * static_cast<double>(scale);
  if (top == -kInf) return {top, total_weighted * 0, total_weighted * 0};  // 0, or NaN if a logit is NaN
  return {top, total, total_weighted};
}

// A scale so far from 1 that e d would leave float's range (temperature beyond 1e30 or below 1e-30): applied first.
template <class T>
logprob::Partial<double> forward_block_prescaled(const T* x, int64_t count, float scale) {
  float scaled[kLogprobBlock];
  const float top = block_max(x, count), shift = top == -kInf ? 0.0f : top;
  for (int64_t i = 0; i < count; ++i) scaled[i] = (to_float(x[i]) - shift) * scale;
  logprob::Partial<double> part = forward_block(scaled, count, 1.0f);
  part.max = top;
  return part;
}

AREAL_INLINE VecF gradient(VecF x, const logprob::RowGradient<float>& row) {
  const VecF t = fma(x - row.max, splat(row.scale), splat(-row.offset));
  const VecF p = exp2_of_product(max(splat(kMinExponent), t), splat(1.0f));
  return select(t < kMinExponent, splat(0.0f), p * fma(splat(row.slope), t, splat(row.constant)));
}

template <bool kMayBeNan, class T>
AREAL_INLINE void backward_block(const T* x, T* grad, int64_t count, const logprob::RowGradient<float>& row) {
  VecF a, b;
  int64_t i = 0;
  announce_pages(x + count, count);
  for (; i + kPair <= count; i += kPair) {
    fetch_pair(x + i + count);
    load_pair(x + i, a, b);
    if constexpr (kMayBeNan) {
      store_pair(grad + i, gradient(a, row), gradient(b, row));
    } else {
      store_pair_without_nan(grad + i, gradient(a, row), gradient(b, row));
    }
  }
  if (i < count) {
    float tail[kPair];
    load_tail(x + i, count - i, 0.0f, a, b);
    store_pair(tail, gradient(a, row), gradient(b, row));
    for (int j = 0; i + j < count; ++j) from_float(tail[j], grad + i + j);
  }
}

// Of numbers that are all finite; then no gradient of a finite logit is NaN, and a row with another has no finite
// log_sum.
AREAL_INLINE bool is_finite(const logprob::RowGradient<float>& row) {
  const float sum = (row.max + row.offset + row.scale + row.constant + row.slope) * 0.0f;
  return sum == 0.0f;
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
  return with_type(dtype, [&](auto tag) {
    const auto* x = static_cast<decltype(tag)>(logits);
    return scale >= 1e-30f && scale <= 1e30f ? forward_block(x, count, scale)
                                             : forward_block_prescaled(x, count, scale);
  });
}

void logprob_backward_block(const void* logits, void* grad, DType dtype, int64_t count,
                            const logprob::RowGradient<float>& row) {
  with_type(dtype, [&](auto tag) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(tag)>>;
    if (is_finite(row)) {
      backward_block<false>(static_cast<const T*>(logits), static_cast<T*>(grad), count, row);
    } else {
      backward_block<true>(static_cast<const T*>(logits), static_cast<T*>(grad), count, row);
    }
  });
}

}  // namespace areal::AREAL_ISA
