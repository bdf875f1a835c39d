#include "decode/forward.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/threads.h"

namespace areal::decode {
namespace {

// A piece of work handed to another thread is at least this many multiply-adds, some 20 us.
constexpr int64_t kMinPiece = 1 << 20;

Buffer<float> zeros(int64_t size) {
  Buffer<float> buffer(size);
  std::fill_n(buffer.data(), size, 0.0f);
  return buffer;
}

// Runs fn(begin, end, piece) on even pieces of [0, count), at most `threads` of them and none cheaper than kMinPiece.
template <class Fn>
void split(int64_t count, int64_t cost_each, int64_t threads, const Fn& fn) {
  const int64_t pieces = std::min({threads, count, count * cost_each / kMinPiece});
  if (pieces <= 1) return fn(int64_t{0}, count, int64_t{0});
  parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) fn(count * p / pieces, count * (p + 1) / pieces, p);
  });
}

}  // namespace

Forward::Forward(const DecoderConfig& config, const Kernels& kernels, int64_t max_rows, int64_t max_positions,
                 int64_t threads)
    : config_(config), kernels_(kernels), max_rows_(max_rows), threads_(threads) {
  constexpr int64_t kLogitsFloats = 2 << 20;  // enough rows at a time to share a read of the head
  ld_hidden_ = round_up(config.hidden_size, kPad);
  ld_qkv_ = round_up(config.qkv_size(), kPad);
  ld_attention_ = round_up(config.q_size(), kPad);
  ld_mlp_ = round_up(config.intermediate_size, kPad);
  ld_vocab_ = round_up(config.vocab_size, kPad);
  ld_scores_ = config.num_heads / config.num_kv_heads * (round_up(max_positions, kPage) + kPage);
  logits_rows_ = std::clamp(kLogitsFloats / ld_vocab_, std::min<int64_t>(max_rows, 16), max_rows);

  x_ = zeros(max_rows * ld_hidden_);
  normed_ = zeros(std::max(max_rows, logits_rows_) * ld_hidden_);
  qkv_ = zeros(max_rows * ld_qkv_);
  attention_ = zeros(max_rows * ld_attention_);
  mlp_ = zeros(max_rows * ld_mlp_);
  logits_ = zeros(logits_rows_ * ld_vocab_);
  scores_ = zeros(threads * ld_scores_);
  token_.resize(static_cast<size_t>(max_rows));
  position_.resize(static_cast<size_t>(max_rows));
  prompt_size_.resize(static_cast<size_t>(max_rows));
  page_table_.resize(static_cast<size_t>(max_rows));

  // Angles in float32, as the reference implementation has them: at position 30,000 exact angles would differ by 1e-3.
  const int64_t half = config.head_dim / 2;
  cos_ = Buffer<float>(max_positions * half);
  sin_ = Buffer<float>(max_positions * half);
  for (int64_t j = 0; j < half; ++j) {
    const float exponent = static_cast<float>(2 * j) / static_cast<float>(config.head_dim);
    const float frequency = 1.0f / static_cast<float>(std::pow(config.rope_theta, static_cast<double>(exponent)));
    for (int64_t p = 0; p < max_positions; ++p) {
      const float angle = static_cast<float>(p) * frequency;
      cos_.data()[p * half + j] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sin_.data()[p * half + j] = static_cast<float>(std::sin(static_cast<double>(angle)));
    }
  }
}

void Forward::add_row(int32_t token, int64_t position, int64_t prompt_size, const int32_t* page_table) {
  const size_t i = static_cast<size_t>(rows_++);
  token_[i] = token;
  position_[i] = position;
  prompt_size_[i] = prompt_size;
  page_table_[i] = page_table;
}

