// Copies tensors into an arena and out of it, chunk by chunk on several threads, hashing on the way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "reshard/arena_plan.h"
#include "reshard/xxh3.h"

namespace areal::reshard {

struct ChunkRange {
  int64_t begin;
  int64_t end;
};

// Where write_chunks() puts them; writes the time of each finished chunk (CLOCK_MONOTONIC, nanoseconds) to `heartbeat`,
// for others to see progress.
struct ArenaWriter {
  std::byte* arena;
  std::atomic<int64_t>& heartbeat;
};

// Non-temporal for a plan that would not fit the caches of those who want the bytes next.
Stores stores_for(const ArenaPlan& plan);

// sources: per tensor of the source layout its contiguous bytes, or nullptr: the pieces of that tensor are skipped.
// checksums: per piece; written for the pieces that were copied.
// Chunks run in parallel (areal::parallel_for), in any order. The stores of all of them happen before the return.
void write_chunks(const ArenaPlan& plan, ChunkRange range, std::span<const std::byte* const> sources, ArenaWriter to,
                  Stores stores, std::span<uint64_t> checksums);

// targets: per tensor of the target layout where its contiguous bytes go, or nullptr: not unpacked.
// arena: what write_chunks filled. Returns the first piece whose bytes were not those of its checksum, or kNoPiece;
// the targets have been written even so.
inline constexpr int64_t kNoPiece = INT64_MAX;
int64_t unpack_chunks(const ArenaPlan& plan, const std::byte* arena, std::span<std::byte* const> targets, Stores stores,
                      std::span<const uint64_t> checksums);

// The same, and nothing is compared.
void unpack_chunks_unverified(const ArenaPlan& plan, const std::byte* arena, std::span<std::byte* const> targets,
                              Stores stores);

// The first piece of the arena whose bytes are not those of its checksum, or kNoPiece.
int64_t find_damaged_piece(const ArenaPlan& plan, const std::byte* arena, std::span<const uint64_t> checksums);

}  // namespace areal::reshard
