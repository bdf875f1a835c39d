// CPU entry points: checks, the split into blocks, and the merge of their results in index order, which is what
// makes the result the same for any number of threads.
#include "ops/logprob/logprob.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/fresh_memory.h"
#include "base/threads.h"
#include "ops/logprob/logprob_cpu.h"
#include "ops/logprob/logprob_math.h"

namespace areal {
namespace {

using logprob::Partial;
using logprob::RowGradient;

constexpr int64_t kBlockMultiple = 64;  // whole vectors on every instruction set
static_assert(kLogprobBlock % kBlockMultiple == 0);

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The cut of a row into blocks, of equal length but for the last: while one is computed the next is fetched, also from
// one row to the next, and a short one would leave no time for it.
struct Blocks {
  int64_t vocab, size, count;

  explicit Blocks(int64_t vocab_) : vocab(vocab_) {
    const int64_t at_least = std::max<int64_t>(1, ceil_div(vocab, kLogprobBlock));
    size = kBlockMultiple * std::max<int64_t>(1, ceil_div(vocab, at_least * kBlockMultiple));
    count = ceil_div(vocab, size);
  }
  int64_t length(int64_t block) const { return std::min(size, vocab - block * size); }
};

template <class Real>
const void* element(const LogprobInput<Real>& input, int64_t row, int64_t column) {
  const int64_t bytes = static_cast<int64_t>(dtype_size_bytes(input.dtype));
  return static_cast<const char*>(input.logits) + (row * input.row_stride + column) * bytes;
}

// Grain for parallel_for over items of `elements` elements each: a thread is worth waking for about 30 us.
int64_t grain_for(int64_t elements) { return std::max<int64_t>(1, 8 * kLogprobBlock / std::max<int64_t>(1, elements)); }

float load_logit(const void* element, DType dtype, float) { AREAL_ISA_DISPATCH(logprob_load(element, dtype)); }
double load_logit(const void* element, DType, double) { return *static_cast<const double*>(element); }

void store_gradient(float value, void* element, DType dtype) {
  AREAL_ISA_DISPATCH(logprob_store(value, element, dtype));
}
void store_gradient(double value, void* element, DType) { *static_cast<double*>(element) = value; }

Partial<double> forward_block(const void* logits, DType dtype, int64_t count, float scale) {
  AREAL_ISA_DISPATCH(logprob_forward_block(logits, dtype, count, scale));
}

Partial<double> forward_block(const void* logits, DType, int64_t count, double scale) {
  const double* x = static_cast<const double*>(logits);
  Partial<double> part = logprob::empty_partial<double>();
  for (int64_t j = 0; j < count; ++j) part.max = x[j] > part.max ? x[j] : part.max;
  for (int64_t j = 0; j < count; ++j) {
    if (x[j] == -INFINITY) continue;
    const double t = (x[j] - part.max) * scale, e = std::exp2(t);
    part.sum += e;
    part.weighted += e == 0 ? 0 : e * t;
  }
  return part;
}

void backward_block(const void* logits, void* grad, DType dtype, int64_t count, const RowGradient<float>& row) {
  AREAL_ISA_DISPATCH(logprob_backward_block(logits, grad, dtype, count, row));
}

void backward_block(const void* logits, void* grad, DType, int64_t count, const RowGradient<double>& row) {
  const double* x = static_cast<const double*>(logits);
  double* g = static_cast<double*>(grad);
  for (int64_t j = 0; j < count; ++j) {
    const double t = (x[j] - row.max) * row.scale - row.offset, p = std::exp2(t);
    g[j] = p == 0 ? 0 : p * (row.constant + row.slope * t);
  }
}

template <class Real>
void check_live_rows(const LogprobInput<Real>& input, int64_t vocab_total) {
  const char* op = "logprob_from_logits";
  for (int64_t row = 0; row < input.rows; ++row) {
    if (!input.live(row)) continue;
    const int64_t label = input.labels[row];
    AREAL_CHECK(label >= 0 && label < vocab_total, op, ": expected labels[", row, "] in [0, ", vocab_total,
                ") or equal to ignore_index = ", input.ignore_index, ", got ", label);
    const Real temperature = input.row_temperature(row);
    AREAL_CHECK(temperature > 0 && std::isnormal(temperature), op, ": expected temperature of row ", row,
                " > 0 and finite, got ", temperature);
  }
}

template <class Real>
Partial<double> row_block(const LogprobInput<Real>& input, const Blocks& blocks, int64_t row, int64_t block) {
  const Real scale = static_cast<Real>(logprob::kLog2E / static_cast<double>(input.row_temperature(row)));
  return forward_block(element(input, row, block * blocks.size), input.dtype, blocks.length(block), scale);
}

// Where the sums of a row go: they become its outputs, or the part that this rank contributes.
template <class Real>
struct OutputSink {
  const LogprobInput<Real>& input;
  const LogprobOutput<Real>& output;