void Forward::run(const Weights& weights, KvPool& pool) {
  embed(weights);
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    const LayerWeights& w = weights.layers[static_cast<size_t>(l)];
    norm(x_.data(), nullptr, rows_, w.attention_norm);
    gemm(normed_.data(), ld_hidden_, rows_, w.qkv, w.qkv_bias.data(), qkv_.data(), ld_qkv_,
         config_.qkv_bias ? GemmStart::kBias : GemmStart::kZero, GemmEnd::kStore);
    attend(pool.layer(l));
    gemm(attention_.data(), ld_attention_, rows_, w.o, nullptr, x_.data(), ld_hidden_, GemmStart::kAdd,
         GemmEnd::kStore);
    norm(x_.data(), nullptr, rows_, w.mlp_norm);
    gemm(normed_.data(), ld_hidden_, rows_, w.gate_up, nullptr, mlp_.data(), ld_mlp_, GemmStart::kZero,
         GemmEnd::kSwiGlu);
    gemm(mlp_.data(), ld_mlp_, rows_, w.down, nullptr, x_.data(), ld_hidden_, GemmStart::kAdd, GemmEnd::kStore);
  }
}

const float* Forward::logits(const Weights& weights, const int32_t* row_index, int64_t count) {
  norm(x_.data(), row_index, count, weights.final_norm);
  gemm(normed_.data(), ld_hidden_, count, weights.head, nullptr, logits_.data(), ld_vocab_, GemmStart::kZero,
       GemmEnd::kStore);
  return logits_.data();
}

void Forward::embed(const Weights& weights) {
  const int64_t hidden = config_.hidden_size;
  for (int64_t i = 0; i < rows_; ++i) {
    const int64_t offset = token_[static_cast<size_t>(i)] * hidden;
    float* x = x_.data() + i * ld_hidden_;
    if (weights.embedding_dtype == DType::kFloat32) {
      const float* from = reinterpret_cast<const float*>(weights.embedding.data()) + offset;
      std::memcpy(x, from, static_cast<size_t>(hidden) * sizeof(float));
    } else {
      const auto* from = reinterpret_cast<const uint16_t*>(weights.embedding.data()) + offset;
      for (int64_t j = 0; j < hidden; ++j) x[j] = std::bit_cast<float>(uint32_t{from[j]} << 16);
    }
  }
}

void Forward::norm(const float* x, const int32_t* row_index, int64_t rows, const Buffer<float>& weight) {
  kernels_.rms_norm({x, ld_hidden_, row_index, weight.data(), static_cast<float>(config_.rms_norm_eps), normed_.data(),
                     ld_hidden_, rows, config_.hidden_size});
}

void Forward::gemm(const float* a, int64_t lda, int64_t rows, const PackedMatrix& matrix, const float* bias, float* c,
                   int64_t ldc, GemmStart start, GemmEnd end) {
  const int64_t panels = (matrix.n + kernels_.panel_columns - 1) / kernels_.panel_columns;
  const int64_t cost = matrix.k * kernels_.panel_columns * (rows + 8);  // reading a panel costs as much as 8 rows
  split(panels, cost, threads_, [&](int64_t panel_begin, int64_t panel_end, int64_t) {
    kernels_.gemm({a, lda, rows, matrix.k, matrix.panels.data(), matrix.dtype, matrix.n, panel_begin, panel_end, bias,
                   c, ldc, start, end});
  });
}

void Forward::attend(KvLayer kv) {
  // A few rows at a time, so that the pages just written are still in the first-level cache when they are read. Earlier
  // rows of the same sequence have been written by then.
  constexpr int64_t kBlock = 4;
  const BatchRows batch{position_.data(), prompt_size_.data(), page_table_.data()};
  const auto rope = [&](int64_t begin, int64_t end) {
    kernels_.rope({qkv_.data(), ld_qkv_, config_.num_heads, cos_.data(), sin_.data(), kv, batch, begin, end});
  };
  const auto attention = [&](int64_t begin, int64_t end, int64_t piece) {
    kernels_.attention({qkv_.data(), ld_qkv_, config_.num_heads, attention_.data(), ld_attention_, kv, batch, begin,
                        end, scores_.data() + piece * ld_scores_});
  };
  if (threads_ == 1) {
    for (int64_t begin = 0; begin < rows_; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, rows_);
      rope(begin, end);
      attention(begin, end, 0);
    }
    return;
  }
  rope(0, rows_);
  int64_t positions = 0;
  for (int64_t i = 0; i < rows_; ++i) positions += position_[static_cast<size_t>(i)] + 1;
  split(rows_, 2 * config_.q_size() * positions / std::max<int64_t>(rows_, 1), threads_, attention);
}

}  // namespace areal::decode
