// The log-softmax gather in plain double, and problems to try it on. Shared by the CPU and the kernel tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "ops/logprob/logprob.h"

namespace areal::logprob_test {

inline double decode(const void* p, DType dtype) {
  if (dtype == DType::kFloat64) return *static_cast<const double*>(p);
  if (dtype == DType::kFloat32) return *static_cast<const float*>(p);
  if (dtype == DType::kFloat16) return static_cast<double>(*static_cast<const _Float16*>(p));
  return std::bit_cast<float>(uint32_t{*static_cast<const uint16_t*>(p)} << 16);
}

inline void encode(double value, void* p, DType dtype) {
  const float x = static_cast<float>(value);
  if (dtype == DType::kFloat64) {
    *static_cast<double*>(p) = value;
  } else if (dtype == DType::kFloat32) {
    *static_cast<float*>(p) = x;
  } else if (dtype == DType::kFloat16) {
    *static_cast<_Float16*>(p) = static_cast<_Float16>(x);
  } else {  // truncated, but for NaN, whose payload may all be in the lower half
    *static_cast<uint16_t*>(p) = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  }
}

// Relative spacing of the dtype, for gradients, which are rounded to it.
inline double dtype_epsilon(DType dtype) {
  return dtype == DType::kBFloat16 ? 1.0 / 128 : dtype == DType::kFloat16 ? 1.0 / 1024 : 1e-6;
}

// SplitMix64: the same numbers with every standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }

 private:
  uint64_t state_;
};

// A matrix of `dtype` that starts `offset` elements after a 16-byte boundary; what lies between the rows is NaN.
struct Matrix {
  DType dtype;
  int64_t rows, columns, stride, offset;
  std::vector<std::max_align_t> storage;

  Matrix(DType dtype_, int64_t rows_, int64_t columns_, int64_t gap = 0, int64_t offset_ = 0)
      : dtype(dtype_), rows(rows_), columns(columns_), stride(columns_ + gap), offset(offset_) {
    const int64_t elements = offset + rows * stride + 16;
    storage.resize(static_cast<size_t>(elements) * dtype_size_bytes(dtype) / sizeof(std::max_align_t) + 1);
    for (int64_t i = 0; i < elements; ++i) encode(NAN, base() + i * bytes(), dtype);
  }
  int64_t bytes() const { return static_cast<int64_t>(dtype_size_bytes(dtype)); }
  char* base() { return reinterpret_cast<char*>(storage.data()); }
  const char* base() const { return reinterpret_cast<const char*>(storage.data()); }
  void* data() { return base() + offset * bytes(); }
  const void* data() const { return base() + offset * bytes(); }
  double get(int64_t row, int64_t column) const {
    return decode(base() + (offset + row * stride + column) * bytes(), dtype);
  }
  void set(int64_t row, int64_t column, double value) {
    encode(value, base() + (offset + row * stride + column) * bytes(), dtype);
  }
  // Everything outside the rows is still NaN.
  bool surroundings_untouched() const {
    for (int64_t i = 0; i < offset + rows * stride + 16; ++i) {
      const int64_t j = i - offset;
      const bool inside = j >= 0 && j < rows * stride && j % stride < columns;
      if (!inside && !std::isnan(decode(base() + i * bytes(), dtype))) return false;
    }
    return true;
  }
};

template <class Real>
struct Problem {
  Matrix logits;
  std::vector<int64_t> labels;
  std::vector<Real> temperatures;  // empty: `temperature`
  double temperature = 0.7;
  std::vector<uint8_t> mask;  // empty: all live
  std::vector<Real> grad_logprobs, grad_entropy, grad_lse;

  Problem(DType dtype, int64_t rows, int64_t vocab, uint64_t seed, int64_t gap = 0, int64_t offset = 0)
      : logits(dtype, rows, vocab, gap, offset) {
    Random random(seed);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t j = 0; j < vocab; ++j) logits.set(row, j, 3 * random.normal());
      labels.push_back(static_cast<int64_t>(random.next() % static_cast<uint64_t>(vocab)));
      grad_logprobs.push_back(static_cast<Real>(3 * random.normal()));
      grad_entropy.push_back(static_cast<Real>(3 * random.normal()));
      grad_lse.push_back(static_cast<Real>(3 * random.normal()));
    }
  }
  double row_temperature(int64_t row) const {
    return temperatures.empty() ? static_cast<double>(static_cast<Real>(temperature)) : temperatures[row];
  }
  LogprobInput<Real> input() const {
    LogprobInput<Real> in;
    in.logits = logits.data();
    in.dtype = logits.dtype;
    in.row_stride = logits.stride;
    in.rows = logits.rows;
    in.vocab = logits.columns;
    in.labels = labels.data();
    in.temperatures = temperatures.empty() ? nullptr : temperatures.data();
    in.temperature = temperature;
    in.loss_mask = mask.empty() ? nullptr : reinterpret_cast<const bool*>(mask.data());
    return in;
  }
};

template <class Real>
struct Result {
  std::vector<Real> logprobs, entropy, lse, row_max, log_sum;

  explicit Result(int64_t rows) {
    for (auto* values : {&logprobs, &entropy, &lse, &row_max, &log_sum}) values->assign(static_cast<size_t>(rows), 77);
  }
  LogprobOutput<Real> output() { return {logprobs.data(), entropy.data(), lse.data(), row_max.data(), log_sum.data()}; }
  LogprobGradient<Real> gradient(const Problem<Real>& problem, Matrix& grad) const {
    LogprobGradient<Real> gradient;
    gradient.grad_logprobs = problem.grad_logprobs.data();
    gradient.grad_entropy = problem.grad_entropy.data();
    gradient.grad_lse = problem.grad_lse.data();
    gradient.logprobs = logprobs.data();
    gradient.entropy = entropy.data();
    gradient.row_max = row_max.data();
    gradient.log_sum = log_sum.data();
    gradient.grad_logits = grad.data();
    gradient.grad_row_stride = grad.stride;
    return gradient;
  }
  bool operator==(const Result& other) const {  // bitwise, so that NaN equals itself
    const auto same = [](const std::vector<Real>& a, const std::vector<Real>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(Real)) == 0;
    };
    return same(logprobs, other.logprobs) && same(entropy, other.entropy) && same(lse, other.lse) &&
           same(row_max, other.row_max) && same(log_sum, other.log_sum);
  }
};

