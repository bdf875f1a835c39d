// Attention of single rows over paged keys and values. Keys are stored transposed, so a vector holds the scores of
// consecutive positions and no horizontal sum is needed; values are stored by rows, so a vector holds consecutive
// output dimensions. The query heads that share a KV head pass over its pages together.
#include "base/simd.h"
#include "decode/kernels_cpu.h"

namespace areal::AREAL_ISA {

using decode::AttentionArgs;
using decode::cache_slot;
using decode::kPage;

namespace {

constexpr int kPageVecs = static_cast<int>(kPage) / kLanes;
constexpr int kGroup = 4;      // query heads in flight
constexpr int kValueVecs = 2;  // vectors of the output in flight, per query head

// The pages of one row and KV head.
struct Pages {
  const float* base;
  const int32_t* table;
  int64_t page_floats;
  int64_t dim, value_ld;
  int64_t count;                 // slots
  int64_t hole_begin, hole_end;  // slots between prompt and response, which hold nothing
  AREAL_INLINE const float* keys(int64_t page) const { return base + table[page] * page_floats; }
  AREAL_INLINE const float* values(int64_t page) const { return keys(page) + kPage * dim; }
};

// scores[h][slot] = q[h] . k[slot] over Count pages from `page` on; empty slots come out as anything.
template <int Heads, int Count>
AREAL_INLINE void score_pages(const Pages& p, int64_t page, const float* q, float* scores, int64_t ld_scores) {
  const float* keys[Count];
  VecF acc[Count][Heads][kPageVecs];
  for (int b = 0; b < Count; ++b) {
    keys[b] = p.keys(page + b);
    for (int h = 0; h < Heads; ++h)
      for (int j = 0; j < kPageVecs; ++j) acc[b][h][j] = splat(0.0f);
  }
#pragma GCC unroll 2
  for (int64_t d = 0; d < p.dim; ++d) {
#pragma GCC unroll 4
    for (int h = 0; h < Heads; ++h) {
      const VecF x = splat(q[h * p.dim + d]);
#pragma GCC unroll 4
      for (int b = 0; b < Count; ++b) {
#pragma GCC unroll 4
        for (int j = 0; j < kPageVecs; ++j) acc[b][h][j] = fma(x, load(keys[b] + d * kPage + j * kLanes), acc[b][h][j]);
      }
    }
  }
  for (int b = 0; b < Count; ++b)
    for (int h = 0; h < Heads; ++h)
      for (int j = 0; j < kPageVecs; ++j) store(scores + h * ld_scores + (page + b) * kPage + j * kLanes, acc[b][h][j]);
}

template <int Heads>
AREAL_INLINE void score(const Pages& p, const float* q, float* scores, int64_t ld_scores) {
  constexpr int kTogether = Heads * kPageVecs <= 2 ? 2 : 1;  // enough chains to hide the latency of the adds
  const int64_t pages = (p.count + kPage - 1) / kPage;
  int64_t page = 0;
  for (; page + kTogether <= pages; page += kTogether) score_pages<Heads, kTogether>(p, page, q, scores, ld_scores);
  if (page < pages) score_pages<Heads, 1>(p, page, q, scores, ld_scores);
}

// Turns scores into e^(score - max) over whole pages (zero in empty slots) and returns the sum.
AREAL_INLINE float softmax(const Pages& p, float* scores) {
  const int64_t padded = (p.count + kPage - 1) / kPage * kPage;
  for (int64_t j = p.hole_begin; j < p.hole_end; ++j) scores[j] = -kInf;
  for (int64_t j = p.count; j < padded; ++j) scores[j] = -kInf;
  VecF top = load(scores);
  for (int64_t j = kLanes; j < padded; j += kLanes) top = max(top, load(scores + j));
  const VecF shift = splat(reduce_max(top));
  VecF sum = splat(0.0f);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const VecF e = exp(load(scores + j) - shift);
    store(scores + j, e);
    sum += e;
  }
  return reduce_add(sum);
}

// out[h] = sum over slots of weights[h][slot] * values[slot], for Vecs vectors from dimension d0. Two chains per
// output, over even and odd slots.
template <int Heads, int Vecs>
AREAL_INLINE void mix(const Pages& p, const float* weights, int64_t ld_weights, const float* inverse, float* out,
                      int64_t d0) {
  VecF acc[2][Heads][Vecs];
  for (int o = 0; o < 2; ++o)
    for (int h = 0; h < Heads; ++h)
      for (int j = 0; j < Vecs; ++j) acc[o][h][j] = splat(0.0f);
  for (int64_t begin = 0; begin < p.count; begin += kPage) {
    const float* values = p.values(begin / kPage) + d0;
    const int64_t end = p.hole_begin < p.hole_end && begin == p.hole_end - kPage ? p.hole_begin : p.count;
    const int64_t rows = end - begin < kPage ? end - begin : kPage;
    const float* weight = weights + begin;
    const auto add = [&](int o) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; ++j) {
        const VecF v = load(values + j * kLanes);
#pragma GCC unroll 4
        for (int h = 0; h < Heads; ++h) acc[o][h][j] = fma(splat(weight[h * ld_weights]), v, acc[o][h][j]);
      }
      values += p.value_ld;
      ++weight;
    };
    for (int64_t i = 0; i < rows / 2; ++i) {
      add(0);
      add(1);
    }
    if (rows % 2 == 1) add(0);
  }
  for (int h = 0; h < Heads; ++h) {
    for (int j = 0; j < Vecs; ++j) {
      const VecF y = (acc[0][h][j] + acc[1][h][j]) * splat(inverse[h]);
      const int64_t left = p.dim - d0 - j * kLanes;
      std::memcpy(out + h * p.dim + d0 + j * kLanes, &y,
                  sizeof(float) * static_cast<size_t>(left < kLanes ? left : kLanes));
    }
  }
}

