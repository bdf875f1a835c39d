// The forward pass of a batch of rows: a row is one token at one position of some sequence, whether it belongs to a
// prompt, to a cache being recomputed, or is the newest token of a sample. Rows of one sequence come in rising
// position, and all earlier positions are in the cache or in the same batch.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/buffer.h"
#include "decode/kernels.h"
#include "decode/kv_pool.h"
#include "decode/weights.h"

namespace areal::decode {

class Forward {
 public:
  // All memory is allocated here. threads > 1 splits the work with areal::parallel_for; results don't change.
  Forward(const DecoderConfig& config, const Kernels& kernels, int64_t max_rows, int64_t max_positions,
          int64_t threads);

  int64_t max_rows() const { return max_rows_; }
  int64_t rows() const { return rows_; }
  int64_t logits_rows() const { return logits_rows_; }  // the most rows one call of logits() takes

  void clear() { rows_ = 0; }
  void add_row(int32_t token, int64_t position, int64_t prompt_size, const int32_t* page_table);
  // Computes all rows, writing their keys and values to the cache.
  void run(const Weights& weights, KvPool& pool);
  // The logits of the given rows: [count, vocab_size rounded up to kPad], valid until the next call.
  const float* logits(const Weights& weights, const int32_t* row_index, int64_t count);
  int64_t logits_ld() const { return ld_vocab_; }

 private:
  void embed(const Weights& weights);
  void norm(const float* x, const int32_t* row_index, int64_t rows, const Buffer<float>& weight);
  void gemm(const float* a, int64_t lda, int64_t rows, const PackedMatrix& matrix, const float* bias, float* c,
            int64_t ldc, GemmStart start, GemmEnd end);
  void attend(KvLayer kv);

  DecoderConfig config_;
  const Kernels& kernels_;
  int64_t max_rows_, logits_rows_, threads_;
  int64_t ld_hidden_, ld_qkv_, ld_attention_, ld_mlp_, ld_vocab_, ld_scores_;
  int64_t rows_ = 0;
  std::vector<int32_t> token_;
  std::vector<int64_t> position_, prompt_size_;
  std::vector<const int32_t*> page_table_;
  Buffer<float> cos_, sin_;  // [max_positions, head_dim / 2]
  Buffer<float> x_, normed_, qkv_, attention_, mlp_, logits_, scores_;
};

}  // namespace areal::decode
