// How an arena is cut for copying and checking: a deterministic pure function of its layout.
//
// A piece is one contiguous run of bytes within one tensor, the unit of checksums. A chunk is a contiguous range of the
// arena holding whole pieces, the unit of parallel copying: small tensors go together, large ones are cut.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/arena_layout.h"

namespace areal::reshard {

struct ArenaPiece {
  int64_t tensor;               // position in ArenaLayout::tensors()
  int64_t source_offset_bytes;  // within the tensor
  int64_t target_offset_bytes;  // within the arena; a multiple of ArenaLayout::kAlignmentBytes
  int64_t bytes;                // > 0

  bool operator==(const ArenaPiece&) const = default;
};

struct ArenaChunk {
  int64_t first_piece;
  int64_t piece_count;
  int64_t target_offset_bytes;
  int64_t span_bytes;  // in the target, padding between tensors included

  bool operator==(const ArenaChunk&) const = default;
};

struct ArenaPlan {
  std::vector<ArenaPiece> pieces;  // ordered by target offset
  std::vector<ArenaChunk> chunks;  // ordered by target offset
  int64_t payload_bytes = 0;
  uint64_t digest = 0;  // covers the layout, the pieces and the chunks
};

// How many chunks to give one thread at least, so that waking it pays: a few hundred microseconds of copying.
int64_t chunks_per_thread(const ArenaPlan& plan);

inline constexpr int64_t kMinChunkBytes = int64_t{4} << 20;
inline constexpr int64_t kMaxChunkBytes = int64_t{64} << 20;

// chunk_bytes: most bytes of one chunk, a multiple of ArenaLayout::kAlignmentBytes. All chunks but the last are filled
// to within one alignment of it. Meant for [kMinChunkBytes, kMaxChunkBytes]; smaller ones serve tests.
ArenaPlan make_arena_plan(const ArenaLayout& layout, int64_t chunk_bytes);

}  // namespace areal::reshard
