#include "ops/packing/packing.h"

#include <areal_core/packing.h>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "c_api/boundary.h"
#include "ops/packing/allocation.h"

namespace areal::c_api {
namespace {

SegmentMap make_map(const areal_segment_map& map, const char* op) {
  const int64_t count = checked_count(map.segments, op, "map.segments");
  return {.source_begin = required(map.source_begin, count, op, "map.source_begin"),
          .target_begin = required(map.target_begin, count, op, "map.target_begin"),
          .target_end = required(map.target_end, count, op, "map.target_end"),
          .count = count,
          .shift = map.shift,
          .source_rows = checked_count(map.source_rows, op, "map.source_rows"),
          .target_rows = checked_count(map.target_rows, op, "map.target_rows")};
}

FillPattern make_fill(const areal_row_tensor& tensor, const char* op) {
  FillPattern fill;
  if (tensor.fill == nullptr) return fill;
  const int64_t bytes = tensor.fill_bytes;
  AREAL_CHECK(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8 || bytes == 16, op,
              ": expected fill_bytes 1, 2, 4, 8 or 16, got ", bytes);
  AREAL_CHECK(tensor.row_bytes % bytes == 0, op, ": expected row_bytes a multiple of fill_bytes = ", bytes, ", got ",
              tensor.row_bytes);
  for (int64_t at = 0; at < int64_t{sizeof fill.bytes}; at += bytes) {
    std::memcpy(fill.bytes + at, tensor.fill, static_cast<size_t>(bytes));
  }
  return fill;
}

// The caller's array of structs: its stride is the size that its elements name.
std::vector<RowTensor> make_tensors(const areal_row_tensor* tensors, int64_t count, const SegmentMap& map,
                                    const char* op) {
  required(tensors, checked_count(count, op, "tensor_count"), op, "tensors");
  std::vector<RowTensor> rows;
  const auto* at = reinterpret_cast<const unsigned char*>(tensors);
  for (int64_t i = 0; i < count; ++i, at += tensors->size) {
    const auto given = read_struct(reinterpret_cast<const areal_row_tensor*>(at), op, "tensors");
    const int64_t row_bytes = checked_count(given.row_bytes, op, "row_bytes");
    rows.push_back(
        {static_cast<const unsigned char*>(required(given.source, map.source_rows * row_bytes, op, "source")),
         static_cast<unsigned char*>(required(given.target, map.target_rows * row_bytes, op, "target")), row_bytes,
         make_fill(given, op)});
  }
  return rows;
}

Segments position_segments(const areal_position_ids_args& args, Memory memory, const char* op) {
  required(args.positions, args.tokens, op, "positions");
  return segments_in(memory, args.cu_seqlens, args.sequences, args.tokens, op);
}

MaskExtents make_extents(const areal_mask_extents_args& args, const char* op) {
  const int64_t rows = checked_count(args.rows, op, "rows");
  required(args.mask, rows * checked_count(args.columns, op, "columns"), op, "mask");
  return {.starts = required(args.starts, rows, op, "starts"),
          .lengths = required(args.lengths, rows, op, "lengths"),
          .counts = required(args.counts, rows, op, "counts")};
}

std::span<const int64_t> make_lengths(const int64_t* lengths, int64_t sequences, const char* op) {
  checked_count(sequences, op, "sequences");
  return {required(lengths, sequences, op, "lengths"), static_cast<size_t>(sequences)};
}

void write_bins(const Bins& bins, int64_t* bin_of) {
  for (size_t bin = 0; bin < bins.size(); ++bin) {
    for (const int64_t sequence : bins[bin]) bin_of[sequence] = static_cast<int64_t>(bin);
  }
}

}  // namespace
}  // namespace areal::c_api

using namespace areal::c_api;

areal_status areal_copy_segments_cpu(const areal_segment_map* map, const areal_row_tensor* tensors,
                                     int64_t tensor_count) {
  constexpr const char* op = "areal_copy_segments_cpu";
  return guarded([&] {
    const areal::SegmentMap native = make_map(read_struct(map, op, "map"), op);
    const auto rows = make_tensors(tensors, tensor_count, native, op);
    areal::check_segment_map(native, op);
    areal::copy_segments_cpu(native, rows);
  });
}

areal_status areal_copy_segments_cuda(const areal_segment_map* map, const areal_row_tensor* tensors,
                                      int64_t tensor_count, void* stream) {
  constexpr const char* op = "areal_copy_segments_cuda";
  return guarded_cuda(
      [&] {
        const areal::SegmentMap native = make_map(read_struct(map, op, "map"), op);
        areal::cuda::copy_segments(native, make_tensors(tensors, tensor_count, native, op), stream);
      },
      op);
}

areal_status areal_position_ids_cpu(const areal_position_ids_args* args) {
  constexpr const char* op = "areal_position_ids_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    areal::position_ids_cpu(position_segments(given, Memory::kHost, op), given.positions);
  });
}

areal_status areal_position_ids_cuda(const areal_position_ids_args* args, void* stream) {
  constexpr const char* op = "areal_position_ids_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        areal::cuda::position_ids(position_segments(given, Memory::kDevice, op), given.tokens, given.positions, stream);
      },
      op);
}

areal_status areal_mask_extents_cpu(const areal_mask_extents_args* args) {
  constexpr const char* op = "areal_mask_extents_cpu";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    areal::mask_extents_cpu(given.mask, given.rows, given.columns, make_extents(given, op));
  });
}

areal_status areal_mask_extents_cuda(const areal_mask_extents_args* args, void* stream) {
  constexpr const char* op = "areal_mask_extents_cuda";
  return guarded_cuda(
      [&] {
        const auto given = read_struct(args, op, "args");
        areal::cuda::mask_extents(given.mask, given.rows, given.columns, make_extents(given, op), stream);
      },
      op);
}

areal_status areal_allocate_microbatches(const areal_allocate_args* args) {
  constexpr const char* op = "areal_allocate_microbatches";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    const auto lengths = make_lengths(given.lengths, given.sequences, op);
    required(given.bin_of, given.sequences, op, "bin_of");
    required(given.bin_count, 1, op, "bin_count");
    const areal::AllocateOptions options{.max_tokens = given.max_tokens,
                                         .min_bins = given.min_bins == 0 ? 1 : given.min_bins,
                                         .multiple_of = given.multiple_of == 0 ? 1 : given.multiple_of,
                                         .method = checked_enum(given.method, areal::PackMethod::kKk, op, "method"),
                                         .oversized_alone = checked_flag(given.oversized_alone, op, "oversized_alone")};
    const areal::Bins bins = areal::allocate_microbatches(lengths, options);
    write_bins(bins, given.bin_of);
    *given.bin_count = static_cast<int64_t>(bins.size());
  });
}

areal_status areal_partition_balanced(const areal_partition_args* args) {
  constexpr const char* op = "areal_partition_balanced";
  return guarded([&] {
    const auto given = read_struct(args, op, "args");
    const auto lengths = make_lengths(given.lengths, given.sequences, op);
    required(given.bin_of, given.sequences, op, "bin_of");
    const bool by_tokens = given.linear_cost == 0 && given.quadratic_cost == 0;
    const areal::PartitionOptions options{
        .bins = given.bins,
        .linear_cost = by_tokens ? 1.0 : given.linear_cost,
        .quadratic_cost = given.quadratic_cost,
        .equal_size = checked_flag(given.equal_size, op, "equal_size"),
        .max_tokens = given.max_tokens == 0 ? std::nullopt : std::optional(given.max_tokens)};
    write_bins(areal::partition_balanced(lengths, options), given.bin_of);
  });
}
