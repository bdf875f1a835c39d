// torch ops over packing.h: schemas, argument checks, registration. Public functions: areal_core/ops/packing.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "bind/torch_tensor.h"
#include "ops/packing/packing.h"

namespace areal {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
FillPattern repeat(T element) {
  FillPattern fill;
  static_assert(sizeof fill.bytes % sizeof element == 0);
  for (size_t at = 0; at < sizeof fill.bytes; at += sizeof element) {
    std::memcpy(fill.bytes + at, &element, sizeof element);
  }
  return fill;
}

template <class T>
FillPattern integer_fill(double value, ScalarType dtype, const char* op) {
  // 2^53: larger integers may have lost digits on their way through double.
  const double low = std::max(double(std::numeric_limits<T>::lowest()), -0x1p53);
  const double high = std::min(double(std::numeric_limits<T>::max()), 0x1p53);
  AREAL_CHECK(value == std::floor(value) && value >= low && value <= high, op, ": expected an integer fill for ",
              torch::headeronly::toString(dtype), " in [", low, ", ", high, "], got ", value);
  return repeat(static_cast<T>(value));
}

FillPattern make_fill(double value, ScalarType dtype, const char* op) {
  switch (dtype) {
#define AREAL_INTEGER_FILL(T, Name) \
  case ScalarType::Name:            \
    return integer_fill<T>(value, dtype, op);
    AREAL_INTEGER_FILL(uint8_t, Byte)
    AREAL_INTEGER_FILL(int8_t, Char)
    AREAL_INTEGER_FILL(int16_t, Short)
    AREAL_INTEGER_FILL(int32_t, Int)
    AREAL_INTEGER_FILL(int64_t, Long)
    AREAL_INTEGER_FILL(uint16_t, UInt16)
    AREAL_INTEGER_FILL(uint32_t, UInt32)
    AREAL_INTEGER_FILL(uint64_t, UInt64)
    AREAL_INTEGER_FILL(bool, Bool)
#undef AREAL_INTEGER_FILL
    case ScalarType::Float:
      return repeat(static_cast<float>(value));
    case ScalarType::Double:
      return repeat(value);
    case ScalarType::Half:
      return repeat(torch::headeronly::Half(static_cast<float>(value)));
    case ScalarType::BFloat16:
      return repeat(torch::headeronly::BFloat16(static_cast<float>(value)));
    case ScalarType::ComplexFloat: {
      const float parts[2] = {static_cast<float>(value), 0.0f};
      FillPattern fill;
      std::memcpy(fill.bytes, parts, sizeof parts);
      std::memcpy(fill.bytes + sizeof parts, parts, sizeof parts);
      return fill;
    }
    case ScalarType::ComplexDouble: {
      const double parts[2] = {value, 0.0};
      FillPattern fill;
      std::memcpy(fill.bytes, parts, sizeof parts);
      return fill;
    }
    default:
      AREAL_CHECK(value == 0.0, op, ": expected fill = 0 for ", torch::headeronly::toString(dtype), ", got ", value);
      return {};
  }
}

// A tensor as rows to copy to `target`, which has the same row shape.
RowTensor make_rows(const Tensor& source, const Tensor& target, double fill, const char* op) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(source.get(), &dtype));
  int64_t row_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  for (int64_t d = 1; d < source.dim(); ++d) row_bytes *= source.size(d);
  return {static_cast<const unsigned char*>(source.const_data_ptr()),
          static_cast<unsigned char*>(target.mutable_data_ptr()), row_bytes, make_fill(fill, source.scalar_type(), op)};
}

Tensor empty_rows(const Tensor& like, int64_t rows) {
  std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
  shape[0] = rows;
  return bind::empty(shape, like.scalar_type(), like);
}

void check_sources(const SegmentMap& map, const std::vector<Tensor>& tensors, size_t fills, const char* op) {
  AREAL_CHECK(fills == tensors.size(), op, ": expected one fill per tensor (", tensors.size(), "), got ", fills);
  for (const Tensor& source : tensors) {
    AREAL_CHECK(source.dim() >= 1 && source.size(0) == map.source_rows, op, ": expected every tensor as [",
                map.source_rows, ", ...], got ", source.dim(), "-D with ", source.numel(), " elements");
    AREAL_CHECK(source.is_contiguous(), op, ": expected contiguous tensors");
    AREAL_CHECK(source.device() == tensors[0].device(), op, ": expected all tensors on one device");
  }
}

