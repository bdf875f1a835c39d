#include "ops/layers/attention.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/threads.h"
#include "ops/layers/attention_cpu.h"

namespace areal::layers {
namespace {

constexpr const char* kOp = "attention";

void rotate(float* rows, int64_t count, int64_t stride, int64_t heads, int64_t head_dim, const float* angles,
            float direction) {
  AREAL_ISA_DISPATCH(attention_rotate(rows, count, stride, heads, head_dim, angles, direction));
}
void load(const SequenceView& sequence, const KeyScratch& scratch, int64_t at) {
  AREAL_ISA_DISPATCH(attention_load(sequence, scratch, at));
}
void forward(const SequenceView& sequence, const KeyScratch& scratch) {
  AREAL_ISA_DISPATCH(attention_forward_sequence(sequence, scratch));
}
void backward(const SequenceView& sequence, const KeyScratch& scratch) {
  AREAL_ISA_DISPATCH(attention_backward_sequence(sequence, scratch));
}
void store_gradient(const SequenceView& sequence, const KeyScratch& scratch, int64_t at) {
  AREAL_ISA_DISPATCH(attention_store_gradient(sequence, scratch, at));
}

struct Group {
  int64_t begin;  // its first sequence, the prefix
  int64_t end;
};

Group group_at(const Attention& a, int64_t group) {
  return a.cu_groups == nullptr ? Group{group, group + 1} : Group{a.cu_groups[group], a.cu_groups[group + 1]};
}

int64_t group_count(const Attention& a) { return a.cu_groups == nullptr ? a.sequences.count : a.groups; }

int64_t prefix_length(const Attention& a, const Group& group, int64_t sequence) {
  return sequence == group.begin ? 0 : a.sequences.length(group.begin);
}

// Checks the layout and returns the length of the longest sequence, prefix included.
int64_t check_layout(const Attention& a, int64_t tokens) {
  check_segments(a.sequences, tokens, kOp);
  AREAL_CHECK(a.kv_heads >= 1 && a.heads % a.kv_heads == 0, kOp, ": expected kv_heads to divide heads = ", a.heads,
              ", got ", a.kv_heads);
  AREAL_CHECK(a.head_dim >= 2 && a.head_dim % 2 == 0, kOp, ": expected an even head_dim, got ", a.head_dim);
  if (a.cu_groups != nullptr) check_segments({a.cu_groups, a.groups}, a.sequences.count, "attention (cu_groups)");
  int64_t longest = 0;
  for (int64_t g = 0; g < group_count(a); ++g) {
    const Group group = group_at(a, g);
    for (int64_t s = group.begin; s < group.end; ++s) {
      longest = std::max(longest, prefix_length(a, group, s) + a.sequences.length(s));
    }
  }
  AREAL_CHECK(longest <= a.positions, kOp, ": expected a rotary table of at least ", longest, " positions, got ",
              a.positions);
  return longest;
}

// Turns queries and keys of all tokens by their positions.
void rotate_all(const Attention& a, float* qkv, float direction) {
  parallel_for(0, group_count(a), 8, [&](int64_t first, int64_t last) {
    for (int64_t g = first; g < last; ++g) {
      const Group group = group_at(a, g);
      for (int64_t s = group.begin; s < group.end; ++s) {
        rotate(qkv + a.sequences.begin(s) * a.qkv_width(), a.sequences.length(s), a.qkv_width(), a.heads + a.kv_heads,
               a.head_dim, a.table + prefix_length(a, group, s) * a.head_dim, direction);
      }
    }
  });
}

int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The memory behind a KeyScratch.
class Scratch {
 public:
  Scratch(const Attention& a, int64_t longest, bool for_backward) {
    view_.columns = padded(longest, kPadColumns);
    view_.padded_dim = padded(a.head_dim, kPadDim);
    memory_.assign(static_cast<size_t>(lay_out(a.head_dim, for_backward, nullptr)), 0.0f);
    lay_out(a.head_dim, for_backward, memory_.data());
  }
  const KeyScratch& view() const { return view_; }

