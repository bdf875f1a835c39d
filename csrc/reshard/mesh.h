// Ranks arranged in a grid.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace areal::reshard {

// Ranks are numbered once for trainer and generator together: equal numbers are the same process (colocated), whose
// bytes need no wire.
class Mesh {
 public:
  // ranks: row-major over shape, unique, >= 0. dim_names: one per dimension, unique ("pp", "dp", "tp", ...).
  // Throws areal::Error naming what does not fit.
  Mesh(std::vector<int32_t> ranks, std::vector<int64_t> shape, std::vector<std::string> dim_names);

  const std::vector<int32_t>& ranks() const { return ranks_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  int64_t size() const { return static_cast<int64_t>(ranks_.size()); }

  // Position of a rank in the row-major order; nullopt when it is not of this mesh.
  std::optional<int64_t> position_of(int32_t rank) const;
  // The coordinate along each dimension of a position.
  std::vector<int64_t> coordinate(int64_t position) const;

  bool operator==(const Mesh&) const = default;

 private:
  std::vector<int32_t> ranks_;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;
};

}  // namespace areal::reshard
