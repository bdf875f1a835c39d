#include "ops/layers/attention_cpu.h"

#include <cmath>

#include "ops/layers/vector_tail.h"

namespace areal::AREAL_ISA {
namespace {

using layers::KeyScratch;
using layers::kQueryBlock;
using layers::SequenceView;

constexpr int kColumnVectors = 2;  // column vectors in flight: with 4 queries, 8 independent sums hide the latency
constexpr int64_t kColumnStep = kColumnVectors * kLanes;
static_assert(layers::kPadColumns % kColumnStep == 0 && layers::kPadDim % kLanes == 0);

// Rotation works on half heads, which are often shorter than the vectors of AVX-512.
constexpr int64_t kPairs = 8;
typedef float Pairs __attribute__((vector_size(kPairs * 4)));

AREAL_INLINE VecF lane_numbers() {
  VecF v;
  for (int i = 0; i < kLanes; ++i) v[i] = static_cast<float>(i);
  return v;
}

// products[r][j] = queries[r] . columns[:, j] for the columns [0, limit), and up to the next multiple of the step;
// fn(r, column, value) receives each vector of them.
template <int kRows, class Fn>
AREAL_INLINE void multiply_columns(const float* queries, int64_t query_stride, const float* columns, int64_t stride,
                                   int64_t head_dim, int64_t limit, const Fn& fn) {
  for (int64_t column = 0; column < limit; column += kColumnStep) {
    VecF sum[kRows][kColumnVectors] = {};
    for (int64_t d = 0; d < head_dim; ++d) {
      const float* c = columns + d * stride + column;
      VecF keys[kColumnVectors];
      for (int v = 0; v < kColumnVectors; ++v) keys[v] = load(c + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const VecF q = splat(queries[r * query_stride + d]);
        for (int v = 0; v < kColumnVectors; ++v) sum[r][v] = fma(q, keys[v], sum[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kColumnVectors; ++v) fn(r, column + v * kLanes, sum[r][v]);
    }
  }
}

// out[r] = sum over j < limit of weights[r][j] rows[j]; fn(r, d, value) receives each vector of head_dim.
template <int kRows, class Fn>
AREAL_INLINE void combine_rows(const float* weights, int64_t weight_stride, const float* rows, int64_t stride,
                               int64_t head_dim, int64_t limit, const Fn& fn) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    VecF even[kRows] = {}, odd[kRows] = {};  // two sums each hide the latency
    int64_t j = 0;
    for (; j + 2 <= limit; j += 2) {
      const VecF a = load(rows + j * stride + d), b = load(rows + (j + 1) * stride + d);
      for (int r = 0; r < kRows; ++r) {
        even[r] = fma(splat(weights[r * weight_stride + j]), a, even[r]);
        odd[r] = fma(splat(weights[r * weight_stride + j + 1]), b, odd[r]);
      }
    }
    if (j < limit) {
      const VecF a = load(rows + j * stride + d);
      for (int r = 0; r < kRows; ++r) even[r] = fma(splat(weights[r * weight_stride + j]), a, even[r]);
    }
    for (int r = 0; r < kRows; ++r) fn(r, d, even[r] + odd[r]);
  }
}

// Calls fn for blocks of kQueryBlock queries, then for single ones: fn.template operator()<count>(first query).
template <class Fn>
AREAL_INLINE void for_each_query_block(int64_t rows, const Fn& fn) {
  int64_t i = 0;
  for (; i + kQueryBlock <= rows; i += kQueryBlock) fn.template operator()<kQueryBlock>(i);
  for (; i < rows; ++i) fn.template operator()<1>(i);
}

template <int kRows>
AREAL_INLINE void forward_block(const SequenceView& s, const KeyScratch& scratch, int64_t head, int64_t first) {
  const int64_t visible = s.prefix + first + 1, limit = visible + kRows - 1;  // of the first query, of the last
  const VecF lanes = lane_numbers();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  const float* q = s.q + first * s.qkv_stride + head * s.head_dim;
  VecF maxima[kRows];
  for (int r = 0; r < kRows; ++r) maxima[r] = splat(-kInf);
  multiply_columns<kRows>(q, s.qkv_stride, scratch.k_columns, scratch.columns, s.head_dim, limit,
                          [&](int r, int64_t column, VecF value) {
                            const VecI hidden = lanes >= static_cast<float>(visible + r - column);
                            const VecF score = select(hidden, splat(-kInf), value * scale);
                            maxima[r] = max(maxima[r], score);
                            store(scratch.weights + r * scratch.columns + column, score);
                          });
  float inverse[kRows];
  for (int r = 0; r < kRows; ++r) {
    float* weights = scratch.weights + r * scratch.columns;
    const float top = reduce_max(maxima[r]);
    VecF sum{};
    for (int64_t j = 0; j < limit; j += kLanes) {
      const VecF weight = exp(load(weights + j) - top);
      store(weights + j, weight);
      sum += weight;
    }
    const float total = reduce_add(sum);
    inverse[r] = 1.0f / total;
    s.lse[(first + r) * s.heads + head] = top + std::log(total);
  }
  float* out = s.out + first * s.out_stride + head * s.head_dim;
  combine_rows<kRows>(scratch.weights, scratch.columns, scratch.v_rows, scratch.padded_dim, s.head_dim, limit,
                      [&](int r, int64_t d, VecF value) {
                        store_some(out + r * s.out_stride + d, value * inverse[r], s.head_dim - d);
                      });
}

// Copies the block's queries and upstream gradients to padded scratch rows; returns dout . out of each.
template <int kRows>
AREAL_INLINE void load_block(const SequenceView& s, const KeyScratch& scratch, int64_t head, int64_t first,
                             float (&dot)[kRows]) {
  for (int r = 0; r < kRows; ++r) {
    const float* q = s.q + (first + r) * s.qkv_stride + head * s.head_dim;
    const int64_t at = (first + r) * s.out_stride + head * s.head_dim;
    VecF products{};
    for_each_vector(s.head_dim, [&](int64_t d, int64_t count) {
      const VecF upstream = load_some(s.grad_out + at + d, count);
      products = fma(upstream, load_some(s.out + at + d, count), products);
      store(scratch.grad_out + r * scratch.padded_dim + d, upstream);
      store(scratch.queries + r * scratch.padded_dim + d, load_some(q + d, count));
    });
    dot[r] = reduce_add(products);
  }
}

// grad[j] += sum over the block of weights[r][j] rows[r].
template <int kRows>
AREAL_INLINE void scatter_rows(const float* weights, const KeyScratch& scratch, const float* rows, float* grad,
                               int64_t head_dim, int64_t limit) {
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    VecF row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = load(rows + r * scratch.padded_dim + d);
    for (int64_t j = 0; j < limit; ++j) {
      float* out = grad + j * scratch.padded_dim + d;
      VecF sum = load(out);
      for (int r = 0; r < kRows; ++r) sum = fma(splat(weights[r * scratch.columns + j]), row[r], sum);
      store(out, sum);
    }
  }
}

template <int kRows>
AREAL_INLINE void backward_block(const SequenceView& s, const KeyScratch& scratch, int64_t head, int64_t first) {
  const int64_t visible = s.prefix + first + 1, limit = visible + kRows - 1;
  const VecF lanes = lane_numbers();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim));
  float dot[kRows], lse[kRows];
  load_block<kRows>(s, scratch, head, first, dot);
  for (int r = 0; r < kRows; ++r) lse[r] = s.lse[(first + r) * s.heads + head];
  multiply_columns<kRows>(scratch.queries, scratch.padded_dim, scratch.k_columns, scratch.columns, s.head_dim, limit,
                          [&](int r, int64_t column, VecF value) {
                            const VecI hidden = lanes >= static_cast<float>(visible + r - column);
                            const VecF score = select(hidden, splat(-kInf), value * scale - lse[r]);
                            store(scratch.weights + r * scratch.columns + column, exp(score));
                          });
  multiply_columns<kRows>(scratch.grad_out, scratch.padded_dim, scratch.v_columns, scratch.columns, s.head_dim, limit,
                          [&](int r, int64_t column, VecF value) {
                            const int64_t at = r * scratch.columns + column;
                            const VecF weight = load(scratch.weights + at);
                            // A hidden column's value may come from stale scratch: select, never multiply by 0.
                            const VecI hidden = lanes >= static_cast<float>(visible + r - column);
                            const VecF grad = select(hidden, splat(0.0f), weight * (value - dot[r]) * scale);
                            store(scratch.grad_scores + at, grad);
                          });
  float* grad_q = s.grad_q + first * s.qkv_stride + head * s.head_dim;
  combine_rows<kRows>(
      scratch.grad_scores, scratch.columns, scratch.k_rows, scratch.padded_dim, s.head_dim, limit,
      [&](int r, int64_t d, VecF value) { store_some(grad_q + r * s.qkv_stride + d, value, s.head_dim - d); });
  scatter_rows<kRows>(scratch.grad_scores, scratch, scratch.queries, scratch.grad_k, s.head_dim, limit);
  scatter_rows<kRows>(scratch.weights, scratch, scratch.grad_out, scratch.grad_v, s.head_dim, limit);
}

}  // namespace

