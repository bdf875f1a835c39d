// Launchers of packing_kernels.cuh.
#include <algorithm>

#include "cuda/launch.cuh"
#include "ops/packing/packing.h"
#include "ops/packing/packing_kernels.cuh"

namespace areal::cuda {
namespace {

constexpr int64_t kMinTileRows = 32;
constexpr int64_t kMaxRowUnits = int64_t{1} << 31;  // column + column_step stays below 2^32
constexpr int64_t kBlocksPerMultiprocessor = 8;     // 2,048 threads, what a multiprocessor holds

// The widest unit, in bytes, that the rows of a tensor are aligned to.
int64_t unit_bytes(const RowTensor& tensor) {
  const auto bits = static_cast<uint64_t>(tensor.row_bytes) | reinterpret_cast<uintptr_t>(tensor.source) |
                    reinterpret_cast<uintptr_t>(tensor.target) | 16u;
  return static_cast<int64_t>(bits & (~bits + 1));
}

template <class Unit>
void copy_aligned(const SegmentMap& map, std::span<const RowTensor> tensors, cudaStream_t stream) {
  const int64_t blocks = multiprocessor_count() * kBlocksPerMultiprocessor;
  const int64_t tile_rows = std::clamp<int64_t>((map.target_rows + blocks - 1) / blocks, kMinTileRows, kMaxTileRows);
  const int64_t tiles = (map.target_rows + tile_rows - 1) / tile_rows;
  const auto grid = static_cast<unsigned>(std::min(tiles, blocks));
  TensorBatch batch{};
  const auto flush = [&] {
    if (batch.count == 0) return;
    AREAL_LAUNCH(copy_segments_kernel<Unit>, grid, kThreads, 0, stream, map, batch, static_cast<int>(tile_rows));
    batch.count = 0;
  };
  for (const RowTensor& tensor : tensors) {
    if (tensor.row_bytes == 0 || unit_bytes(tensor) != sizeof(Unit)) continue;
    const int64_t units = tensor.row_bytes / static_cast<int64_t>(sizeof(Unit));
    AREAL_CHECK(units <= kMaxRowUnits, "copy_segments: expected rows of at most ", kMaxRowUnits, " units, got ", units);
    batch.tensors[batch.count++] = {tensor.source,
                                    tensor.target,
                                    static_cast<unsigned>(units),
                                    static_cast<int>(kThreads / units),
                                    static_cast<unsigned>(kThreads % units),
                                    tensor.fill};
    if (batch.count == kMaxTensors) flush();
  }
  flush();
}

}  // namespace

void copy_segments(const SegmentMap& map, std::span<const RowTensor> tensors, void* stream) {
  if (map.target_rows == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  copy_aligned<uint8_t>(map, tensors, cuda_stream);
  copy_aligned<uint16_t>(map, tensors, cuda_stream);
  copy_aligned<uint32_t>(map, tensors, cuda_stream);
  copy_aligned<uint64_t>(map, tensors, cuda_stream);
  copy_aligned<uint4>(map, tensors, cuda_stream);
}

void position_ids(const Segments& segments, int64_t tokens, int64_t* out, void* stream) {
  if (tokens == 0) return;
  const int64_t blocks =
      std::min<int64_t>((tokens + kThreads - 1) / kThreads, multiprocessor_count() * kBlocksPerMultiprocessor);
  AREAL_LAUNCH(position_ids_kernel, static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream),
               segments.cu_seqlens, segments.count, tokens, out);
}

void mask_extents(const unsigned char* mask, int64_t rows, int64_t columns, const MaskExtents& out, void* stream) {
  if (rows == 0) return;
  constexpr int64_t kRowsPerBlock = kThreads / 32;
  AREAL_LAUNCH(mask_extents_kernel, static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock), kThreads, 0,
               static_cast<cudaStream_t>(stream), mask, rows, columns, out.starts, out.lengths, out.counts);
}

}  // namespace areal::cuda
