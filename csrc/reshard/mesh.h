// Ranks arranged in a grid.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace areal::reshard {

// Dimensions of a mesh.
inline constexpr int kMaxMeshDims = 8;

// Ranks are numbered once for trainer and generator together: equal numbers are the same process (colocated), whose
// bytes need no wire.
class Mesh {
 public:
  // ranks: row-major over shape, unique, >= 0. shape: one to kMaxMeshDims sizes, each >= 1. dim_names: one per
  // dimension, unique ("pp", "dp", "tp", ...). Throws areal::Error naming what does not fit.
  Mesh(std::vector<int32_t> ranks, std::vector<int64_t> shape, std::vector<std::string> dim_names);

  const std::vector<int32_t>& ranks() const { return ranks_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  int dims() const { return static_cast<int>(shape_.size()); }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  // Position of a rank in the row-major order; nullopt when it is not of this mesh. Logarithmic.
  std::optional<int64_t> position_of(int32_t rank) const;
  // The coordinate along each dimension of a position.
  std::vector<int64_t> coordinate(int64_t position) const;
  // The same along one dimension.
  int64_t coordinate_along(int dim, int64_t position) const {
    return position / strides_[static_cast<size_t>(dim)] % shape_[static_cast<size_t>(dim)];
  }

  bool operator==(const Mesh&) const = default;

 private:
  std::vector<int32_t> ranks_;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
  std::vector<int64_t> strides_;    // positions from one coordinate to the next, per dimension
  std::vector<int32_t> positions_;  // sorted by the rank that they hold
};

}  // namespace areal::reshard
