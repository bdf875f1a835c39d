// The common refinement of a source and a target: which boxes of one tensor go from which holders to which needers.
//
// It knows positions in meshes, not ranks, and one tensor, not a model: layers repeat, so one refinement serves every
// tensor of the same shape and placements, on every mesh of the same shape.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "reshard/box.h"
#include "reshard/layout.h"

namespace areal::reshard {

// One side of a tensor, cut so that every piece is held by the same positions throughout.
struct Pieces {
  std::vector<Box> boxes;                    // disjoint, ascending by start
  std::vector<int32_t> group_of;             // per box: position in groups
  std::vector<std::vector<int32_t>> groups;  // distinct sets of mesh positions, each ascending

  // The groups that a position belongs to, ascending.
  std::vector<int32_t> groups_of(int32_t position) const;
};

// boxes[i] is held by the mesh position holders[i]. Boxes of different positions may be equal or overlap.
Pieces disjoint_pieces(std::span<const Box> boxes, std::span<const int32_t> holders);
Pieces pieces_of(const TensorLayout& tensor, const Mesh& mesh);

// Where a source piece meets a target piece.
struct Intersection {
  Box box;
  int64_t elements;
  int32_t source_group;
  int32_t target_group;
};

// All intersections of one pair of groups.
struct GroupPair {
  int32_t source_group;
  int32_t target_group;
  int32_t first, count;  // in Refinement::by_pair
};

struct Refinement {
  std::shared_ptr<const Pieces> source, target;
  std::vector<Intersection> intersections;      // by target piece, then by source piece: the order on the wire
  std::vector<int32_t> by_pair;                 // positions in intersections, ascending within each pair
  std::vector<GroupPair> pairs;                 // sorted by (source_group, target_group)
  std::vector<std::vector<int32_t>> of_target;  // per target group: positions in intersections, ascending

  // The pairs of one source group, and the pair of two; empty when they share nothing.
  std::span<const GroupPair> pairs_of(int32_t source_group) const;
  std::span<const int32_t> intersections_of(int32_t source_group, int32_t target_group) const;
};

// Pieces of two tensors of equal shape. Throws areal::Error naming the tensor and a box that the target needs and
// nobody holds.
Refinement refine(std::shared_ptr<const Pieces> source, std::shared_ptr<const Pieces> target, std::string_view tensor);

}  // namespace areal::reshard
