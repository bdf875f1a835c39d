// Who copies which bytes where: a deterministic pure function of the layout of the source and that of the target.
//
// A piece is one contiguous run of bytes within one tensor, the unit of copying and of checksums. A chunk is a
// contiguous range of the target arena holding whole pieces, the unit of transport: small tensors travel together,
// large ones are cut. So far both layouts must be equal (one trainer process, generators with whole replicas).
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/layout.h"

namespace areal::reshard {

struct Piece {
  int64_t tensor;               // position in Layout::tensors()
  int64_t source_offset_bytes;  // within the tensor
  int64_t target_offset_bytes;  // within the arena; a multiple of Layout::kAlignmentBytes
  int64_t bytes;                // > 0

  bool operator==(const Piece&) const = default;
};

struct Chunk {
  int64_t first_piece;
  int64_t piece_count;
  int64_t target_offset_bytes;
  int64_t span_bytes;  // in the target, padding between tensors included

  bool operator==(const Chunk&) const = default;
};

// What no plan can beat: bytes that the target needs and does not hold.
struct LowerBound {
  int64_t wire_bytes = 0;
};

struct Plan {
  std::vector<Piece> pieces;  // ordered by target offset
  std::vector<Chunk> chunks;  // ordered by target offset
  int64_t wire_bytes = 0;
  LowerBound lower_bound;
  uint64_t digest = 0;  // covers both layouts, the pieces and the chunks; both sides compare it before data moves
};

// How many chunks to give one thread at least, so that waking it pays: a few hundred microseconds of copying.
int64_t chunks_per_thread(const Plan& plan);

inline constexpr int64_t kMinChunkBytes = int64_t{4} << 20;
inline constexpr int64_t kMaxChunkBytes = int64_t{64} << 20;

// chunk_bytes: most bytes of one chunk, a multiple of Layout::kAlignmentBytes. All chunks but the last are filled to
// within one alignment of it. Meant for [kMinChunkBytes, kMaxChunkBytes]; smaller ones serve tests.
// Throws areal::Error naming the first tensor in which the layouts differ.
Plan make_plan(const Layout& source, const Layout& target, int64_t chunk_bytes);

}  // namespace areal::reshard
