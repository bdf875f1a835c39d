// Normalisation, rotary positions with the write to the KV cache, and the softmax of a row of logits.
#include "base/simd.h"
#include "decode/kernels_cpu.h"

namespace areal::AREAL_ISA {

using decode::cache_slot;
using decode::kPage;
using decode::KvLayer;
using decode::RmsNormArgs;
using decode::RopeArgs;
using decode::SoftmaxTerms;

namespace {

// Rotates the pairs (x[j], x[j + half]) of consecutive heads. With `half` known to the compiler the loop becomes a few
// vector instructions, of any width.
AREAL_INLINE void rotate(float* __restrict x, int64_t heads, const float* __restrict cos, const float* __restrict sin,
                         int64_t half, float scale) {
  for (; heads > 0; --heads, x += 2 * half) {
    for (int64_t j = 0; j < half; ++j) {
      const float u = x[j], w = x[j + half], c = cos[j] * scale, s = sin[j] * scale;
      x[j] = u * c - w * s;
      x[j + half] = w * c + u * s;
    }
  }
}

void rotate_heads(float* x, int64_t heads, const float* cos, const float* sin, int64_t half, float scale) {
  switch (half) {
    case 8:
      return rotate(x, heads, cos, sin, 8, scale);
    case 16:
      return rotate(x, heads, cos, sin, 16, scale);
    case 32:
      return rotate(x, heads, cos, sin, 32, scale);
    case 64:
      return rotate(x, heads, cos, sin, 64, scale);
    default:
      return rotate(x, heads, cos, sin, half, scale);
  }
}

AREAL_INLINE void write_kv(const KvLayer& kv, const float* k, const float* v, float* head, int64_t offset) {
  for (int64_t d = 0; d < kv.head_dim; ++d) head[d * kPage + offset] = k[d];
  float* values = head + kPage * kv.head_dim + offset * kv.value_ld;
  std::memcpy(values, v, static_cast<size_t>(kv.head_dim) * sizeof(float));
  for (int64_t d = kv.head_dim; d < kv.value_ld; ++d) values[d] = 0.0f;
}

}  // namespace

void decode_rms_norm(const RmsNormArgs& a) {
  const int64_t padded = (a.size + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < a.rows; ++i) {
    const float* x = a.x + (a.row_index == nullptr ? i : a.row_index[i]) * a.ldx;
    float* out = a.out + i * a.ldo;
    VecF square[2] = {splat(0.0f), splat(0.0f)};
    for (int64_t j = 0; j < padded; j += kLanes) {
      const VecF v = load(x + j);
      square[(j / kLanes) % 2] = fma(v, v, square[(j / kLanes) % 2]);
    }
    const float mean = reduce_add(square[0] + square[1]) / static_cast<float>(a.size);
    const VecF scale = splat(1.0f / __builtin_sqrtf(mean + a.eps));
    for (int64_t j = 0; j < padded; j += kLanes) store(out + j, load(x + j) * scale * load(a.weight + j));
  }
}

void decode_rope(const RopeArgs& a) {
  const int64_t dim = a.kv.head_dim, half = dim / 2;
  const float q_scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  for (int64_t i = a.row_begin; i < a.row_end; ++i) {
    const int64_t position = a.batch.position[i];
    const float *cos = a.cos + position * half, *sin = a.sin + position * half;
    float *q = a.qkv + i * a.ld, *k = q + a.heads * dim, *v = k + a.kv.kv_heads * dim;
    rotate_heads(q, a.heads, cos, sin, half, q_scale);
    rotate_heads(k, a.kv.kv_heads, cos, sin, half, 1.0f);
    const int64_t slot = cache_slot(position, a.batch.prompt_size[i]);
    float* page = a.kv.pages + a.batch.page_table[i][slot / kPage] * a.kv.kv_heads * a.kv.head_floats;
    for (int64_t h = 0; h < a.kv.kv_heads; ++h)
      write_kv(a.kv, k + h * dim, v + h * dim, page + h * a.kv.head_floats, slot % kPage);
  }
}

SoftmaxTerms decode_softmax_terms(const float* logits, int64_t size, float inverse_temperature, float* terms) {
  const int64_t whole = size / kLanes * kLanes;
  VecF top = splat(-kInf);
  for (int64_t j = 0; j < whole; j += kLanes) top = max(load(logits + j), top);
  float m = reduce_max(top);
  for (int64_t j = whole; j < size; ++j) m = logits[j] > m ? logits[j] : m;

  constexpr int64_t kBlock = 256;  // short fp32 chains; the blocks add up in fp64
  const VecF shift = splat(m), scale = splat(inverse_temperature);
  double total = 0.0;
  for (int64_t begin = 0; begin < whole; begin += kBlock) {
    const int64_t end = begin + kBlock < whole ? begin + kBlock : whole;
    VecF sum = splat(0.0f);
    for (int64_t j = begin; j < end; j += kLanes) {
      const VecF e = exp((load(logits + j) - shift) * scale);
      store(terms + j, e);
      sum += e;
    }
    total += static_cast<double>(reduce_add(sum));
  }
  for (int64_t j = whole; j < size; ++j) {
    terms[j] = exp(splat((logits[j] - m) * inverse_temperature))[0];
    total += static_cast<double>(terms[j]);
  }
  return {m, total};
}

int64_t decode_find_cumulative(const float* terms, int64_t size, double target) {
  constexpr int64_t kBlock = 16 * kLanes;
  double before = 0.0;
  int64_t j = 0;
  for (; j + kBlock <= size; j += kBlock) {
    VecF sum = splat(0.0f);
    for (int64_t i = 0; i < kBlock; i += kLanes) sum += load(terms + j + i);
    const double after = before + static_cast<double>(reduce_add(sum));
    if (after > target) break;
    before = after;
  }
  for (; j < size; ++j) {
    before += static_cast<double>(terms[j]);
    if (before > target) return j;
  }
  for (j = size - 1; j > 0 && !(terms[j] > 0.0f); --j) {
  }
  return j;
}

}  // namespace areal::AREAL_ISA
