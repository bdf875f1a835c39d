#include "reshard/arena_copy.h"

#include <atomic>

#include "base/check.h"
#include "base/threads.h"
#include "reshard/shared_memory.h"

namespace areal::reshard {
namespace {

constexpr int64_t kNonTemporalFromBytes = int64_t{4} << 20;

void write_chunk(const ArenaPlan& plan, const ArenaChunk& chunk, std::span<const std::byte* const> sources,
                 ArenaWriter to, Stores stores, std::span<uint64_t> checksums) {
  for (int64_t index = chunk.first_piece; index < chunk.first_piece + chunk.piece_count; ++index) {
    const ArenaPiece& piece = plan.pieces[static_cast<size_t>(index)];
    const std::byte* source = sources[static_cast<size_t>(piece.tensor)];
    if (source == nullptr) continue;
    checksums[static_cast<size_t>(index)] =
        copy_with_xxh3(to.arena + piece.target_offset_bytes, source + piece.source_offset_bytes,
                       static_cast<size_t>(piece.bytes), stores);
  }
  to.heartbeat.store(monotonic_ns(), std::memory_order_relaxed);
}

// Runs visit(index of a piece) for every piece of the plan, in parallel.
void for_each_piece(const ArenaPlan& plan, const auto& visit) {
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  parallel_for(0, chunks, chunks_per_thread(plan), [&](int64_t begin, int64_t end) {
    const ArenaChunk& last = plan.chunks[static_cast<size_t>(end - 1)];
    int64_t piece = plan.chunks[static_cast<size_t>(begin)].first_piece;
    for (; piece < last.first_piece + last.piece_count; ++piece) visit(piece);
  });
}

// Runs hash(piece) for every piece of the plan, in parallel; returns the first whose result is not its checksum.
int64_t find_mismatch(const ArenaPlan& plan, std::span<const uint64_t> checksums, const auto& hash) {
  std::atomic<int64_t> first{kNoPiece};
  for_each_piece(plan, [&](int64_t piece) {
    const auto index = static_cast<size_t>(piece);
    if (hash(plan.pieces[index], checksums[index]) == checksums[index]) return;
    int64_t known = first.load();
    while (piece < known && !first.compare_exchange_weak(known, piece)) {
    }
  });
  return first.load();
}

}  // namespace

Stores stores_for(const ArenaPlan& plan) {
  return plan.payload_bytes >= kNonTemporalFromBytes ? Stores::kNonTemporal : Stores::kCached;
}

void write_chunks(const ArenaPlan& plan, ChunkRange range, std::span<const std::byte* const> sources, ArenaWriter to,
                  Stores stores, std::span<uint64_t> checksums) {
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  AREAL_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= chunks,
              "write_chunks: expected 0 <= begin <= end <= ", chunks, ", got [", range.begin, ", ", range.end, ")");
  AREAL_CHECK(checksums.size() == plan.pieces.size(), "write_chunks: expected ", plan.pieces.size(), " checksums, got ",
              checksums.size());
  parallel_for(range.begin, range.end, chunks_per_thread(plan), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      write_chunk(plan, plan.chunks[static_cast<size_t>(i)], sources, to, stores, checksums);
    }
  });
}

int64_t unpack_chunks(const ArenaPlan& plan, const std::byte* arena, std::span<std::byte* const> targets, Stores stores,
                      std::span<const uint64_t> checksums) {
  return find_mismatch(plan, checksums, [&](const ArenaPiece& piece, uint64_t expected) {
    std::byte* target = targets[static_cast<size_t>(piece.tensor)];
    if (target == nullptr) return expected;
    return copy_with_xxh3(target + piece.source_offset_bytes, arena + piece.target_offset_bytes,
                          static_cast<size_t>(piece.bytes), stores);
  });
}

void unpack_chunks_unverified(const ArenaPlan& plan, const std::byte* arena, std::span<std::byte* const> targets,
                              Stores stores) {
  for_each_piece(plan, [&](int64_t index) {
    const ArenaPiece& piece = plan.pieces[static_cast<size_t>(index)];
    std::byte* target = targets[static_cast<size_t>(piece.tensor)];
    if (target == nullptr) return;
    copy_with_xxh3(target + piece.source_offset_bytes, arena + piece.target_offset_bytes,
                   static_cast<size_t>(piece.bytes), stores);
  });
}

int64_t find_damaged_piece(const ArenaPlan& plan, const std::byte* arena, std::span<const uint64_t> checksums) {
  return find_mismatch(plan, checksums, [&](const ArenaPiece& piece, uint64_t) {
    return xxh3_64(arena + piece.target_offset_bytes, static_cast<size_t>(piece.bytes));
  });
}

}  // namespace areal::reshard