void attention_rotate(float* rows, int64_t count, int64_t stride, int64_t heads, int64_t head_dim, const float* angles,
                      float direction) {
  const int64_t half = head_dim / 2;
  for (int64_t row = 0; row < count; ++row) {
    const float* cosines = angles + row * head_dim;
    const float* sines = cosines + half;
    for (int64_t head = 0; head < heads; ++head) {
      float* left = rows + row * stride + head * head_dim;
      float* right = left + half;
      int64_t i = 0;
      for (; i + kPairs <= half; i += kPairs) {
        Pairs c, s, x, y;
        std::memcpy(&c, cosines + i, sizeof c);
        std::memcpy(&s, sines + i, sizeof s);
        std::memcpy(&x, left + i, sizeof x);
        std::memcpy(&y, right + i, sizeof y);
        s *= direction;
        const Pairs turned_x = x * c - y * s, turned_y = y * c + x * s;
        std::memcpy(left + i, &turned_x, sizeof turned_x);
        std::memcpy(right + i, &turned_y, sizeof turned_y);
      }
      for (; i < half; ++i) {
        const float c = cosines[i], s = sines[i] * direction, x = left[i], y = right[i];
        left[i] = x * c - y * s;
        right[i] = y * c + x * s;
      }
    }
  }
}