template <int Heads>
void attend(const Pages& p, const float* q, float* scores, int64_t ld_scores, float* out) {
  score<Heads>(p, q, scores, ld_scores);
  float inverse[Heads];
  for (int h = 0; h < Heads; ++h) inverse[h] = 1.0f / softmax(p, scores + h * ld_scores);
  int64_t d = 0;
  for (; d + kValueVecs * kLanes <= p.dim; d += kValueVecs * kLanes)
    mix<Heads, kValueVecs>(p, scores, ld_scores, inverse, out, d);
  for (; d < p.dim; d += kLanes) mix<Heads, 1>(p, scores, ld_scores, inverse, out, d);
}

}  // namespace

void decode_attention(const AttentionArgs& a) {
  const int64_t dim = a.kv.head_dim, group = a.heads / a.kv.kv_heads;
  for (int64_t i = a.row_begin; i < a.row_end; ++i) {
    const int64_t position = a.batch.position[i], prompt = a.batch.prompt_size[i];
    const int64_t count = cache_slot(position, prompt) + 1, ld_scores = (count + kPage - 1) / kPage * kPage;
    const int64_t hole_end = position < prompt ? prompt : cache_slot(prompt, prompt);
    for (int64_t kv_head = 0; kv_head < a.kv.kv_heads; ++kv_head) {
      const Pages pages{a.kv.pages + kv_head * a.kv.head_floats,
                        a.batch.page_table[i],
                        a.kv.kv_heads * a.kv.head_floats,
                        dim,
                        a.kv.value_ld,
                        count,
                        prompt,
                        hole_end};
      const float* q = a.qkv + i * a.ld + kv_head * group * dim;
      float* out = a.out + i * a.ldo + kv_head * group * dim;
      int64_t h = 0;
      for (; h + kGroup <= group; h += kGroup) attend<kGroup>(pages, q + h * dim, a.scores, ld_scores, out + h * dim);
      if (group - h >= 2) {
        attend<2>(pages, q + h * dim, a.scores, ld_scores, out + h * dim);
        h += 2;
      }
      if (h < group) attend<1>(pages, q + h * dim, a.scores, ld_scores, out + h * dim);
    }
  }
}

}  // namespace areal::AREAL_ISA