  void live(int64_t row, const Partial<double>& total) const {
    const double label_logit = load_logit(element(input, row, input.labels[row]), input.dtype, Real{});
    store(row, logprob::finish_row<double>(total, label_logit, input.row_temperature(row)), total.max);
  }
  void masked(int64_t row) const { store(row, {0, 0, 0, 0}, 0); }
  void store(int64_t row, const logprob::RowResult<double>& result, double row_max) const {
    output.logprobs[row] = static_cast<Real>(result.logprob);
    output.entropy[row] = static_cast<Real>(result.entropy);
    output.lse[row] = static_cast<Real>(result.lse);
    output.row_max[row] = static_cast<Real>(row_max);
    output.log_sum[row] = static_cast<Real>(result.log_sum);
  }
};

template <class Real>
struct PartSink {
  const LogprobInput<Real>& input;
  LogprobPart<Real>* parts;

  void live(int64_t row, const Partial<double>& total) const {
    const int64_t column = input.labels[row] - input.vocab_start;
    const bool owned = column >= 0 && column < input.vocab;
    const auto part =
        logprob::to_part<double>(total, owned ? load_logit(element(input, row, column), input.dtype, Real{}) : Real(0));
    parts[row] = {static_cast<Real>(part.max), static_cast<Real>(part.excess), static_cast<Real>(part.weighted),
                  static_cast<Real>(part.label_logit)};
  }
  void masked(int64_t row) const { parts[row] = {0, 0, 0, 0}; }
};

// Merges a row's blocks, given by block(index), in index order; in double, so that their number costs no digits.
template <class Real, class Sink, class Block>
void finish_row(const LogprobInput<Real>& input, int64_t blocks, int64_t row, const Sink& sink, const Block& block) {
  const double scale = logprob::kLog2E / static_cast<double>(input.row_temperature(row));
  Partial<double> total = logprob::empty_partial<double>();
  for (int64_t b = 0; b < blocks; ++b) total = b == 0 ? block(0) : logprob::merge(total, block(b), scale);
  sink.live(row, total);
}

template <class Real, class Sink>
void forward_by_rows(const LogprobInput<Real>& input, const Sink& sink) {
  const Blocks blocks(input.vocab);
  parallel_for(0, input.rows, grain_for(input.vocab), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (input.live(row)) {
        finish_row(input, blocks.count, row, sink, [&](int64_t b) { return row_block(input, blocks, row, b); });
      } else {
        sink.masked(row);
      }
    }
  });
}

// For few rows: the blocks of all rows are shared out, their results kept and merged afterwards.
template <class Real, class Sink>
void forward_by_blocks(const LogprobInput<Real>& input, const Sink& sink) {
  const Blocks blocks(input.vocab);
  const int64_t count = blocks.count;
  std::vector<Partial<double>> parts(static_cast<size_t>(input.rows * count));
  parallel_for(0, input.rows * count, grain_for(blocks.size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (input.live(i / count)) parts[static_cast<size_t>(i)] = row_block(input, blocks, i / count, i % count);
    }
  });
  for (int64_t row = 0; row < input.rows; ++row) {
    if (input.live(row)) {
      finish_row(input, count, row, sink, [&](int64_t b) { return parts[static_cast<size_t>(row * count + b)]; });
    } else {
      sink.masked(row);
    }
  }
}

template <class Real, class Sink>
void forward(const LogprobInput<Real>& input, int64_t vocab_total, const Sink& sink) {
  check_live_rows(input, vocab_total);
  const int64_t threads = num_threads();
  if (threads > 1 && input.rows < 4 * threads) {
    forward_by_blocks(input, sink);
  } else {
    forward_by_rows(input, sink);
  }
}