void attention_load(const SequenceView& s, const KeyScratch& scratch, int64_t at) {
  for (int64_t row = 0; row < s.rows; ++row) {
    const float* k = s.k + row * s.qkv_stride;
    const float* v = s.v + row * s.qkv_stride;
    const int64_t column = at + row, start = column * scratch.padded_dim;
    for (int64_t d = 0; d < s.head_dim; ++d) scratch.k_columns[d * scratch.columns + column] = k[d];
    if (scratch.v_columns == nullptr) {
      for_each_vector(s.head_dim,
                      [&](int64_t d, int64_t n) { store(scratch.v_rows + start + d, load_some(v + d, n)); });
      continue;
    }
    for (int64_t d = 0; d < s.head_dim; ++d) scratch.v_columns[d * scratch.columns + column] = v[d];
    for_each_vector(s.head_dim, [&](int64_t d, int64_t n) {
      store(scratch.k_rows + start + d, load_some(k + d, n));
      store(scratch.grad_k + start + d, VecF{});
      store(scratch.grad_v + start + d, VecF{});
    });
  }
}

void attention_forward_sequence(const SequenceView& s, const KeyScratch& scratch) {
  for (int64_t head = 0; head < s.queries_per_key; ++head) {
    for_each_query_block(s.rows, [&]<int kRows>(int64_t first) { forward_block<kRows>(s, scratch, head, first); });
  }
}

void attention_backward_sequence(const SequenceView& s, const KeyScratch& scratch) {
  for (int64_t head = 0; head < s.queries_per_key; ++head) {
    for_each_query_block(s.rows, [&]<int kRows>(int64_t first) { backward_block<kRows>(s, scratch, head, first); });
  }
}

void attention_store_gradient(const SequenceView& s, const KeyScratch& scratch, int64_t at) {
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t start = (at + row) * scratch.padded_dim;
    for_each_vector(s.head_dim, [&](int64_t d, int64_t n) {
      store_some(s.grad_k + row * s.qkv_stride + d, load(scratch.grad_k + start + d), n);
      store_some(s.grad_v + row * s.qkv_stride + d, load(scratch.grad_v + start + d), n);
    });
  }
}

}  // namespace areal::AREAL_ISA
