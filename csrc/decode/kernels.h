// The arithmetic of one decode step, as a table of functions per instruction set. Everything above it (weights, KV
// pages, scheduling) is plain C++; everything below it is vectorised and knows only pointers.
//
// Two rules hold for every function here:
// - Row independence. A row of the output depends on the same row of the input and on nothing else: not on how many
//   rows a call has, nor on the row's place among them. Bits included, so a prompt computed in one batch and a token
//   decoded alone give the same numbers.
// - Padding. A row of activations has a leading dimension that is a multiple of kPad floats, and the floats between
//   its size and that multiple are zero on input and on output.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/isa.h"

namespace areal::decode {

inline constexpr int64_t kPad = 16;   // the widest vector, in floats
inline constexpr int64_t kPage = 16;  // positions of one KV page

// Weights of a linear layer are packed into column panels: panel p holds the columns [p * panel_columns, ...) as
// [k][width], width = panel_columns but for the last panel, whose columns are rounded up to a vector.
//
// Copies `rows` rows of a row-major source [rows, k] (a torch Linear weight: one row per output) into the columns of a
// packed matrix of n columns in all. Source row j becomes column_begin + j, or, when column_stride > 1, rows go in
// groups of one vector: group g becomes group g * column_stride + column_begin (gate and up projections interleave).
struct PackArgs {
  const void* source;
  DType source_dtype;  // float32 or bfloat16
  int64_t rows, k;
  void* panels;
  DType panel_dtype;  // float32, or bfloat16 when the source is bfloat16
  int64_t n;          // columns of the packed matrix, vector groups included
  int64_t column_begin;
  int64_t column_stride;
};

enum class GemmStart : int32_t { kZero, kBias, kAdd };  // what an output starts from: 0, bias[column], itself
enum class GemmEnd : int32_t { kStore, kSwiGlu };       // kSwiGlu: pairs of vector groups (g, u) become silu(g) * u

// c[rows, columns of the panels] = start + a[rows, k] * panels. Each output is one chain of fused multiply-adds over k
// in rising order.
struct GemmArgs {
  const float* a;
  int64_t lda, rows, k;
  const void* panels;
  DType panel_dtype;
  int64_t n;
  int64_t panel_begin, panel_end;
  const float* bias;  // [n padded], for kBias
  float* c;
  int64_t ldc;
  GemmStart start;
  GemmEnd end;
};

// out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight
struct RmsNormArgs {
  const float* x;
  int64_t ldx;
  const int32_t* row_index;  // row i reads x[row_index[i]]; null: x[i]
  const float* weight;
  float eps;
  float* out;
  int64_t ldo, rows, size;
};

// Where a position of a sequence lies in its pages: the response starts on a page of its own, so that all pages of the
// prompt can be shared, and the slots between the prompt's end and that page stay empty.
constexpr int64_t cache_slot(int64_t position, int64_t prompt_size) {
  return position < prompt_size ? position : (prompt_size + kPage - 1) / kPage * kPage + position - prompt_size;
}

// One layer's share of the KV cache: page p, KV head h starts at pages + (p * kv_heads + h) * head_floats. The keys
// come first, transposed as [head_dim][kPage], then the values [kPage][head_dim rounded up to kPad].
struct KvLayer {
  float* pages;
  int64_t kv_heads, head_dim;
  int64_t value_ld;     // head_dim rounded up to kPad
  int64_t head_floats;  // kPage * (head_dim + value_ld)
};

// Rows of a batch: row i is the token at position[i] of the sequence whose pages are page_table[i].
struct BatchRows {
  const int64_t* position;
  const int64_t* prompt_size;  // of the row's sequence: see cache_slot
  const int32_t* const* page_table;
};

// Rotates q and k of each row in place by its position, scales q by 1/sqrt(head_dim), and writes k and v to the cache.
struct RopeArgs {
  float* qkv;  // [rows, (heads + 2 kv_heads) * head_dim]
  int64_t ld, heads;
  const float *cos, *sin;  // [positions, head_dim / 2]
  KvLayer kv;
  BatchRows batch;
  int64_t row_begin, row_end;
};

// out[i] = softmax(q[i] k^T) v over the positions 0..position[i] of the row's sequence.
struct AttentionArgs {
  const float* qkv;
  int64_t ld, heads;
  float* out;  // [rows, heads * head_dim]
  int64_t ldo;
  KvLayer kv;
  BatchRows batch;
  int64_t row_begin, row_end;
  float* scores;  // scratch: heads / kv_heads * (slots rounded up to kPage)
};

// The softmax of one row at an inverse temperature: terms[j] = e^((z_j - max) * inverse_temperature).
struct SoftmaxTerms {
  float max;     // of the logits
  double total;  // of the terms; not finite, or NaN, exactly when a logit is NaN or +inf or all are -inf
};

struct Kernels {
  Isa isa;
  int64_t lanes, panel_columns;
  void (*pack)(const PackArgs&);
  void (*gemm)(const GemmArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*rope)(const RopeArgs&);
  void (*attention)(const AttentionArgs&);
  SoftmaxTerms (*softmax_terms)(const float* logits, int64_t size, float inverse_temperature, float* terms);
  // The first j with terms[0] + ... + terms[j] > target; the last non-zero term when rounding leaves none.
  int64_t (*find_cumulative)(const float* terms, int64_t size, double target);
};

// The table of the instruction set in use (active_isa()).
const Kernels& active_kernels();

}  // namespace areal::decode

namespace areal {
AREAL_ISA_DECLARE(const decode::Kernels& decode_kernels())
}  // namespace areal
