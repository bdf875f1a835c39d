#include "reshard/executor.h"

#include "base/check.h"
#include "base/threads.h"

namespace areal::reshard {
namespace {

void send_chunk(const Plan& plan, const Chunk& chunk, std::span<const std::byte* const> sources, Transport& transport,
                Stores stores, std::span<uint64_t> checksums) {
  std::byte* packed = transport.stage(chunk.target_offset_bytes, chunk.span_bytes);
  for (int64_t index = chunk.first_piece; index < chunk.first_piece + chunk.piece_count; ++index) {
    const Piece& piece = plan.pieces[static_cast<size_t>(index)];
    const std::byte* source = sources[static_cast<size_t>(piece.tensor)];
    if (source == nullptr) continue;
    checksums[static_cast<size_t>(index)] =
        copy_with_xxh3(packed + (piece.target_offset_bytes - chunk.target_offset_bytes),
                       source + piece.source_offset_bytes, static_cast<size_t>(piece.bytes), stores);
  }
  transport.post(chunk.target_offset_bytes, chunk.span_bytes);
}

}  // namespace

void send_chunks(const Plan& plan, ChunkRange range, std::span<const std::byte* const> sources, Transport& transport,
                 Stores stores, std::span<uint64_t> checksums) {
  const auto chunks = static_cast<int64_t>(plan.chunks.size());
  AREAL_CHECK(0 <= range.begin && range.begin <= range.end && range.end <= chunks,
              "send_chunks: expected 0 <= begin <= end <= ", chunks, ", got [", range.begin, ", ", range.end, ")");
  AREAL_CHECK(checksums.size() == plan.pieces.size(), "send_chunks: expected ", plan.pieces.size(), " checksums, got ",
              checksums.size());
  parallel_for(range.begin, range.end, chunks_per_thread(plan), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      send_chunk(plan, plan.chunks[static_cast<size_t>(i)], sources, transport, stores, checksums);
    }
  });
}

}  // namespace areal::reshard