// A target is what empty_rows(source, map.target_rows) would give.
void check_targets(const SegmentMap& map, const std::vector<Tensor>& tensors, const std::vector<Tensor>& targets,
                   const char* op) {
  using torch::headeronly::toString;
  AREAL_CHECK(targets.size() == tensors.size(), op, ": expected one target per tensor (", tensors.size(), "), got ",
              targets.size());
  for (size_t i = 0; i < targets.size(); ++i) {
    const Tensor &source = tensors[i], &target = targets[i];
    AREAL_CHECK(target.scalar_type() == source.scalar_type(), op, ": expected target ", i,
                " dtype = ", toString(source.scalar_type()), ", got ", toString(target.scalar_type()));
    bool fits = target.dim() == source.dim() && target.size(0) == map.target_rows;
    for (int64_t d = 1; fits && d < source.dim(); ++d) fits = target.size(d) == source.size(d);
    AREAL_CHECK(fits, op, ": expected target ", i, " as [", map.target_rows, ", ...] with the rows of its tensor, got ",
                target.dim(), "-D with ", target.numel(), " elements");
    AREAL_CHECK(target.is_contiguous(), op, ": expected contiguous targets");
    AREAL_CHECK(target.device() == tensors[0].device(), op, ": expected all targets on the device of the tensors");
  }
}

void copy_all(const SegmentMap& map, const std::vector<Tensor>& tensors, const std::vector<Tensor>& targets,
              const std::vector<double>& fills, const char* op) {
  std::vector<RowTensor> rows;
  for (size_t i = 0; i < tensors.size(); ++i) rows.push_back(make_rows(tensors[i], targets[i], fills[i], op));
  const auto copy_on_cpu = [&] {
    check_segment_map(map, op);
    copy_segments_cpu(map, rows);
  };
  bind::on_device(tensors[0], copy_on_cpu, [&](void* stream) { cuda::copy_segments(map, rows, stream); });
}

std::vector<Tensor> copy_to_new(const SegmentMap& map, const std::vector<Tensor>& tensors,
                                const std::vector<double>& fills, const char* op) {
  check_sources(map, tensors, fills.size(), op);
  std::vector<Tensor> targets;
  for (const Tensor& source : tensors) targets.push_back(empty_rows(source, map.target_rows));
  copy_all(map, tensors, targets, fills, op);
  return targets;
}

SegmentMap make_map(const std::vector<Tensor>& tensors, const Tensor& source_begin, const Tensor& target_begin,
                    const Tensor& target_end, int64_t target_rows, const char* op) {
  AREAL_CHECK(!tensors.empty() && tensors[0].dim() >= 1, op, ": expected at least one tensor, 1-D or more");
  AREAL_CHECK(target_rows >= 0, op, ": expected target_rows >= 0, got ", target_rows);
  const Tensor& first = tensors[0];
  const int64_t count = source_begin.numel();
  return {.source_begin = bind::vector_data<const int64_t>(source_begin, count, first, op, "source_begin"),
          .target_begin = bind::vector_data<const int64_t>(target_begin, count, first, op, "target_begin"),
          .target_end = bind::vector_data<const int64_t>(target_end, count, first, op, "target_end"),
          .count = count,
          .source_rows = first.size(0),
          .target_rows = target_rows};
}

std::vector<Tensor> copy_segments(std::vector<Tensor> tensors, Tensor source_begin, Tensor target_begin,
                                  Tensor target_end, int64_t target_rows, std::vector<double> fills) {
  constexpr const char* op = "copy_segments";
  const SegmentMap map = make_map(tensors, source_begin, target_begin, target_end, target_rows, op);
  return copy_to_new(map, tensors, fills, op);
}

void copy_segments_into(std::vector<Tensor> tensors, std::vector<Tensor> targets, Tensor source_begin,
                        Tensor target_begin, Tensor target_end, std::vector<double> fills) {
  constexpr const char* op = "copy_segments_into";
  AREAL_CHECK(!targets.empty() && targets[0].dim() >= 1, op, ": expected at least one target, 1-D or more");
  const SegmentMap map = make_map(tensors, source_begin, target_begin, target_end, targets[0].size(0), op);
  check_sources(map, tensors, fills.size(), op);
  check_targets(map, tensors, targets, op);
  copy_all(map, tensors, targets, fills, op);
}

