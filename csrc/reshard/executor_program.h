// What one rank copies for a message, worked out once: atoms of a plan become strided copies between buffers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reshard/layout.h"
#include "reshard/plan.h"
#include "reshard/strided_copy.h"

namespace areal::reshard {

// Part of an atom whose bytes follow one another on the wire, and lie at constant strides at both ends.
struct CopyPiece {
  int32_t source_buffer;  // kWire: packed bytes
  int32_t target_buffer;  // kWire: packed bytes
  int64_t source_offset;  // bytes
  int64_t target_offset;  // bytes
  StridedCopy shape;
};
inline constexpr int32_t kWire = -1;

struct ChunkProgram {
  int32_t id;
  int64_t bytes;
  int64_t first_piece;
  int64_t piece_count;
};

struct MessageProgram {
  int32_t peer;
  int32_t phase;
  int64_t bytes;
  std::vector<ChunkProgram> chunks;
  std::vector<CopyPiece> pieces;
  std::vector<int64_t> target_bytes;  // of each buffer that pieces name at the target; none: all go to the wire

  std::span<const CopyPiece> pieces_of(const ChunkProgram& chunk) const {
    return std::span(pieces).subspan(static_cast<size_t>(chunk.first_piece), static_cast<size_t>(chunk.piece_count));
  }
};

// One side of a copy: a rank's storage under a layout, or the wire.
struct End {
  const RankStorage* storage = nullptr;  // nullptr: the wire
  bool target_side = false;              // whether atoms are looked up by Atom::target_tensor

  int32_t tensor_of(const Atom& atom) const { return target_side ? atom.target_tensor : atom.source_tensor; }
};

// The pieces of an atom in wire order. Throws areal::Error naming the tensor when an end does not hold all of it.
void append_pieces(const Layout& target, const Atom& atom, const End& from, const End& to,
                   std::vector<CopyPiece>& pieces);
MessageProgram compile_message(const Layout& target, const Message& message, int32_t peer, const End& from,
                               const End& to);

}  // namespace areal::reshard
