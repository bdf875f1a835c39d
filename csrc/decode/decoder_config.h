// The shape of a Llama- or Qwen2-shaped decoder: RMSNorm, rotary positions (half rotation), grouped-query attention,
// SwiGLU. Qwen2 differs from Llama only in the bias of its q, k and v projections.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace areal::decode {

struct DecoderConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  double rope_theta = 10000.0;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;

  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
};

inline void check_config(const DecoderConfig& config) {
  const auto positive = [](const char* name, int64_t value) {
    AREAL_CHECK(value > 0, "decoder config: expected ", name, " > 0, got ", value);
  };
  positive("vocab_size", config.vocab_size);
  positive("hidden_size", config.hidden_size);
  positive("intermediate_size", config.intermediate_size);
  positive("num_layers", config.num_layers);
  positive("num_heads", config.num_heads);
  positive("num_kv_heads", config.num_kv_heads);
  positive("head_dim", config.head_dim);
  AREAL_CHECK(config.num_heads % config.num_kv_heads == 0,
              "decoder config: expected num_heads to be a multiple of num_kv_heads = ", config.num_kv_heads, ", got ",
              config.num_heads);
  AREAL_CHECK(config.head_dim % 2 == 0, "decoder config: expected an even head_dim, got ", config.head_dim);
  AREAL_CHECK(config.rope_theta > 0.0, "decoder config: expected rope_theta > 0, got ", config.rope_theta);
  AREAL_CHECK(config.rms_norm_eps >= 0.0, "decoder config: expected rms_norm_eps >= 0, got ", config.rms_norm_eps);
}

}  // namespace areal::decode