std::vector<Tensor> shift_all(const std::vector<Tensor>& tensors, const Tensor& cu_seqlens, int64_t shift,
                              const std::vector<double>& fills, const char* op) {
  AREAL_CHECK(!tensors.empty() && tensors[0].dim() >= 1, op, ": expected x with at least 1 dimension, got 0");
  const int64_t tokens = tensors[0].size(0);
  const Segments segments = bind::make_segments(cu_seqlens, tokens, tensors[0], op);
  const SegmentMap map{.source_begin = segments.cu_seqlens,
                       .target_begin = segments.cu_seqlens,
                       .target_end = segments.cu_seqlens + 1,
                       .count = segments.count,
                       .shift = shift,
                       .source_rows = tokens,
                       .target_rows = tokens};
  return copy_to_new(map, tensors, fills, op);
}

std::vector<Tensor> shift_segments(std::vector<Tensor> tensors, Tensor cu_seqlens, int64_t shift,
                                   std::vector<double> fills) {
  return shift_all(tensors, cu_seqlens, shift, fills, "shift_segments");
}

Tensor shift_tokens(Tensor x, Tensor cu_seqlens, int64_t shift, double fill) {
  return shift_all({x}, cu_seqlens, shift, {fill}, "shift_tokens")[0];
}

Tensor position_ids(Tensor cu_seqlens, int64_t tokens) {
  constexpr const char* op = "position_ids";
  AREAL_CHECK(tokens >= 0, op, ": expected total_tokens >= 0, got ", tokens);
  const Segments segments = bind::make_segments(cu_seqlens, tokens, cu_seqlens, op);
  const Tensor out = bind::empty({tokens}, ScalarType::Long, cu_seqlens);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  bind::on_device(
      cu_seqlens, [&] { position_ids_cpu(segments, data); },
      [&](void* stream) { cuda::position_ids(segments, tokens, data, stream); });
  return out;
}

Tensor mask_extents(Tensor mask) {
  constexpr const char* op = "mask_extents";
  AREAL_CHECK(mask.dim() == 2 && mask.scalar_type() == ScalarType::Bool && mask.is_contiguous(), op,
              ": expected a contiguous bool mask [S, L], got ", torch::headeronly::toString(mask.scalar_type()), ", ",
              mask.dim(), " dimensions");
  const int64_t rows = mask.size(0), columns = mask.size(1);
  const Tensor out = bind::empty({3, rows}, ScalarType::Long, mask);
  int64_t* data = out.mutable_data_ptr<int64_t>();
  const MaskExtents extents{.starts = data, .lengths = data + rows, .counts = data + 2 * rows};
  const auto* bytes = static_cast<const unsigned char*>(mask.const_data_ptr());
  bind::on_device(
      mask, [&] { mask_extents_cpu(bytes, rows, columns, extents); },
      [&](void* stream) { cuda::mask_extents(bytes, rows, columns, extents, stream); });
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(areal_core, m) {
  m.def(
      "copy_segments(Tensor[] tensors, Tensor source_begin, Tensor target_begin, Tensor target_end, "
      "SymInt target_rows, float[] fills) -> Tensor[]");
  m.def(
      "copy_segments_into(Tensor[] tensors, Tensor(a!)[] targets, Tensor source_begin, Tensor target_begin, "
      "Tensor target_end, float[] fills) -> ()");
  m.def("shift_segments(Tensor[] tensors, Tensor cu_seqlens, int shift, float[] fills) -> Tensor[]");
  m.def("shift_tokens(Tensor x, Tensor cu_seqlens, int shift, float fill) -> Tensor");
  m.def("position_ids(Tensor cu_seqlens, SymInt total_tokens) -> Tensor");
  m.def("mask_extents(Tensor mask) -> Tensor");
}

template <class Library>
void register_ops(Library& m) {
  m.impl("copy_segments", TORCH_BOX(&copy_segments));
  m.impl("copy_segments_into", TORCH_BOX(&copy_segments_into));
  m.impl("shift_segments", TORCH_BOX(&shift_segments));
  m.impl("shift_tokens", TORCH_BOX(&shift_tokens));
  m.impl("position_ids", TORCH_BOX(&position_ids));
  m.impl("mask_extents", TORCH_BOX(&mask_extents));
}

STABLE_TORCH_LIBRARY_IMPL(areal_core, CPU, m) { register_ops(m); }
#if defined(AREAL_WITH_CUDA)
STABLE_TORCH_LIBRARY_IMPL(areal_core, CUDA, m) { register_ops(m); }
#endif

}  // namespace
}  // namespace areal
