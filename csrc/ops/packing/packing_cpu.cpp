#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/threads.h"
#include "ops/packing/packing.h"

namespace areal {
namespace {

constexpr int64_t kGrainBytes = int64_t{1} << 17;  // below this a second thread costs more than it saves

void fill_rows(const RowTensor& tensor, int64_t begin, int64_t end) {
  unsigned char* out = tensor.target + begin * tensor.row_bytes;
  const int64_t total_bytes = (end - begin) * tensor.row_bytes;
  const unsigned char first = tensor.fill.bytes[0];
  if (std::all_of(std::begin(tensor.fill.bytes), std::end(tensor.fill.bytes),
                  [&](unsigned char byte) { return byte == first; })) {
    std::memset(out, first, total_bytes);
    return;
  }
  int64_t done_bytes = std::min<int64_t>(total_bytes, sizeof tensor.fill.bytes);
  std::memcpy(out, tensor.fill.bytes, done_bytes);
  while (done_bytes < total_bytes) {  // double what is there
    const int64_t bytes = std::min(done_bytes, total_bytes - done_bytes);
    std::memcpy(out + done_bytes, out, bytes);
    done_bytes += bytes;
  }
}

// Target rows [begin, end) of one tensor.
void copy_range(const SegmentMap& map, const RowTensor& tensor, int64_t begin, int64_t end) {
  int64_t row = begin;
  const int64_t first = std::max<int64_t>(0, map.segment_of(begin, 0, map.count - 1));
  for (int64_t s = first; s < map.count && map.target_begin[s] < end; ++s) {
    const int64_t from = std::max(row, map.target_begin[s] + std::max<int64_t>(map.shift, 0));
    const int64_t until = std::min(end, map.target_end[s] + std::min<int64_t>(map.shift, 0));
    if (from >= until) continue;
    if (row < from) fill_rows(tensor, row, from);
    const int64_t source = map.source_begin[s] + (from - map.target_begin[s]) - map.shift;
    std::memcpy(tensor.target + from * tensor.row_bytes, tensor.source + source * tensor.row_bytes,
                (until - from) * tensor.row_bytes);
    row = until;
  }
  if (row < end) fill_rows(tensor, row, end);
}

}  // namespace

void check_segment_map(const SegmentMap& map, const char* op) {
  int64_t previous_end = 0;
  for (int64_t s = 0; s < map.count; ++s) {
    const int64_t begin = map.target_begin[s], end = map.target_end[s];
    AREAL_CHECK(begin >= previous_end && end >= begin && end <= map.target_rows, op, ": expected ordered segments in [",
                previous_end, ", ", map.target_rows, "), got segment ", s, " = [", begin, ", ", end, ")");
    AREAL_CHECK(map.source_begin[s] >= 0 && map.source_begin[s] + (end - begin) <= map.source_rows, op,
                ": expected source rows within [0, ", map.source_rows, "), got segment ", s, " = [",
                map.source_begin[s], ", ", map.source_begin[s] + (end - begin), ")");
    previous_end = end;
  }
}

void copy_segments_cpu(const SegmentMap& map, std::span<const RowTensor> tensors) {
  int64_t bytes_per_row = 0;
  for (const RowTensor& tensor : tensors) bytes_per_row += tensor.row_bytes;
  if (bytes_per_row == 0) return;
  parallel_for(0, map.target_rows, std::max<int64_t>(1, kGrainBytes / bytes_per_row), [&](int64_t begin, int64_t end) {
    for (const RowTensor& tensor : tensors) copy_range(map, tensor, begin, end);
  });
}

void position_ids_cpu(const Segments& segments, int64_t* out) {
  parallel_for(0, segments.tokens(), kGrainBytes / int64_t{sizeof *out}, [&](int64_t begin, int64_t end) {
    int64_t s = last_at_most(segments.cu_seqlens, 0, segments.count - 1, begin);
    for (int64_t token = begin; token < end; ++s) {
      const int64_t until = std::min(end, segments.end(s));
      for (const int64_t first = segments.begin(s); token < until; ++token) out[token] = token - first;
    }
  });
}

void mask_extents_cpu(const unsigned char* mask, int64_t rows, int64_t columns, const MaskExtents& out) {
  parallel_for(0, rows, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(columns, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t s = begin; s < end; ++s) {
                   const unsigned char* row = mask + s * columns;
                   int64_t count = 0, first = 0, last = columns;
                   for (int64_t i = 0; i < columns; ++i) count += row[i] != 0;
                   if (count > 0) {
                     while (row[first] == 0) ++first;
                     while (row[last - 1] == 0) --last;
                   }
                   out.starts[s] = count > 0 ? first : 0;
                   out.lengths[s] = count > 0 ? last - first : 0;
                   out.counts[s] = count;
                 }
               });
}

}  // namespace areal
