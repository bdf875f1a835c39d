// Log-probability of one label per row of logits, with the row's entropy and log-sum-exp, and their gradient.
//
//   z = x / temperature;   logprob = z_y - lse(z);   entropy = -sum_j p_j ln p_j;   lse = ln sum_j e^z_j
//   dL/dx_j = (1/temperature) [ a (1{j=y} - p_j) - b p_j (ln p_j + entropy) + c p_j ]
//   with a = dL/dlogprob, b = dL/dentropy, c = dL/dlse.
//
// One read of the logits forward, one read and one write backward; the softmax is never stored. The statistics of a
// row are those of M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax" (2018), with the weighted
// sum of the entropy added (logprob_math.h).
//
// Rows whose label is ignore_index, or whose loss_mask is 0, are not read: their outputs and their gradient are 0.
//
// Vocab-parallel: a rank holds columns [vocab_start, vocab_start + vocab) of every row. logprob_partial summarises them
// in 16 bytes a row, ranks exchange those in one all-gather, logprob_merge gives the outputs, the same bits on every
// rank, and backward is local.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/host_device.h"

namespace areal {

// What forward and backward both read. Real is the type of every per-row array: double when the logits are float64
// (CPU only), float otherwise. All pointers are to the device that runs the op; arrays have `rows` entries.
template <class Real>
struct LogprobInput {
  const void* logits = nullptr;  // [rows, vocab], element stride 1
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;              // in elements; 0 (an expanded row) is fine
  int64_t rows = 0;                    // T
  int64_t vocab = 0;                   // V; of the shard where the vocabulary is split
  int64_t vocab_start = 0;             // the whole vocabulary's index of column 0
  const int64_t* labels = nullptr;     // indices of the whole vocabulary
  const Real* temperatures = nullptr;  // nullptr: `temperature` for every row
  double temperature = 1.0;
  const bool* loss_mask = nullptr;  // nullptr: every row is live
  int64_t ignore_index = -100;

  AREAL_HOST_DEVICE bool live(int64_t row) const {
    return (loss_mask == nullptr || loss_mask[row]) && labels[row] != ignore_index;
  }
  AREAL_HOST_DEVICE Real row_temperature(int64_t row) const {
    return temperatures == nullptr ? static_cast<Real>(temperature) : temperatures[row];
  }
};

// What a rank contributes to a row.
template <class Real>
struct alignas(4 * sizeof(Real)) LogprobPart {
  Real max;          // of the shard's raw logits, -inf where it has no finite one
  Real excess;       // sum_j e^(z_j - z_max) - 1: of a sum near 1, the digits behind the 1 are what matters
  Real weighted;     // sum_j e^(z_j - z_max) (z_j - z_max) log2(e)
  Real label_logit;  // 0 where another rank owns the label: the ranks' sum is the label's logit
};

// Per-row results. row_max (of the raw logits) and log_sum (ln sum_j e^(z_j - z_max)) are what backward needs; lse
// is their sum, but must not replace them: at logits near 16384 the sum has lost the digits that matter.
template <class Real>
struct LogprobOutput {
  Real* logprobs = nullptr;
  Real* entropy = nullptr;
  Real* lse = nullptr;
  Real* row_max = nullptr;
  Real* log_sum = nullptr;
};

template <class Real>
struct LogprobGradient {
  const Real* grad_logprobs = nullptr;  // nullptr: zero
  const Real* grad_entropy = nullptr;   // nullptr: zero
  const Real* grad_lse = nullptr;       // nullptr: zero
  const Real* logprobs = nullptr;       // these four: what forward returned
  const Real* entropy = nullptr;
  const Real* row_max = nullptr;
  const Real* log_sum = nullptr;
  void* grad_logits = nullptr;  // [rows, vocab] of the logits' dtype; may be the logits themselves
  int64_t grad_row_stride = 0;  // in elements, at least vocab
  bool fresh_memory = false;    // CPU: grad_logits is a new mapping, to be populated in bulk (base/fresh_memory.h)
};

// CPU. Bitwise the same for any number of threads. Throws areal::Error on a live row whose label lies outside
// [0, vocab) or whose temperature is not a positive finite number; nothing has been written then.
void logprob_forward_cpu(const LogprobInput<float>& input, const LogprobOutput<float>& output);
void logprob_forward_cpu(const LogprobInput<double>& input, const LogprobOutput<double>& output);
void logprob_backward_cpu(const LogprobInput<float>& input, const LogprobGradient<float>& gradient);
void logprob_backward_cpu(const LogprobInput<double>& input, const LogprobGradient<double>& gradient);

// CPU, vocab-parallel. Labels must lie in [0, vocab_total), the length of the whole vocabulary; parts [rows].
void logprob_partial_cpu(const LogprobInput<float>& input, int64_t vocab_total, LogprobPart<float>* parts);
void logprob_partial_cpu(const LogprobInput<double>& input, int64_t vocab_total, LogprobPart<double>* parts);
// parts [ranks, rows], rank after rank, merged in that order. The logits are not read.
void logprob_merge_cpu(const LogprobInput<float>& input, const LogprobPart<float>* parts, int64_t ranks,
                       const LogprobOutput<float>& output);
void logprob_merge_cpu(const LogprobInput<double>& input, const LogprobPart<double>* parts, int64_t ranks,
                       const LogprobOutput<double>& output);

// CUDA; float32, bfloat16 and float16. Asynchronous on `stream` (a cudaStream_t), no host synchronisation, bitwise the
// same from run to run. Labels and temperatures cannot be checked on the host: a live row where they are out of range
// gets NaN, and *bad_row (64 bits of memory that host and device can access, 0 before) is set to one plus such a row.
struct LogprobCudaScratch {
  void* workspace = nullptr;  // logprob_workspace_bytes(input) on the device, uninitialised
  int64_t* bad_row = nullptr;
};
int64_t logprob_workspace_bytes(const LogprobInput<float>& input);
void logprob_forward_cuda(const LogprobInput<float>& input, const LogprobOutput<float>& output,
                          const LogprobCudaScratch& scratch, void* stream);
void logprob_backward_cuda(const LogprobInput<float>& input, const LogprobGradient<float>& gradient, void* stream);
void logprob_partial_cuda(const LogprobInput<float>& input, int64_t vocab_total, LogprobPart<float>* parts,
                          const LogprobCudaScratch& scratch, void* stream);
void logprob_merge_cuda(const LogprobInput<float>& input, const LogprobPart<float>* parts, int64_t ranks,
                        const LogprobOutput<float>& output, void* stream);

}  // namespace areal
