#include <algorithm>
#include <string>

#include "base/check.h"
#include "reshard/placement.h"
#include "reshard/tensor_spec.h"

namespace areal::reshard {
namespace {

constexpr size_t kMaxRaggedBoxes = 1024;  // of one tensor on one rank: they are compared in pairs
// Of a dimension, of a tensor, of a flat buffer: far below 2^63, so that rounding up to whole parts stays within int64.
constexpr int64_t kMaxElements = int64_t{1} << 62;

int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Checks the placements of one tensor, outer to inner.
class Checker {
 public:
  Checker(std::string_view tensor, std::span<const int64_t> shape, const Mesh& mesh,
          std::span<const Placement> placements)
      : tensor_(tensor), shape_(shape.begin(), shape.end()), left_(shape_), mesh_(mesh), placements_(placements) {}

  void run() {
    AREAL_CHECK(shape_.size() <= kMaxDims, tensor(), "expected at most ", kMaxDims, " dimensions, got shape ",
                shape_text(shape_));
    elements_ = std::find(shape_.begin(), shape_.end(), 0) == shape_.end() ? 1 : 0;
    for (const int64_t size : shape_) {
      AREAL_CHECK(size >= 0, tensor(), "expected sizes >= 0, got shape ", shape_text(shape_));
      const bool fits = elements_ == 0 || !__builtin_mul_overflow(elements_, size, &elements_);
      AREAL_CHECK(fits && elements_ <= kMaxElements && size <= kMaxElements, tensor(),
                  "expected sizes and elements up to 2^62, got shape ", shape_text(shape_));
    }
    AREAL_CHECK(placements_.size() == mesh_.shape().size(), tensor(), "expected ", mesh_.shape().size(),
                " placements, one for each dimension of its mesh, got ", placements_.size());
    const bool flat = std::any_of(placements_.begin(), placements_.end(), is_flat);
    for (mesh_dim_ = 0; mesh_dim_ < placements_.size(); ++mesh_dim_) {
      const Placement& placement = placements_[mesh_dim_];
      const bool alone = !flat || flat_count() == 1 || std::holds_alternative<Replicate>(placement);
      AREAL_CHECK(alone && (!flat || is_flat(placement) || std::holds_alternative<Replicate>(placement)), tensor(),
                  "expected nothing but Replicate beside Flat or Ragged, got another placement over ", along());
      std::visit([this](const auto& p) { check(p); }, placement);
    }
  }

 private:
  static bool is_flat(const Placement& placement) {
    return std::holds_alternative<Flat>(placement) || std::holds_alternative<Ragged>(placement);
  }
  int64_t flat_count() const { return std::count_if(placements_.begin(), placements_.end(), is_flat); }

  std::string tensor() const { return "reshard: tensor '" + std::string(tensor_) + "': "; }
  std::string along() const { return "mesh dimension '" + mesh_.dim_names()[mesh_dim_] + "'"; }
  int64_t parts() const { return mesh_.shape()[mesh_dim_]; }

  void check_dim(const char* kind, int dim) const {
    AREAL_CHECK(dim >= 0 && dim < static_cast<int>(shape_.size()), tensor(), "expected ", kind, " over ", along(),
                " of a dimension of shape ", shape_text(shape_), ", got dim = ", dim);
  }
  // chunk * parts must hold `size` elements, or some would be nobody's.
  void check_chunk(const char* kind, int64_t chunk, int64_t size) const {
    int64_t held = 0;
    AREAL_CHECK(chunk >= 0 && !__builtin_mul_overflow(chunk, parts(), &held), tensor(), "expected ", kind, " over ",
                along(), " with a chunk in [0, 2^63 / ", parts(), "), got ", chunk);
    AREAL_CHECK(chunk == 0 || held >= size, tensor(), "expected ", kind, " over ", along(),
                " with a chunk of at least ", ceil_div(size, parts()), " for ", size, " elements over ", parts(),
                " ranks, got ", chunk);
  }

  void check(const Replicate&) {}
  void check(const Shard& by) {
    check_dim("Shard", by.dim);
    int64_t& left = left_[static_cast<size_t>(by.dim)];
    check_chunk("Shard", by.chunk, left);
    left = first_part(left, by.chunk);
  }
  void check(const StridedShard& by) {
    check_dim("StridedShard", by.dim);
    AREAL_CHECK(by.split_factor >= 1 && by.split_factor <= kMaxSplitFactor, tensor(), "expected StridedShard over ",
                along(), " with a split_factor in [1, ", kMaxSplitFactor, "], got ", by.split_factor);
    int64_t& left = left_[static_cast<size_t>(by.dim)];
    if (left == 0) return;
    const int64_t piece = ceil_div(left, by.split_factor);
    check_chunk("StridedShard", by.chunk, piece);
    // The most that any rank has left: every piece as large as the first.
    left = std::min(left, ceil_div(left, piece) * first_part(piece, by.chunk));
  }
  void check(const Flat& by) {
    int64_t end = 0;
    AREAL_CHECK(by.offset >= 0 && !__builtin_add_overflow(elements_, by.offset, &end) && end <= kMaxElements, tensor(),
                "expected Flat over ", along(), " with an offset >= 0 and an end up to 2^62, got ", by.offset);
    check_chunk("Flat", by.chunk, end);
  }
  void check(const Ragged& by) {
    AREAL_CHECK(static_cast<int64_t>(by.boxes.size()) == parts(), tensor(), "expected Ragged boxes for the ", parts(),
                " ranks of ", along(), ", got ", by.boxes.size());
    for (size_t rank = 0; rank < by.boxes.size(); ++rank) check_boxes(by.boxes[rank], rank);
  }

  void check_boxes(const std::vector<Box>& boxes, size_t index) const {
    AREAL_CHECK(boxes.size() <= kMaxRaggedBoxes, tensor(), "expected at most ", kMaxRaggedBoxes,
                " Ragged boxes on each rank of ", along(), ", got ", boxes.size());
    for (size_t i = 0; i < boxes.size(); ++i) {
      AREAL_CHECK(inside(boxes[i]), tensor(), "expected Ragged boxes inside shape ", shape_text(shape_), ", got ",
                  box_text(boxes[i]), " at ", index, " of ", along());
      for (size_t j = 0; j < i; ++j) {
        AREAL_CHECK(!intersect(boxes[i], boxes[j]), tensor(), "expected disjoint Ragged boxes, got ",
                    box_text(boxes[j]), " and ", box_text(boxes[i]), " at ", index, " of ", along());
      }
    }
  }
  bool inside(const Box& box) const {
    if (box.dims != static_cast<int>(shape_.size())) return false;
    for (size_t d = 0; d < shape_.size(); ++d) {
      if (box.start[d] < 0 || box.size[d] < 0 || box.start[d] > shape_[d] - box.size[d]) return false;
    }
    return true;
  }

  int64_t first_part(int64_t size, int64_t chunk) const {
    return chunk > 0 ? std::min(size, chunk) : ceil_div(size, parts());
  }

  std::string_view tensor_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> left_;  // the most elements that any rank has left along each dimension
  int64_t elements_ = 0;
  const Mesh& mesh_;
  std::span<const Placement> placements_;
  size_t mesh_dim_ = 0;
};

}  // namespace

void check_placements(std::string_view tensor, std::span<const int64_t> shape, const Mesh& mesh,
                      std::span<const Placement> placements) {
  Checker(tensor, shape, mesh, placements).run();
}

}  // namespace areal::reshard
