#include "reshard/placement.h"

#include <algorithm>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMaxBoxes = int64_t{1} << 20;  // of one tensor on one rank; a fault, if any, has many more

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// What rank `index` of `parts` holds of [0, size): a chunk, or an even part where chunk is 0.
struct Range {
  int64_t begin, end;
};
Range chunk_of(int64_t size, int64_t chunk, int64_t parts, int64_t index) {
  const int64_t step = chunk > 0 ? chunk : ceil_div(size, parts);
  return {std::min(size, index * step), std::min(size, (index + 1) * step)};
}

}  // namespace

int64_t LocalPart::elements() const {
  int64_t total = 0;
  for (const LocalBox& local : boxes_) total += local.box.elements();
  return total;
}

void LocalPart::assign(std::span<const int64_t> shape, const Mesh& mesh, std::span<const Placement> placements,
                       int64_t position) {
  flat_ = false;
  dims_ = static_cast<int>(shape.size());
  boxes_.clear();
  for (size_t d = 0; d < shape.size(); ++d) intervals_[d].assign(1, {0, shape[d]});
  for (size_t k = 0; k < placements.size(); ++k) {
    const int64_t parts = mesh.shape()[k];
    const int64_t index = mesh.coordinate_along(static_cast<int>(k), position);
    if (const auto* by = std::get_if<Shard>(&placements[k])) {
      shard(intervals_[static_cast<size_t>(by->dim)], by->chunk, parts, index);
    } else if (const auto* strided = std::get_if<StridedShard>(&placements[k])) {
      strided_shard(intervals_[static_cast<size_t>(strided->dim)], *strided, parts, index);
    } else if (const auto* flat = std::get_if<Flat>(&placements[k])) {
      return assign_flat(shape, *flat, parts, index);
    } else if (const auto* ragged = std::get_if<Ragged>(&placements[k])) {
      return assign_ragged(ragged->boxes[static_cast<size_t>(index)]);
    }
  }
  combine_intervals();
}

void LocalPart::shard(Intervals& intervals, int64_t chunk, int64_t parts, int64_t index) {
  int64_t size = 0;
  for (const Interval& interval : intervals) size += interval.size;
  const Range range = chunk_of(size, chunk, parts, index);
  scratch_.assign(1, {range.begin, range.end - range.begin});
  select(intervals);
}

void LocalPart::strided_shard(Intervals& intervals, const StridedShard& by, int64_t parts, int64_t index) {
  int64_t size = 0;
  for (const Interval& interval : intervals) size += interval.size;
  const int64_t piece = ceil_div(size, by.split_factor);
  scratch_.clear();
  for (int64_t begin = 0; begin < size; begin += piece) {
    const Range range = chunk_of(std::min(piece, size - begin), by.chunk, parts, index);
    if (range.end > range.begin) scratch_.push_back({begin + range.begin, range.end - range.begin});
  }
  select(intervals);
}

void LocalPart::select(Intervals& intervals) {
  selected_.clear();
  size_t at = 0;
  int64_t at_position = 0;  // of the first index of intervals[at]
  for (const auto& [begin, size, _] : scratch_) {
    for (int64_t position = begin; position < begin + size;) {
      while (position >= at_position + intervals[at].size) at_position += intervals[at++].size;
      const int64_t start = intervals[at].start + (position - at_position);
      const int64_t taken = std::min(begin + size, at_position + intervals[at].size) - position;
      if (!selected_.empty() && selected_.back().start + selected_.back().size == start) {
        selected_.back().size += taken;
      } else {
        selected_.push_back({start, taken});
      }
      position += taken;
    }
  }
  intervals.swap(selected_);
}

void LocalPart::combine_intervals() {
  const auto dims = static_cast<size_t>(dims_);
  int64_t count = 1;
  for (size_t d = 0; d < dims; ++d) {
    shape_[d] = 0;
    std::erase_if(intervals_[d], [](const Interval& interval) { return interval.size == 0; });
    for (Interval& interval : intervals_[d]) {
      interval.local = shape_[d];
      shape_[d] += interval.size;
    }
    AREAL_CHECK(
        !__builtin_mul_overflow(count, static_cast<int64_t>(intervals_[d].size()), &count) && count <= kMaxBoxes,
        "local_boxes: expected at most ", kMaxBoxes, " boxes of a tensor on one rank, got more");
  }
  std::array<size_t, kMaxDims> chosen{};
  for (; count > 0; --count) {
    LocalBox& local = boxes_.emplace_back();
    local.box.dims = dims_;
    for (size_t d = 0; d < dims; ++d) {
      const Interval& interval = intervals_[d][chosen[d]];
      local.box.start[d] = interval.start;
      local.box.size[d] = interval.size;
      local.local_start[d] = interval.local;
    }
    for (size_t d = dims; d-- > 0;) {
      if (++chosen[d] < intervals_[d].size()) break;
      chosen[d] = 0;
    }
  }
}

void LocalPart::append_flat_box(const Box& box, int64_t local_start) {
  const int64_t elements = box.elements();
  if (elements == 0) return;
  boxes_.push_back({box, {local_start}});
  shape_[0] += elements;
}

// An interval of the flattened tensor, greedily: at each step the whole slices of the outermost dimension that starts
// here and fits.
void LocalPart::assign_flat(std::span<const int64_t> shape, const Flat& flat, int64_t parts, int64_t index) {
  flat_ = true;
  shape_[0] = 0;
  int64_t elements = std::find(shape.begin(), shape.end(), 0) == shape.end() ? 1 : 0;
  for (size_t d = 0; elements > 0 && d < shape.size(); ++d) elements *= shape[d];
  const Range held = chunk_of(flat.offset + elements, flat.chunk, parts, index);
  int64_t at = std::max(held.begin, flat.offset) - flat.offset;
  const int64_t end = held.end - flat.offset, window = held.begin - flat.offset;
  while (at < end) {
    Box box{dims_, {}, {}};
    int64_t slice = elements;  // elements of one index along dimension d
    int64_t rest = at, taken = 1;
    bool found = false;
    for (size_t d = 0; d < shape.size(); ++d) {
      slice /= shape[d];
      if (found) {
        box.size[d] = shape[d];
        continue;
      }
      box.start[d] = rest / slice;
      rest %= slice;
      found = rest == 0 && end - at >= slice;
      box.size[d] = found ? std::min((end - at) / slice, shape[d] - box.start[d]) : 1;
      if (found) taken = box.size[d] * slice;
    }
    append_flat_box(box, at - window);
    at += taken;
  }
}

void LocalPart::assign_ragged(const std::vector<Box>& boxes) {
  flat_ = true;
  shape_[0] = 0;
  for (const Box& box : boxes) append_flat_box(box, shape_[0]);
}

std::vector<Box> local_boxes(const std::vector<int64_t>& shape, const Mesh& mesh, std::span<const Placement> placements,
                             int64_t position) {
  check_placements("", shape, mesh, placements);
  AREAL_CHECK(position >= 0 && position < mesh.size(), "local_boxes: expected a position in [0, ", mesh.size(),
              "), got ", position);
  LocalPart part;
  part.assign(shape, mesh, placements, position);
  std::vector<Box> boxes;
  boxes.reserve(part.boxes().size());
  for (const LocalBox& local : part.boxes()) boxes.push_back(local.box);
  return boxes;
}

}  // namespace areal::reshard
