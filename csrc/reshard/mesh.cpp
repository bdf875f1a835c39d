#include "reshard/mesh.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "reshard/tensor_spec.h"

namespace areal::reshard {
namespace {

void check_shape(const std::vector<int64_t>& shape, size_t ranks) {
  AREAL_CHECK(!shape.empty() && shape.size() <= kMaxMeshDims, "Mesh: expected a shape of 1 to ", kMaxMeshDims,
              " dimensions, got ", shape.size());
  int64_t size = 1;
  for (const int64_t extent : shape) {
    AREAL_CHECK(extent >= 1, "Mesh: expected a shape of sizes >= 1, got ", shape_text(shape));
    AREAL_CHECK(!__builtin_mul_overflow(size, extent, &size), "Mesh: expected a shape of ", ranks, " ranks, got ",
                shape_text(shape));
  }
  AREAL_CHECK(size == static_cast<int64_t>(ranks), "Mesh: expected a shape of ", ranks, " ranks, got ",
              shape_text(shape));
}

void check_names(const std::vector<std::string>& names, size_t dims) {
  AREAL_CHECK(names.size() == dims, "Mesh: expected ", dims, " dim_names, got ", names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    AREAL_CHECK(!names[i].empty(), "Mesh: expected dim_names that are not empty, got an empty one");
    AREAL_CHECK(std::find(names.begin(), names.begin() + static_cast<int64_t>(i), names[i]) ==
                    names.begin() + static_cast<int64_t>(i),
                "Mesh: expected unique dim_names, got '", names[i], "' twice");
  }
}

}  // namespace

Mesh::Mesh(std::vector<int32_t> ranks, std::vector<int64_t> shape, std::vector<std::string> dim_names)
    : ranks_(std::move(ranks)), shape_(std::move(shape)), dim_names_(std::move(dim_names)) {
  check_shape(shape_, ranks_.size());
  check_names(dim_names_, shape_.size());
  strides_.assign(shape_.size(), 1);
  for (size_t d = shape_.size(); d-- > 1;) strides_[d - 1] = strides_[d] * shape_[d];
  positions_.resize(ranks_.size());
  std::iota(positions_.begin(), positions_.end(), 0);
  const auto rank_at = [this](int32_t position) { return ranks_[static_cast<size_t>(position)]; };
  std::sort(positions_.begin(), positions_.end(), [&](int32_t a, int32_t b) { return rank_at(a) < rank_at(b); });
  for (size_t i = 0; i < positions_.size(); ++i) {
    const int32_t rank = rank_at(positions_[i]);
    AREAL_CHECK(rank >= 0, "Mesh: expected ranks >= 0, got ", rank);
    AREAL_CHECK(i == 0 || rank != rank_at(positions_[i - 1]), "Mesh: expected unique ranks, got ", rank, " twice");
  }
}

std::optional<int64_t> Mesh::position_of(int32_t rank) const {
  const auto at = std::lower_bound(
      positions_.begin(), positions_.end(), rank,
      [this](int32_t position, int32_t wanted) { return ranks_[static_cast<size_t>(position)] < wanted; });
  if (at == positions_.end() || ranks_[static_cast<size_t>(*at)] != rank) return std::nullopt;
  return *at;
}

std::vector<int64_t> Mesh::coordinate(int64_t position) const {
  std::vector<int64_t> coordinate;
  for (int d = 0; d < dims(); ++d) coordinate.push_back(coordinate_along(d, position));
  return coordinate;
}

}  // namespace areal::reshard
