#include "decode/weights.h"

#include <bit>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace areal::decode {
namespace {

using Shape = std::vector<int64_t>;

std::string shape_text(const Shape& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// Hands out tensors by name and checks each; afterwards nothing may be left over.
class TensorMap {
 public:
  explicit TensorMap(const std::vector<NamedTensor>& tensors) {
    for (const NamedTensor& tensor : tensors) {
      AREAL_CHECK(by_name_.emplace(tensor.name, &tensor).second, "load_weights: expected unique names, got ",
                  tensor.name, " twice");
    }
  }

  const NamedTensor* take(const std::string& name, const Shape& shape) {
    const auto found = by_name_.find(name);
    AREAL_CHECK(found != by_name_.end(), "load_weights: expected a tensor named ", name, ", got none");
    const NamedTensor& tensor = *found->second;
    AREAL_CHECK(tensor.shape == shape, "load_weights: expected ", name, " of shape ", shape_text(shape), ", got ",
                shape_text(tensor.shape));
    AREAL_CHECK(tensor.dtype == DType::kFloat32 || tensor.dtype == DType::kBFloat16, "load_weights: expected ", name,
                " in float32 or bfloat16, got ", dtype_name(tensor.dtype));
    by_name_.erase(found);
    return &tensor;
  }

  void check_nothing_left(bool tied) const {
    for (const auto& [name, tensor] : by_name_) {
      const bool unused = name.ends_with("rotary_emb.inv_freq") || (tied && name == "lm_head.weight");
      AREAL_CHECK(unused, "load_weights: expected only tensors of this model, got ", name);
    }
  }

 private:
  std::unordered_map<std::string, const NamedTensor*> by_name_;
};

struct LayerTensors {
  const NamedTensor *attention_norm, *q, *k, *v, *q_bias, *k_bias, *v_bias, *o, *mlp_norm, *gate, *up, *down;
};

struct ModelTensors {
  const NamedTensor *embedding, *final_norm, *head;
  std::vector<LayerTensors> layers;
};

ModelTensors find_tensors(const DecoderConfig& c, const std::vector<NamedTensor>& tensors) {
  TensorMap map(tensors);
  ModelTensors model{};
  model.embedding = map.take("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".", attention = layer + "self_attn.",
                      mlp = layer + "mlp.";
    LayerTensors t{};
    t.attention_norm = map.take(layer + "input_layernorm.weight", {c.hidden_size});
    t.q = map.take(attention + "q_proj.weight", {c.q_size(), c.hidden_size});
    t.k = map.take(attention + "k_proj.weight", {c.kv_size(), c.hidden_size});
    t.v = map.take(attention + "v_proj.weight", {c.kv_size(), c.hidden_size});
    if (c.qkv_bias) {
      t.q_bias = map.take(attention + "q_proj.bias", {c.q_size()});
      t.k_bias = map.take(attention + "k_proj.bias", {c.kv_size()});
      t.v_bias = map.take(attention + "v_proj.bias", {c.kv_size()});
    }
    t.o = map.take(attention + "o_proj.weight", {c.hidden_size, c.q_size()});
    t.mlp_norm = map.take(layer + "post_attention_layernorm.weight", {c.hidden_size});
    t.gate = map.take(mlp + "gate_proj.weight", {c.intermediate_size, c.hidden_size});
    t.up = map.take(mlp + "up_proj.weight", {c.intermediate_size, c.hidden_size});
    t.down = map.take(mlp + "down_proj.weight", {c.hidden_size, c.intermediate_size});
    model.layers.push_back(t);
  }
  model.final_norm = map.take("model.norm.weight", {c.hidden_size});
  model.head = c.tie_word_embeddings ? model.embedding : map.take("lm_head.weight", {c.vocab_size, c.hidden_size});
  map.check_nothing_left(c.tie_word_embeddings);
  return model;
}

template <class T>
void resize(Buffer<T>* buffer, int64_t size) {
  if (buffer->size() != size) *buffer = Buffer<T>(size);
}

float read_float(const NamedTensor& tensor, int64_t i) {
  if (tensor.dtype == DType::kFloat32) return static_cast<const float*>(tensor.data)[i];
  return std::bit_cast<float>(uint32_t{static_cast<const BFloat16*>(tensor.data)[i].bits} << 16);
}

// Concatenated vectors, zero-padded.
void copy_vectors(std::initializer_list<const NamedTensor*> parts, Buffer<float>* out) {
  int64_t size = 0;
  for (const NamedTensor* part : parts) size += part->shape[0];
  resize(out, round_up(size, kPad));
  float* to = out->data();
  for (const NamedTensor* part : parts)
    for (int64_t i = 0; i < part->shape[0]; ++i) *to++ = read_float(*part, i);
  while (to < out->data() + out->size()) *to++ = 0.0f;
}

// Prepares a packed matrix of n columns and k rows, with zeros where no column will be written.
void start_matrix(const Kernels& kernels, int64_t n, int64_t k, DType dtype, PackedMatrix* matrix) {
  matrix->n = n;
  matrix->k = k;
  matrix->dtype = dtype;
  const int64_t element = static_cast<int64_t>(dtype_size_bytes(dtype)), padded = round_up(n, kernels.lanes);
  resize(&matrix->panels, padded * k * element);
  if (padded == n) return;
  const int64_t last = n / kernels.panel_columns * kernels.panel_columns;
  std::memset(matrix->panels.data() + last * k * element, 0, static_cast<size_t>((padded - last) * k * element));
}

DType common_dtype(std::initializer_list<const NamedTensor*> parts) {
  for (const NamedTensor* part : parts)
    if (part->dtype == DType::kFloat32) return DType::kFloat32;
  return DType::kBFloat16;
}

void pack_part(const Kernels& kernels, const NamedTensor& part, int64_t column_begin, int64_t column_stride,
               PackedMatrix* matrix) {
  kernels.pack({part.data, part.dtype, part.shape[0], part.shape[1], matrix->panels.data(), matrix->dtype, matrix->n,
                column_begin, column_stride});
}

// The parts side by side.
void pack_columns(const Kernels& kernels, std::initializer_list<const NamedTensor*> parts, PackedMatrix* matrix) {
  int64_t n = 0;
  for (const NamedTensor* part : parts) n += part->shape[0];
  start_matrix(kernels, n, (*parts.begin())->shape[1], common_dtype(parts), matrix);
  int64_t column = 0;
  for (const NamedTensor* part : parts) {
    pack_part(kernels, *part, column, 1, matrix);
    column += part->shape[0];
  }
}

// Vector groups of gate and up in turn, as GemmEnd::kSwiGlu wants them.
void pack_gate_up(const Kernels& kernels, const NamedTensor& gate, const NamedTensor& up, PackedMatrix* matrix) {
  const int64_t rows = gate.shape[0], n = 2 * round_up(rows, kernels.lanes);
  start_matrix(kernels, n, gate.shape[1], common_dtype({&gate, &up}), matrix);
  if (rows % kernels.lanes != 0) std::memset(matrix->panels.data(), 0, static_cast<size_t>(matrix->panels.size()));
  pack_part(kernels, gate, 0, 2, matrix);
  pack_part(kernels, up, 1, 2, matrix);
}

}  // namespace

void pack_weights(const DecoderConfig& config, const Kernels& kernels, const std::vector<NamedTensor>& tensors,
                  Weights* weights) {
  const ModelTensors model = find_tensors(config, tensors);
  weights->embedding_dtype = model.embedding->dtype;
  const int64_t embedding_bytes =
      config.vocab_size * config.hidden_size * static_cast<int64_t>(dtype_size_bytes(model.embedding->dtype));
  resize(&weights->embedding, embedding_bytes);
  std::memcpy(weights->embedding.data(), model.embedding->data, static_cast<size_t>(embedding_bytes));
  weights->layers.resize(model.layers.size());
  for (size_t l = 0; l < model.layers.size(); ++l) {
    const LayerTensors& from = model.layers[l];
    LayerWeights& to = weights->layers[l];
    copy_vectors({from.attention_norm}, &to.attention_norm);
    copy_vectors({from.mlp_norm}, &to.mlp_norm);
    if (config.qkv_bias) copy_vectors({from.q_bias, from.k_bias, from.v_bias}, &to.qkv_bias);
    pack_columns(kernels, {from.q, from.k, from.v}, &to.qkv);
    pack_columns(kernels, {from.o}, &to.o);
    pack_gate_up(kernels, *from.gate, *from.up, &to.gate_up);
    pack_columns(kernels, {from.down}, &to.down);
  }
  copy_vectors({model.final_norm}, &weights->final_norm);
  pack_columns(kernels, {model.head}, &weights->head);
}

}  // namespace areal::decode