struct RowTruth {
  double logprob = 0, entropy = 0, lse = 0;
  std::vector<double> gradient;
};

template <class Real>
RowTruth row_truth(const Problem<Real>& problem, int64_t row) {
  const int64_t vocab = problem.logits.columns;
  RowTruth truth;
  truth.gradient.assign(static_cast<size_t>(vocab), 0.0);
  if (!problem.input().live(row)) return truth;
  const double temperature = problem.row_temperature(row);
  double top = -INFINITY, sum = 0;
  for (int64_t j = 0; j < vocab; ++j) top = std::max(top, problem.logits.get(row, j) / temperature);
  for (int64_t j = 0; j < vocab; ++j) sum += std::exp(problem.logits.get(row, j) / temperature - top);
  const auto logp = [&](int64_t j) { return problem.logits.get(row, j) / temperature - top - std::log(sum); };
  for (int64_t j = 0; j < vocab; ++j) truth.entropy -= std::exp(logp(j)) == 0 ? 0 : std::exp(logp(j)) * logp(j);
  truth.logprob = logp(problem.labels[row]);
  truth.lse = top + std::log(sum);
  for (int64_t j = 0; j < vocab; ++j) {
    const double p = std::exp(logp(j)), onehot = j == problem.labels[row] ? 1 : 0;
    const double spread = p == 0 ? 0 : p * (logp(j) + truth.entropy);
    truth.gradient[static_cast<size_t>(j)] =
        (problem.grad_logprobs[row] * (onehot - p) - problem.grad_entropy[row] * spread + problem.grad_lse[row] * p) /
        temperature;
  }
  return truth;
}

inline bool close(double value, double truth, double absolute, double relative) {
  return std::fabs(value - truth) <= absolute + relative * std::fabs(truth);  // false for NaN
}

template <class Real>
void expect_matches_oracle(const Problem<Real>& problem, const Result<Real>& result, const Matrix& grad) {
  const double epsilon = dtype_epsilon(problem.logits.dtype);
  for (int64_t row = 0; row < problem.logits.rows; ++row) {
    const RowTruth truth = row_truth(problem, row);
    SCOPED_TRACE("row " + std::to_string(row));
    EXPECT_PRED4(close, result.logprobs[row], truth.logprob, 3e-6, 3e-7);
    EXPECT_PRED4(close, result.entropy[row], truth.entropy, 3e-6, 3e-7);
    EXPECT_PRED4(close, result.lse[row], truth.lse, 3e-6, 3e-7);
    double worst = 0;
    int64_t where = -1;
    for (int64_t j = 0; j < problem.logits.columns; ++j) {
      const double want = truth.gradient[static_cast<size_t>(j)];
      const double error = std::fabs(grad.get(row, j) - want) / (1e-6 + epsilon * std::fabs(want));
      if (!(error <= worst)) worst = error, where = j;
    }
    EXPECT_LE(worst, 12.0) << "gradient at column " << where << " is " << grad.get(row, where < 0 ? 0 : where);
  }
}

// The columns [start, start + size) of a problem, as the rank that holds them sees it.
template <class Real>
LogprobInput<Real> shard_of(const Problem<Real>& problem, int64_t start, int64_t size) {
  LogprobInput<Real> shard = problem.input();
  shard.logits = static_cast<const char*>(shard.logits) + start * problem.logits.bytes();
  shard.vocab = size;
  shard.vocab_start = start;
  return shard;
}

// The op with the vocabulary cut into shards of the given sizes: partial(shard, total, parts) for each, one
// merge(input, parts, ranks, output), and backward(shard, gradient) for each.
template <class Real, class PartialFn, class MergeFn, class BackwardFn>
Result<Real> check_shards(const Problem<Real>& problem, const std::vector<int64_t>& sizes, const PartialFn& partial,
                          const MergeFn& merge, const BackwardFn& backward) {
  const int64_t rows = problem.logits.rows, total = problem.logits.columns;
  std::vector<LogprobPart<Real>> parts(sizes.size() * static_cast<size_t>(rows), {NAN, NAN, NAN, NAN});
  std::vector<LogprobInput<Real>> shards;
  int64_t start = 0;
  for (const int64_t size : sizes) {
    shards.push_back(shard_of(problem, start, size));
    partial(shards.back(), total, parts.data() + (static_cast<int64_t>(shards.size()) - 1) * rows);
    start += size;
  }
  EXPECT_EQ(start, total);
  Result<Real> result(rows);
  merge(shards[0], static_cast<const LogprobPart<Real>*>(parts.data()), static_cast<int64_t>(sizes.size()),
        result.output());
  Matrix grad(problem.logits.dtype, rows, total, problem.logits.stride - total, problem.logits.offset);
  for (const LogprobInput<Real>& shard : shards) {
    LogprobGradient<Real> gradient = result.gradient(problem, grad);
    gradient.grad_logits = static_cast<char*>(grad.data()) + shard.vocab_start * grad.bytes();
    backward(shard, gradient);
  }
  expect_matches_oracle(problem, result, grad);
  EXPECT_TRUE(grad.surroundings_untouched());
  return result;
}

}  // namespace areal::logprob_test
