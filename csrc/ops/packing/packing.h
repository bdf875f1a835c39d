// Moving rows between layouts of variable-length sequences. One primitive serves every layout change: padded to
// packed, packed to padded, choosing sequences, and shifting by one token inside each sequence.
//
// A tensor is seen as contiguous rows of row_bytes each (a row: everything of one token). Segment s copies
//
//     target[target_begin[s] + i] = source[source_begin[s] + i - shift]     0 <= i, i - shift < length[s]
//
// with length[s] = target_end[s] - target_begin[s]; every other target row is filled. So pack, unpack and choose use
// shift = 0; with source_begin = target_begin = cu_seqlens, shift = +1 is "value of the previous token" and
// shift = -1 "value of the next token", and no row ever crosses into another sequence.
//
// target_begin and target_end are non-decreasing, and segments do not overlap. Empty segments are legal.
#pragma once

#include <cstdint>
#include <span>

#include "base/segments.h"
#include "ops/packing/packing_math.h"

namespace areal {

// One tensor of a copy. Rows are moved as bytes, so any dtype goes.
struct RowTensor {
  const unsigned char* source = nullptr;
  unsigned char* target = nullptr;
  int64_t row_bytes = 0;
  FillPattern fill;
};

// Checks a host-resident map; throws areal::Error.
void check_segment_map(const SegmentMap& map, const char* op);

// Copies all tensors with one walk over the segments, in parallel over target rows. The map is host-resident and
// checked. Bit-exact and independent of the number of threads.
void copy_segments_cpu(const SegmentMap& map, std::span<const RowTensor> tensors);

// out[t] = t - cu_seqlens[s] for the sequence s of token t.
void position_ids_cpu(const Segments& segments, int64_t* out);

// One row of a padding mask: the span [start, start + length) from its first to its last non-zero entry (0, 0 where
// there is none), and how many entries are non-zero: a row without holes has count == length.
struct MaskExtents {
  int64_t* starts = nullptr;   // [S]
  int64_t* lengths = nullptr;  // [S]
  int64_t* counts = nullptr;   // [S]
};
void mask_extents_cpu(const unsigned char* mask, int64_t rows, int64_t columns, const MaskExtents& out);

namespace cuda {
// The same with everything on the device; `stream` is a cudaStream_t. Values are not checked: a map or cu_seqlens that
// breaks the contract gives wrong rows but never touches memory outside the tensors. Nothing synchronises.
void copy_segments(const SegmentMap& map, std::span<const RowTensor> tensors, void* stream);
void position_ids(const Segments& segments, int64_t tokens, int64_t* out, void* stream);
void mask_extents(const unsigned char* mask, int64_t rows, int64_t columns, const MaskExtents& out, void* stream);
}  // namespace cuda

}  // namespace areal