 private:
  // Points the view into `memory` (nullptr: nowhere yet) and returns how many floats it takes.
  int64_t lay_out(int64_t head_dim, bool for_backward, float* memory) {
    const int64_t by_column = head_dim * view_.columns, by_row = view_.columns * view_.padded_dim;
    int64_t used = 0;
    const auto take = [&](bool needed, int64_t size) -> float* {
      if (!needed) return nullptr;
      used += size;
      return memory == nullptr ? nullptr : memory + used - size;
    };
    view_.k_columns = take(true, by_column);
    view_.v_columns = take(for_backward, by_column);
    view_.k_rows = take(for_backward, by_row);
    view_.v_rows = take(!for_backward, by_row);
    view_.grad_k = take(for_backward, by_row);
    view_.grad_v = take(for_backward, by_row);
    view_.weights = take(true, kQueryBlock * view_.columns);
    view_.grad_scores = take(for_backward, kQueryBlock * view_.columns);
    view_.queries = take(for_backward, kQueryBlock * view_.padded_dim);
    view_.grad_out = take(for_backward, kQueryBlock * view_.padded_dim);
    return used;
  }

  KeyScratch view_;
  std::vector<float> memory_;
};

// The arrays of forward and backward; what a direction does not use stays null.
struct Arrays {
  const float* qkv = nullptr;
  float* out = nullptr;
  float* lse = nullptr;
  const float* grad_out = nullptr;
  float* grad_qkv = nullptr;
};

SequenceView view_of(const Attention& a, const Arrays& arrays, const Group& group, int64_t sequence, int64_t kv_head) {
  const int64_t row = a.sequences.begin(sequence), per_key = a.heads / a.kv_heads;
  const int64_t q = row * a.qkv_width() + kv_head * per_key * a.head_dim;
  const int64_t k = row * a.qkv_width() + (a.heads + kv_head) * a.head_dim, v = k + a.kv_heads * a.head_dim;
  const int64_t out = row * a.out_width() + kv_head * per_key * a.head_dim;
  SequenceView view;
  view.rows = a.sequences.length(sequence);
  view.prefix = prefix_length(a, group, sequence);
  view.head_dim = a.head_dim;
  view.queries_per_key = per_key;
  view.heads = a.heads;
  view.qkv_stride = a.qkv_width();
  view.out_stride = a.out_width();
  view.q = arrays.qkv + q;
  view.k = arrays.qkv + k;
  view.v = arrays.qkv + v;
  view.out = arrays.out + out;
  view.lse = arrays.lse + row * a.heads + kv_head * per_key;
  if (arrays.grad_qkv != nullptr) {
    view.grad_out = arrays.grad_out + out;
    view.grad_q = arrays.grad_qkv + q;
    view.grad_k = arrays.grad_qkv + k;
    view.grad_v = arrays.grad_qkv + v;
  }
  return view;
}

// Runs fn(group, kv_head, scratch) for every pair: no two of them write to the same place.
template <class Fn>
void for_each_unit(const Attention& a, int64_t longest, bool for_backward, const Fn& fn) {
  parallel_for(0, group_count(a) * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(a, longest, for_backward);
    for (int64_t unit = begin; unit < end; ++unit) {
      const Group group = group_at(a, unit / a.kv_heads);
      if (group.begin < group.end) fn(group, unit % a.kv_heads, scratch.view());
    }
  });
}

}  // namespace

void attention_forward(const Attention& a, int64_t tokens, float* qkv, float* out, float* lse) {
  const int64_t longest = check_layout(a, tokens);
  rotate_all(a, qkv, 1.0f);
  for_each_unit(a, longest, false, [&](const Group& group, int64_t kv_head, const KeyScratch& scratch) {
    const Arrays arrays{.qkv = qkv, .out = out, .lse = lse};
    for (int64_t s = group.begin; s < group.end; ++s) {
      const SequenceView view = view_of(a, arrays, group, s, kv_head);
      load(view, scratch, view.prefix);
      forward(view, scratch);
    }
  });
}

void attention_backward(const Attention& a, int64_t tokens, const float* qkv, const float* out, const float* lse,
                        const float* grad_out, float* grad_qkv) {
  const int64_t longest = check_layout(a, tokens);
  for_each_unit(a, longest, true, [&](const Group& group, int64_t kv_head, const KeyScratch& scratch) {
    const Arrays arrays{qkv, const_cast<float*>(out), const_cast<float*>(lse), grad_out, grad_qkv};
    const SequenceView prefix = view_of(a, arrays, group, group.begin, kv_head);
    load(prefix, scratch, 0);
    for (int64_t s = group.begin + 1; s < group.end; ++s) {  // each adds to the gradients of the prefix
      const SequenceView view = view_of(a, arrays, group, s, kv_head);
      load(view, scratch, view.prefix);
      backward(view, scratch);
      store_gradient(view, scratch, view.prefix);
    }
    backward(prefix, scratch);
    store_gradient(prefix, scratch, 0);
  });
  rotate_all(a, grad_qkv, -1.0f);
}

}  // namespace areal::layers
