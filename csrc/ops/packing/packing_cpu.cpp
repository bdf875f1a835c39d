#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/check.h"
#include "base/threads.h"
#include "ops/packing/packing.h"
#include "ops/packing/streaming.h"

namespace areal {
namespace {

constexpr int64_t kGrainBytes = int64_t{1} << 17;  // below this a second thread costs more than it saves
// Targets above this, in all, are written past the caches: more than a core's own cache keeps for whoever reads next.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

bool is_one_byte(const FillPattern& fill) {
  return std::all_of(std::begin(fill.bytes), std::end(fill.bytes),
                     [&](unsigned char byte) { return byte == fill.bytes[0]; });
}

// Writes pieces of one tensor, cached or streaming.
class Writer {
 public:
  Writer(const RowTensor& tensor, bool stream)
      : tensor_(tensor), stream_(stream), one_byte_(is_one_byte(tensor.fill)) {}

  void copy(int64_t target_row, int64_t source_row, int64_t rows) const {
    unsigned char* target = tensor_.target + target_row * tensor_.row_bytes;
    const unsigned char* source = tensor_.source + source_row * tensor_.row_bytes;
    const int64_t bytes = rows * tensor_.row_bytes;
    stream_ ? streaming::copy(target, source, bytes) : void(std::memcpy(target, source, bytes));
  }

  void fill(int64_t begin, int64_t end) const {
    unsigned char* out = tensor_.target + begin * tensor_.row_bytes;
    const int64_t total_bytes = (end - begin) * tensor_.row_bytes;
    if (!one_byte_) return fill_with_pattern(out, total_bytes);
    const unsigned char value = tensor_.fill.bytes[0];
    stream_ ? streaming::fill(out, value, total_bytes) : void(std::memset(out, value, total_bytes));
  }

 private:
  void fill_with_pattern(unsigned char* out, int64_t total_bytes) const {
    int64_t done_bytes = std::min<int64_t>(total_bytes, sizeof tensor_.fill.bytes);
    std::memcpy(out, tensor_.fill.bytes, done_bytes);
    while (done_bytes < total_bytes) {  // double what is there
      const int64_t bytes = std::min(done_bytes, total_bytes - done_bytes);
      std::memcpy(out + done_bytes, out, bytes);
      done_bytes += bytes;
    }
  }

  const RowTensor& tensor_;
  bool stream_, one_byte_;
};

// Target rows [begin, end) of one tensor.
void copy_range(const SegmentMap& map, const Writer& writer, int64_t begin, int64_t end) {
  int64_t row = begin;
  const int64_t first = std::max<int64_t>(0, map.segment_of(begin, 0, map.count - 1));
  for (int64_t s = first; s < map.count && map.target_begin[s] < end; ++s) {
    const int64_t from = std::max(row, map.target_begin[s] + std::max<int64_t>(map.shift, 0));
    const int64_t until = std::min(end, map.target_end[s] + std::min<int64_t>(map.shift, 0));
    if (from >= until) continue;
    if (row < from) writer.fill(row, from);
    writer.copy(from, map.source_begin[s] + (from - map.target_begin[s]) - map.shift, until - from);
    row = until;
  }
  if (row < end) writer.fill(row, end);
}

int64_t count_nonzero(const unsigned char* bytes, int64_t count) {
  constexpr int64_t kBlock = 255;  // what a sum of bytes holds: a vector adds as many lanes as it has bytes
  int64_t total = 0;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t end = std::min(count, at + kBlock);
    unsigned char in_block = 0;
    for (int64_t i = at; i < end; ++i) in_block = static_cast<unsigned char>(in_block + (bytes[i] != 0));
    total += in_block;
  }
  return total;
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
  const bool stream = map.target_rows > kStreamBytes / bytes_per_row;
  const auto copy_rows = [&](int64_t begin, int64_t end) {
    for (const RowTensor& tensor : tensors) copy_range(map, Writer(tensor, stream), begin, end);
    if (stream) streaming::fence();
  };
  parallel_for(0, map.target_rows, std::max<int64_t>(1, kGrainBytes / bytes_per_row), copy_rows);
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
                   const int64_t count = count_nonzero(row, columns);
                   int64_t first = 0, last = columns;
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
