// Causal attention inside packed sequences, with rotary positions, grouped keys and shared prefixes; float32, CPU.
//
//   Sequences come in groups. The first of a group is a prefix (a prompt) that each of the others continues: token i of
//   such a continuation stands at position (length of the prefix) + i and sees the prefix and its own tokens up to i.
//   Without cu_groups every sequence is a group of one.
//
//   q, k turned by the angles of their position;  s_ij = q_i . k_j / sqrt(D);  p = softmax of s over the visible j;
//   out_i = sum_j p_ij v_j.       Backward, with dp_ij = dout_i . v_j and ds = p (dp - dout_i . out_i):
//   dv_j = sum_i p_ij dout_i,  dq_i = sum_j ds_ij k_j / sqrt(D),  dk_j = sum_i ds_ij q_i / sqrt(D), turned back.
//
// Meant for the short and middling sequences of rollouts on a CPU: a query block against all its keys, no tiling over
// keys. Scratch per thread is 6 x (longest sequence) x D floats. Bitwise the same for any number of threads.
#pragma once

#include <cstdint>

#include "base/segments.h"

namespace areal::layers {

struct Attention {
  Segments sequences;
  const int64_t* cu_groups = nullptr;  // [groups + 1], boundaries in sequences; nullptr: groups of one
  int64_t groups = 0;                  // ignored without cu_groups
  int64_t heads = 0;
  int64_t kv_heads = 0;  // divides heads
  int64_t head_dim = 0;  // even
  // [positions, 2, head_dim / 2]: cosines, then sines, of each position's angles.
  const float* table = nullptr;
  int64_t positions = 0;

  int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t out_width() const { return heads * head_dim; }
};

// Turns queries and keys of qkv [tokens, (heads + 2 kv_heads) head_dim] in place, then writes out [tokens, heads
// head_dim] and lse [tokens, heads], the logarithm of each softmax's denominator. Throws areal::Error on groups that do
// not cover the sequences, and on a position beyond the table; nothing has been written then.
void attention_forward(const Attention& attention, int64_t tokens, float* qkv, float* out, float* lse);

// qkv as forward left it. Writes grad_qkv [tokens, ...], the gradient of qkv as forward was given it.
void attention_backward(const Attention& attention, int64_t tokens, const float* qkv, const float* out,
                        const float* lse, const float* grad_out, float* grad_qkv);

}  // namespace areal::layers
