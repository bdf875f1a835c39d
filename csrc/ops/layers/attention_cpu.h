// What each instruction-set build of attention_cpu.cpp exports: the work on one sequence and one key head.
#pragma once

#include <cstdint>

#include "base/isa.h"

namespace areal::layers {

inline constexpr int64_t kQueryBlock = 4;
// Scratch is padded to multiples of these, so that vectors of any instruction set may run over.
inline constexpr int64_t kPadColumns = 32;
inline constexpr int64_t kPadDim = 16;

// Scratch of one thread: keys and values of a prefix and one continuation, by column (one per visible token) for the
// products over head_dim, and by row for the sums over tokens. Padding is 0.
struct KeyScratch {
  int64_t columns = 0;           // row stride of the transposed arrays
  int64_t padded_dim = 0;        // row stride of the others
  float* k_columns = nullptr;    // [head_dim, columns]
  float* v_columns = nullptr;    // [head_dim, columns], backward only
  float* k_rows = nullptr;       // [columns, padded_dim], backward only
  float* v_rows = nullptr;       // [columns, padded_dim], forward only
  float* grad_k = nullptr;       // [columns, padded_dim]
  float* grad_v = nullptr;       // [columns, padded_dim]
  float* weights = nullptr;      // [query block, columns]
  float* grad_scores = nullptr;  // [query block, columns]
  float* queries = nullptr;      // [query block, padded_dim]
  float* grad_out = nullptr;     // [query block, padded_dim]
};

// One sequence under one key head. Pointers are to the sequence's first token; strides in floats.
struct SequenceView {
  int64_t rows = 0;
  int64_t prefix = 0;  // tokens before it that it sees
  int64_t head_dim = 0;
  int64_t queries_per_key = 0;
  int64_t heads = 0;  // row stride of lse
  int64_t qkv_stride = 0;
  int64_t out_stride = 0;
  const float* q = nullptr;  // the first of queries_per_key heads, side by side
  const float* k = nullptr;
  const float* v = nullptr;
  float* out = nullptr;  // read by backward
  float* lse = nullptr;
  const float* grad_out = nullptr;
  float* grad_q = nullptr;  // strides as qkv
  float* grad_k = nullptr;
  float* grad_v = nullptr;
};

}  // namespace areal::layers

namespace areal {

// Turns the first `heads` heads of each row by the angles of consecutive positions; direction -1 turns back.
AREAL_ISA_DECLARE(void attention_rotate(float* rows, int64_t count, int64_t stride, int64_t heads, int64_t head_dim,
                                        const float* angles, float direction))
// Copies keys and values of the sequence to columns [at, at + rows) and clears their gradients.
AREAL_ISA_DECLARE(void attention_load(const layers::SequenceView& sequence, const layers::KeyScratch& scratch,
                                      int64_t at))
AREAL_ISA_DECLARE(void attention_forward_sequence(const layers::SequenceView& sequence,
                                                  const layers::KeyScratch& scratch))
// Writes grad_q; adds to the scratch gradients of all visible columns.
AREAL_ISA_DECLARE(void attention_backward_sequence(const layers::SequenceView& sequence,
                                                   const layers::KeyScratch& scratch))
// Writes grad_k and grad_v of the sequence from columns [at, at + rows).
AREAL_ISA_DECLARE(void attention_store_gradient(const layers::SequenceView& sequence, const layers::KeyScratch& scratch,
                                                int64_t at))

}  // namespace areal
