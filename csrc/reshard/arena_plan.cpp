#include "reshard/arena_plan.h"

#include <algorithm>

#include "base/check.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMaxChunks = int64_t{1} << 24;
constexpr int64_t kBytesPerThread = int64_t{2} << 20;

uint64_t digest_of(const ArenaLayout& layout, const ArenaPlan& plan) {
  std::vector<int64_t> words = {static_cast<int64_t>(layout.digest())};
  for (const ArenaPiece& p : plan.pieces) {
    words.insert(words.end(), {p.tensor, p.source_offset_bytes, p.target_offset_bytes, p.bytes});
  }
  for (const ArenaChunk& c : plan.chunks) {
    words.insert(words.end(), {c.first_piece, c.piece_count, c.target_offset_bytes, c.span_bytes});
  }
  return xxh3_64(words.data(), words.size() * sizeof(int64_t));
}

// Puts the piece into the open chunk; opens one when there is none.
void add_piece(ArenaPlan& plan, const ArenaPiece& piece, bool open_chunk) {
  if (open_chunk) {
    plan.chunks.push_back({static_cast<int64_t>(plan.pieces.size()), 0, piece.target_offset_bytes, 0});
  }
  ArenaChunk& chunk = plan.chunks.back();
  chunk.piece_count += 1;
  chunk.span_bytes = piece.target_offset_bytes + piece.bytes - chunk.target_offset_bytes;
  plan.pieces.push_back(piece);
  plan.payload_bytes += piece.bytes;
}

}  // namespace

ArenaPlan make_arena_plan(const ArenaLayout& layout, int64_t chunk_bytes) {
  AREAL_CHECK(chunk_bytes > 0 && chunk_bytes <= kMaxChunkBytes && chunk_bytes % ArenaLayout::kAlignmentBytes == 0,
              "make_arena_plan: expected chunk_bytes = a multiple of ", ArenaLayout::kAlignmentBytes, " up to ",
              kMaxChunkBytes, ", got ", chunk_bytes);
  AREAL_CHECK(layout.arena_bytes() / chunk_bytes <= kMaxChunks, "make_arena_plan: expected at most ", kMaxChunks,
              " chunks, got ", layout.arena_bytes(), " bytes in chunks of ", chunk_bytes);

  ArenaPlan plan;
  for (int64_t tensor = 0; tensor < layout.count(); ++tensor) {
    const int64_t base = layout.offset_bytes(tensor);
    const int64_t bytes = layout.tensors()[static_cast<size_t>(tensor)].bytes();
    for (int64_t done = 0; done < bytes;) {
      const int64_t at = base + done;
      const int64_t used = plan.chunks.empty() ? chunk_bytes : at - plan.chunks.back().target_offset_bytes;
      const bool full = used >= chunk_bytes;
      const int64_t length = std::min(bytes - done, full ? chunk_bytes : chunk_bytes - used);
      add_piece(plan, {tensor, done, at, length}, full);
      done += length;
    }
  }
  plan.digest = digest_of(layout, plan);
  return plan;
}

int64_t chunks_per_thread(const ArenaPlan& plan) {
  if (plan.chunks.empty()) return 1;
  const ArenaChunk& last = plan.chunks.back();
  const int64_t bytes_per_chunk = (last.target_offset_bytes + last.span_bytes) / int64_t(plan.chunks.size());
  return std::max<int64_t>(1, kBytesPerThread / std::max<int64_t>(1, bytes_per_chunk));
}

}  // namespace areal::reshard
