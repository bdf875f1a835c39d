// Schema, argument checks and registration. The autograd function over these is in areal_core/model/fused.py.
#include <tuple>

#include "bind/torch_tensor.h"
#include "ops/layers/attention.h"
#include "ops/layers/rowwise.h"

namespace areal::layers {
namespace {

using bind::empty;
using bind::ScalarType;
using bind::Tensor;
using bind::vector_data;
using OptionalTensor = std::optional<Tensor>;

// The data of a contiguous float32 matrix of the given shape.
float* matrix_data(const Tensor& tensor, int64_t rows, int64_t columns, const char* op, const char* name) {
  AREAL_CHECK(tensor.scalar_type() == ScalarType::Float, op, ": expected ", name, " dtype = float32, got ",
              torch::headeronly::toString(tensor.scalar_type()));
  AREAL_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == columns, op, ": expected ", name,
              " of shape [", rows, ", ", columns, "], got ", tensor.dim(), "-D with ", tensor.numel(), " elements");
  AREAL_CHECK(tensor.is_contiguous(), op, ": expected contiguous ", name);
  return static_cast<float*>(tensor.data_ptr());
}

int64_t rows_of(const Tensor& matrix, const char* op, const char* name) {
  AREAL_CHECK(matrix.dim() == 2, op, ": expected ", name, " of 2 dimensions, got ", matrix.dim());
  return matrix.size(0);
}

Tensor empty_matrix(int64_t rows, int64_t columns, const Tensor& like) {
  return empty({rows, columns}, ScalarType::Float, like);
}

float* data(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

RmsNorm make_norm(const Tensor& x, const Tensor& weight, double eps) {
  constexpr const char* op = "rms_norm";
  RmsNorm norm;
  norm.rows = rows_of(x, op, "x");
  norm.width = x.size(1);
  norm.x = matrix_data(x, norm.rows, norm.width, op, "x");
  norm.weight = vector_data<const float>(weight, norm.width, x, op, "weight");
  norm.eps = static_cast<float>(eps);
  return norm;
}

std::tuple<Tensor, Tensor> norm_forward(const Tensor& x, const Tensor& weight, double eps) {
  const RmsNorm norm = make_norm(x, weight, eps);
  std::tuple<Tensor, Tensor> out{empty_matrix(norm.rows, norm.width, x), empty({norm.rows}, ScalarType::Float, x)};
  rms_norm_forward(norm, data(std::get<0>(out)), data(std::get<1>(out)));
  return out;
}

void norm_backward(const Tensor& grad_y, const Tensor& x, const Tensor& weight, const Tensor& inverse, Tensor grad_x,
                   Tensor grad_weight) {
  constexpr const char* op = "rms_norm_backward";
  const RmsNorm norm = make_norm(x, weight, 0);
  rms_norm_backward(norm, vector_data<const float>(inverse, norm.rows, x, op, "inverse"),
                    matrix_data(grad_y, norm.rows, norm.width, op, "grad_y"),
                    matrix_data(grad_x, norm.rows, norm.width, op, "grad_x"),
                    vector_data<float>(grad_weight, norm.width, x, op, "grad_weight"));
}

Tensor gated_forward(const Tensor& gate_up) {
  constexpr const char* op = "swiglu";
  const int64_t rows = rows_of(gate_up, op, "gate_up"), inner = gate_up.size(1) / 2;
  Tensor out = empty_matrix(rows, inner, gate_up);
  swiglu_forward(matrix_data(gate_up, rows, 2 * inner, op, "gate_up"), rows, inner, data(out));
  return out;
}

Tensor gated_backward(const Tensor& grad_y, const Tensor& gate_up) {
  constexpr const char* op = "swiglu_backward";
  const int64_t rows = rows_of(gate_up, op, "gate_up"), inner = gate_up.size(1) / 2;
  Tensor out = empty_matrix(rows, 2 * inner, gate_up);
  swiglu_backward(matrix_data(gate_up, rows, 2 * inner, op, "gate_up"), matrix_data(grad_y, rows, inner, op, "grad_y"),
                  rows, inner, data(out));
  return out;
}

Attention make_attention(const Tensor& qkv, const Tensor& table, const Tensor& cu_seqlens,
                         const OptionalTensor& cu_groups, int64_t heads, int64_t kv_heads) {
  constexpr const char* op = "attention";
  AREAL_CHECK(heads >= 1 && kv_heads >= 1, op, ": expected heads >= 1 and kv_heads >= 1, got ", heads, " and ",
              kv_heads);
  Attention attention;
  attention.heads = heads;
  attention.kv_heads = kv_heads;
  attention.head_dim = rows_of(qkv, op, "qkv") >= 0 ? qkv.size(1) / (heads + 2 * kv_heads) : 0;
  AREAL_CHECK(attention.qkv_width() == qkv.size(1), op,
              ": expected qkv of (heads + 2 kv_heads) equal heads, got width ", qkv.size(1));
  attention.sequences = bind::unchecked_segments(cu_seqlens, qkv, op);
  if (cu_groups.has_value()) {
    const Segments groups = bind::unchecked_segments(*cu_groups, qkv, op, "cu_groups");
    attention.cu_groups = groups.cu_seqlens;
    attention.groups = groups.count;
  }
  AREAL_CHECK(table.dim() == 3 && table.size(1) == 2 && 2 * table.size(2) == attention.head_dim &&
                  table.is_contiguous() && table.scalar_type() == ScalarType::Float,
              op, ": expected table of shape [positions, 2, ", attention.head_dim / 2, "], float32, contiguous");
  attention.table = static_cast<const float*>(table.const_data_ptr());
  attention.positions = table.size(0);
  return attention;
}

std::tuple<Tensor, Tensor> attend(Tensor qkv, const Tensor& table, const Tensor& cu_seqlens,
                                  const OptionalTensor& cu_groups, int64_t heads, int64_t kv_heads) {
  const Attention attention = make_attention(qkv, table, cu_seqlens, cu_groups, heads, kv_heads);
  const int64_t tokens = qkv.size(0);
  float* rotated = matrix_data(qkv, tokens, attention.qkv_width(), "attention", "qkv");
  std::tuple<Tensor, Tensor> out{empty_matrix(tokens, attention.out_width(), qkv), empty_matrix(tokens, heads, qkv)};
  attention_forward(attention, tokens, rotated, data(std::get<0>(out)), data(std::get<1>(out)));
  return out;
}

Tensor attend_backward(const Tensor& grad_out, const Tensor& qkv, const Tensor& out, const Tensor& lse,
                       const Tensor& table, const Tensor& cu_seqlens, const OptionalTensor& cu_groups, int64_t heads,
                       int64_t kv_heads) {
  constexpr const char* op = "attention_backward";
  const Attention attention = make_attention(qkv, table, cu_seqlens, cu_groups, heads, kv_heads);
  const int64_t tokens = qkv.size(0), width = attention.out_width();
  Tensor grad_qkv = empty_matrix(tokens, attention.qkv_width(), qkv);
  attention_backward(attention, tokens, matrix_data(qkv, tokens, attention.qkv_width(), op, "qkv"),
                     matrix_data(out, tokens, width, op, "out"), matrix_data(lse, tokens, heads, op, "lse"),
                     matrix_data(grad_out, tokens, width, op, "grad_out"), data(grad_qkv));
  return grad_qkv;
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def("rms_norm_forward(Tensor x, Tensor weight, float eps) -> (Tensor y, Tensor inverse)");
  m.def(
      "rms_norm_backward_(Tensor grad_y, Tensor x, Tensor weight, Tensor inverse, Tensor(a!) grad_x, "
      "Tensor(b!) grad_weight) -> ()");
  m.def("swiglu_forward(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_y, Tensor gate_up) -> Tensor");
  m.def(
      "attention_forward_(Tensor(a!) qkv, Tensor table, Tensor cu_seqlens, Tensor? cu_groups, int heads, "
      "int kv_heads) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor qkv, Tensor out, Tensor lse, Tensor table, Tensor cu_seqlens, "
      "Tensor? cu_groups, int heads, int kv_heads) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) {
  m.impl("rms_norm_forward", TORCH_BOX(&norm_forward));
  m.impl("rms_norm_backward_", TORCH_BOX(&norm_backward));
  m.impl("swiglu_forward", TORCH_BOX(&gated_forward));
  m.impl("swiglu_backward", TORCH_BOX(&gated_backward));
  m.impl("attention_forward_", TORCH_BOX(&attend));
  m.impl("attention_backward", TORCH_BOX(&attend_backward));
}

}  // namespace
}  // namespace areal::layers
