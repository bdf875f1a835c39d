// Carries out the sender's part of a plan: packs each chunk where the transport wants it, hashing on the way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "reshard/plan.h"
#include "reshard/transport.h"
#include "reshard/xxh3.h"

namespace areal::reshard {

struct ChunkRange {
  int64_t begin;
  int64_t end;
};

// sources: per tensor of the source layout its contiguous bytes, or nullptr: the pieces of that tensor are skipped.
// checksums: per piece; written for the pieces that were copied.
// Chunks run in parallel (areal::parallel_for), in any order. The stores of all of them happen before the return.
void send_chunks(const Plan& plan, ChunkRange range, std::span<const std::byte* const> sources, Transport& transport,
                 Stores stores, std::span<uint64_t> checksums);

}  // namespace areal::reshard