template <class Real>
void merge_rows(const LogprobInput<Real>& input, const LogprobPart<Real>* parts, int64_t ranks,
                const LogprobOutput<Real>& output) {
  const OutputSink<Real> sink{input, output};
  parallel_for(0, input.rows, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (!input.live(row)) {
        sink.masked(row);
        continue;
      }
      double row_max = 0;
      const auto result = logprob::merge_ranks(parts + row, ranks, input.rows, input.row_temperature(row), &row_max);
      sink.store(row, result, row_max);
    }
  });
}

template <class Real>
logprob::Upstream<Real> upstream(const LogprobGradient<Real>& gradient, int64_t row) {
  const auto at = [row](const Real* values) { return values == nullptr ? Real(0) : values[row]; };
  return {at(gradient.grad_logprobs), at(gradient.grad_entropy), at(gradient.grad_lse)};
}

// Blocks [first, last) of one row.
template <class Real>
void backward_blocks(const LogprobInput<Real>& input, const LogprobGradient<Real>& gradient, const Blocks& blocks,
                     int64_t row, int64_t first, int64_t last) {
  const int64_t bytes = static_cast<int64_t>(dtype_size_bytes(input.dtype));
  const int64_t begin = first * blocks.size, end = std::min(last * blocks.size, input.vocab);
  const int64_t label = input.labels[row] - input.vocab_start;  // in another shard: outside [0, vocab)
  const Real temperature = input.row_temperature(row), entropy = gradient.entropy[row];
  const auto up = upstream(gradient, row);
  const auto math = input.live(row)
                        ? logprob::row_gradient(up, gradient.row_max[row], gradient.log_sum[row], entropy, temperature)
                        : logprob::zero_row<Real>();
  char* const out = static_cast<char*>(gradient.grad_logits) + row * gradient.grad_row_stride * bytes;
  if (gradient.fresh_memory) populate(out + begin * bytes, static_cast<size_t>((end - begin) * bytes));
  if (math.zero) {
    std::memset(out + begin * bytes, 0, static_cast<size_t>((end - begin) * bytes));
    return;
  }
  for (int64_t j = begin; j < end; j += blocks.size) {
    backward_block(element(input, row, j), out + j * bytes, input.dtype, std::min(blocks.size, end - j), math);
  }
  if (label >= begin && label < end) {
    const Real value = logprob::label_gradient(up, gradient.logprobs[row], entropy, temperature);
    store_gradient(value, out + label * bytes, input.dtype);
  }
}

template <class Real>
void backward(const LogprobInput<Real>& input, const LogprobGradient<Real>& gradient) {
  const Blocks blocks(input.vocab);
  const int64_t count = blocks.count;
  parallel_for(0, input.rows * count, grain_for(std::min(blocks.size, input.vocab)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / count, next = std::min(end, (row + 1) * count);
      backward_blocks(input, gradient, blocks, row, i - row * count, next - row * count);
      i = next;
    }
  });
}

}  // namespace

void logprob_forward_cpu(const LogprobInput<float>& input, const LogprobOutput<float>& output) {
  forward(input, input.vocab, OutputSink<float>{input, output});
}
void logprob_forward_cpu(const LogprobInput<double>& input, const LogprobOutput<double>& output) {
  forward(input, input.vocab, OutputSink<double>{input, output});
}
void logprob_partial_cpu(const LogprobInput<float>& input, int64_t vocab_total, LogprobPart<float>* parts) {
  forward(input, vocab_total, PartSink<float>{input, parts});
}
void logprob_partial_cpu(const LogprobInput<double>& input, int64_t vocab_total, LogprobPart<double>* parts) {
  forward(input, vocab_total, PartSink<double>{input, parts});
}
void logprob_merge_cpu(const LogprobInput<float>& input, const LogprobPart<float>* parts, int64_t ranks,
                       const LogprobOutput<float>& output) {
  merge_rows(input, parts, ranks, output);
}
void logprob_merge_cpu(const LogprobInput<double>& input, const LogprobPart<double>* parts, int64_t ranks,
                       const LogprobOutput<double>& output) {
  merge_rows(input, parts, ranks, output);
}
void logprob_backward_cpu(const LogprobInput<float>& input, const LogprobGradient<float>& gradient) {
  backward(input, gradient);
}
void logprob_backward_cpu(const LogprobInput<double>& input, const LogprobGradient<double>& gradient) {
  backward(input, gradient);
}

}  // namespace areal
