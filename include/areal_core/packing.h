/* Layouts of variable-length sequences, and assigning sequences to micro-batches. */
#ifndef AREAL_CORE_PACKING_H
#define AREAL_CORE_PACKING_H

#include <areal_core/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Rows moved between layouts of variable-length sequences; segment s of length target_end[s] - target_begin[s] copies
 *
 *     target[target_begin[s] + i] = source[source_begin[s] + i - shift]     0 <= i, i - shift < length
 *
 * and every other target row is filled. Padded to packed, packed to padded and choosing sequences: shift 0. The value
 * of the previous (next) token of the same sequence: source_begin = target_begin = cu_seqlens, target_end = cu_seqlens
 * + 1, shift 1 (-1). Segments are ordered by target and do not overlap. */
typedef struct areal_segment_map {
  size_t size;
  int64_t segments;
  const int64_t* source_begin; /* [segments] */
  const int64_t* target_begin; /* [segments] */
  const int64_t* target_end;   /* [segments] */
  int64_t shift;
  int64_t source_rows;
  int64_t target_rows;
} areal_segment_map;

typedef struct areal_row_tensor {
  size_t size;
  const void* source; /* [source_rows] rows */
  void* target;       /* [target_rows] rows, no overlap with source */
  int64_t row_bytes;
  const void* fill;   /* one element on the host, repeated over rows that are filled; NULL: zero bytes */
  int64_t fill_bytes; /* its size: 1, 2, 4, 8 or 16 */
} areal_row_tensor;
/* All tensors with one walk over the segments. Bit-exact. */
AREAL_API areal_status areal_copy_segments_cpu(const areal_segment_map* map, const areal_row_tensor* tensors,
                                               int64_t tensor_count);
AREAL_API areal_status areal_copy_segments_cuda(const areal_segment_map* map, const areal_row_tensor* tensors,
                                                int64_t tensor_count, void* stream);

/* positions[t] = t - cu_seqlens[s] for the sequence s of token t. */
typedef struct areal_position_ids_args {
  size_t size;
  int64_t tokens;
  int64_t sequences;
  const int64_t* cu_seqlens;
  int64_t* positions; /* [tokens] */
} areal_position_ids_args;
AREAL_API areal_status areal_position_ids_cpu(const areal_position_ids_args* args);
AREAL_API areal_status areal_position_ids_cuda(const areal_position_ids_args* args, void* stream);

/* Of each row of a padding mask: first non-zero entry, length from it to the last one, number of non-zero entries. */
typedef struct areal_mask_extents_args {
  size_t size;
  int64_t rows;
  int64_t columns;
  const uint8_t* mask; /* [rows, columns] */
  int64_t* starts;     /* [rows], as are the next two; 0 where a row is all zero */
  int64_t* lengths;
  int64_t* counts; /* equal to the length where the row has no hole */
} areal_mask_extents_args;
AREAL_API areal_status areal_mask_extents_cpu(const areal_mask_extents_args* args);
AREAL_API areal_status areal_mask_extents_cuda(const areal_mask_extents_args* args, void* stream);

/* ---- assigning sequences to micro-batches (host only) ---- */

enum { AREAL_PACK_FFD = 0, AREAL_PACK_MFFD = 1, AREAL_PACK_KK = 2 };
/* The fewest bins under a strict token cap. */
typedef struct areal_allocate_args {
  size_t size;
  int64_t sequences;
  const int64_t* lengths; /* [sequences], tokens */
  int64_t max_tokens;
  int64_t min_bins;        /* 0 counts as 1 */
  int64_t multiple_of;     /* 0 counts as 1; the number of bins is a multiple of it */
  int64_t method;          /* AREAL_PACK_* */
  int64_t oversized_alone; /* 1: a sequence longer than max_tokens is alone in a bin; 0: it is an error */
  int64_t* bin_of;         /* [sequences] */
  int64_t* bin_count;      /* [1] */
} areal_allocate_args;
AREAL_API areal_status areal_allocate_microbatches(const areal_allocate_args* args);

/* The most even load over a given number of bins. */
typedef struct areal_partition_args {
  size_t size;
  int64_t sequences;
  const int64_t* lengths; /* [sequences], tokens */
  int64_t bins;
  double linear_cost; /* a sequence of L tokens costs linear_cost L + quadratic_cost L^2; both 0: L */
  double quadratic_cost;
  int64_t equal_size; /* 1: numbers of sequences differ by at most one */
  int64_t max_tokens; /* cap of every bin; 0: none */
  int64_t* bin_of;    /* [sequences] */
} areal_partition_args;
AREAL_API areal_status areal_partition_balanced(const areal_partition_args* args);

#ifdef __cplusplus
}
#endif

#endif /* AREAL_CORE_PACKING_H */
