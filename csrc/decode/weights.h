// Weights of a decoder, packed for the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "decode/buffer.h"
#include "decode/decoder_config.h"
#include "decode/kernels.h"

namespace areal::decode {

// A tensor under its Hugging Face name: contiguous, row-major, float32 or bfloat16. Owns nothing.
struct NamedTensor {
  std::string name;
  const void* data;
  DType dtype;
  std::vector<int64_t> shape;
};

struct PackedMatrix {
  int64_t n = 0, k = 0;
  DType dtype = DType::kFloat32;
  Buffer<std::byte> panels;
};

struct LayerWeights {
  Buffer<float> attention_norm, mlp_norm;
  Buffer<float> qkv_bias;  // empty without biases
  PackedMatrix qkv, o, gate_up, down;
};

struct Weights {
  int64_t version = -1;
  DType embedding_dtype = DType::kFloat32;
  Buffer<std::byte> embedding;  // [vocab_size, hidden_size]
  std::vector<LayerWeights> layers;
  Buffer<float> final_norm;
  PackedMatrix head;
};

// Checks names and shapes, all of them before anything is written, then packs into `weights`, whose memory is reused
// when it fits. A matrix given in bfloat16 stays in bfloat16, which loses nothing and halves the bytes a step reads.
// Throws areal::Error for a missing, unknown or misshapen tensor; `rotary_emb.inv_freq` buffers, and lm_head.weight
// beside tied embeddings, are accepted and unused.
void pack_weights(const DecoderConfig& config, const Kernels& kernels, const std::vector<NamedTensor>& tensors,
                  Weights* weights);

}  // namespace areal::decode
