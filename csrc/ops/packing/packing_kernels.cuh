// Kernels of packing.h. A block takes tiles of consecutive target rows, finds the source row of each once, and moves
// that row in every tensor of the launch; rows are read and written in units of the widest type they are aligned to.
#pragma once

#include "cuda/port.cuh"
#include "ops/packing/packing_math.h"

namespace areal::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxTileRows = 1024;
constexpr int kMaxTensors = 16;
constexpr int kInFlight = 4;  // loads of a thread before it stores

struct UnitTensor {
  const void* source;
  void* target;
  unsigned row_units;
  int row_step;          // kThreads / row_units
  unsigned column_step;  // kThreads % row_units
  FillPattern fill;
};

struct TensorBatch {
  UnitTensor tensors[kMaxTensors];
  int count;
};

// Source rows of the target rows [begin, begin + rows) into shared memory. The whole block calls it; the result is
// valid for every thread on return.
__device__ void map_tile(const SegmentMap& map, int64_t begin, int rows, int64_t* source_rows) {
  __shared__ int64_t edges[2];  // segments of the first and the last row: the search of the others is between them
  if (threadIdx.x < 2) {
    edges[threadIdx.x] = map.segment_of(threadIdx.x == 0 ? begin : begin + rows - 1, 0, map.count - 1);
  }
  __syncthreads();  // also: all threads have copied the tile before, whose source rows are overwritten now
  const int64_t first = edges[0] > 0 ? edges[0] : 0, last = edges[1];
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    source_rows[i] = map.source_row(begin + i, map.segment_of(begin + i, first, last));
  }
  __syncthreads();
}

template <class Unit>
__device__ void copy_tile(const UnitTensor& tensor, int64_t begin, int rows, const int64_t* source_rows) {
  const Unit* __restrict__ source = static_cast<const Unit*>(tensor.source);
  const int64_t units = tensor.row_units;
  Unit* __restrict__ target = static_cast<Unit*>(tensor.target) + begin * units;
  const Unit* fill = reinterpret_cast<const Unit*>(tensor.fill.bytes);
  constexpr unsigned kFillUnits = sizeof(FillPattern) / sizeof(Unit);
  // (row, column) of this thread's unit; the next one lies kThreads units on.
  int row = static_cast<int>(threadIdx.x / tensor.row_units);
  unsigned column = threadIdx.x % tensor.row_units;
  while (row < rows) {
    Unit values[kInFlight];
    int64_t places[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {  // all loads before the first store: one alone does not fill the memory pipe
      places[i] = -1;
      if (row >= rows) continue;
      const int64_t from = source_rows[row];
      values[i] = from >= 0 ? source[from * units + column] : fill[column % kFillUnits];
      places[i] = row * units + column;
      row += tensor.row_step;
      column += tensor.column_step;
      if (column >= tensor.row_units) {
        column -= tensor.row_units;
        ++row;
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (places[i] >= 0) target[places[i]] = values[i];
    }
  }
}

template <class Unit>
__global__ void __launch_bounds__(kThreads)
    copy_segments_kernel(const __grid_constant__ SegmentMap map, const __grid_constant__ TensorBatch batch,
                         int tile_rows) {
  __shared__ int64_t source_rows[kMaxTileRows];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * tile_rows;
  for (int64_t begin = static_cast<int64_t>(blockIdx.x) * tile_rows; begin < map.target_rows; begin += stride) {
    const int64_t left = map.target_rows - begin;
    const int rows = left < tile_rows ? static_cast<int>(left) : tile_rows;
    map_tile(map, begin, rows, source_rows);
    for (int i = 0; i < batch.count; ++i) copy_tile<Unit>(batch.tensors[i], begin, rows, source_rows);
  }
}

__global__ void __launch_bounds__(kThreads)
    position_ids_kernel(const int64_t* __restrict__ cu_seqlens, int64_t sequences, int64_t tokens,
                        int64_t* __restrict__ out) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; t < tokens; t += stride) {
    const int64_t s = last_at_most(cu_seqlens, 0, sequences - 1, t);
    out[t] = s < 0 ? t : t - cu_seqlens[s];
  }
}

// A warp per row.
__global__ void __launch_bounds__(kThreads)
    mask_extents_kernel(const unsigned char* __restrict__ mask, int64_t rows, int64_t columns,
                        int64_t* __restrict__ starts, int64_t* __restrict__ lengths, int64_t* __restrict__ counts) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= rows) return;  // whole warps
  int64_t count = 0, first = columns, end = 0;
  for (int64_t i = lane; i < columns; i += 32) {
    if (mask[row * columns + i] == 0) continue;
    ++count;
    first = i < first ? i : first;
    end = i + 1;
  }
  for (int d = 16; d > 0; d /= 2) {
    count += __shfl_xor_sync(0xffffffffu, count, d);
    const int64_t other_first = __shfl_xor_sync(0xffffffffu, first, d),
                  other_end = __shfl_xor_sync(0xffffffffu, end, d);
    first = other_first < first ? other_first : first;
    end = other_end > end ? other_end : end;
  }
  if (lane == 0) {
    starts[row] = count > 0 ? first : 0;
    lengths[row] = count > 0 ? end - first : 0;
    counts[row] = count;
  }
}

}  // namespace
}  // namespace areal::cuda
