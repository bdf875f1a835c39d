/* Log-softmax at a label, entropy and log-sum-exp of each row of logits, and their gradient. */
#ifndef AREAL_CORE_LOGPROB_H
#define AREAL_CORE_LOGPROB_H

#include <areal_core/base.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct areal_logprob_input {
  size_t size;
  int64_t dtype;      /* of the logits; AREAL_FLOAT64 on the CPU only */
  const void* logits; /* [rows, vocab], element stride 1 */
  int64_t row_stride; /* elements */
  int64_t rows;
  int64_t vocab;            /* of the shard where the vocabulary is split */
  int64_t vocab_start;      /* the whole vocabulary's index of column 0 */
  const int64_t* labels;    /* [rows], indices of the whole vocabulary */
  int64_t ignore_index;     /* the label of rows that count as masked */
  double temperature;       /* > 0; read where temperatures is NULL */
  const void* temperatures; /* real [rows] or NULL */
  const uint8_t* loss_mask; /* [rows] or NULL: every row is live */
} areal_logprob_input;

typedef struct areal_logprob_output { /* real [rows] each, all required */
  size_t size;
  void* logprobs;
  void* entropy;
  void* lse;
  void* row_max; /* this and log_sum: for the backward */
  void* log_sum;
} areal_logprob_output;

typedef struct areal_logprob_gradient {
  size_t size;
  const void* grad_logprobs; /* real [rows] or NULL: zero; so are the next two */
  const void* grad_entropy;
  const void* grad_lse;
  const void* logprobs; /* these four: what the forward gave */
  const void* entropy;
  const void* row_max;
  const void* log_sum;
  void* grad_logits;       /* [rows, vocab] of the logits' dtype; may be the logits themselves */
  int64_t grad_row_stride; /* elements, at least vocab */
} areal_logprob_gradient;

typedef struct areal_logprob_scratch {
  size_t size;
  void* workspace; /* on the device, any content, of areal_logprob_workspace_bytes() */
  int64_t workspace_bytes;
  int64_t* bad_row; /* one element that the device can write, 0 before: becomes 1 + a live row with a label or
                       temperature out of range, whose results are NaN */
} areal_logprob_scratch;

AREAL_API areal_status areal_logprob_forward_cpu(const areal_logprob_input* input, const areal_logprob_output* output);
AREAL_API areal_status areal_logprob_backward_cpu(const areal_logprob_input* input,
                                                  const areal_logprob_gradient* gradient);
AREAL_API areal_status areal_logprob_workspace_bytes(const areal_logprob_input* input, int64_t* bytes);
AREAL_API areal_status areal_logprob_forward_cuda(const areal_logprob_input* input, const areal_logprob_output* output,
                                                  const areal_logprob_scratch* scratch, void* stream);
AREAL_API areal_status areal_logprob_backward_cuda(const areal_logprob_input* input,
                                                   const areal_logprob_gradient* gradient, void* stream);

/* Vocab-parallel: a rank holds the columns [vocab_start, vocab_start + vocab) of every row. *_partial sums them up in
 * parts, real [rows, 4] aligned to 4 elements; an all-gather makes [ranks, rows, 4] of them; *_merge adds them in rank
 * order, to the same bits on every rank. The backward above, given that output, is local. */
AREAL_API areal_status areal_logprob_partial_cpu(const areal_logprob_input* input, int64_t vocab_total, void* parts);
AREAL_API areal_status areal_logprob_merge_cpu(const areal_logprob_input* input, const void* parts, int64_t ranks,
                                               const areal_logprob_output* output);
AREAL_API areal_status areal_logprob_partial_cuda(const areal_logprob_input* input, int64_t vocab_total, void* parts,
                                                  const areal_logprob_scratch* scratch, void* stream);
AREAL_API areal_status areal_logprob_merge_cuda(const areal_logprob_input* input, const void* parts, int64_t ranks,
                                                const areal_logprob_output* output, void* stream);

#ifdef __cplusplus
}
#endif

#endif /* AREAL_CORE_LOGPROB_H */
