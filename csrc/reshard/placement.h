// How one dimension of a mesh divides a tensor. Placements apply outer to inner: that of mesh dimension 0 divides the
// tensor, that of dimension 1 what this left, and so on, as in torch.distributed.tensor.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "reshard/box.h"
#include "reshard/mesh.h"

namespace areal::reshard {

// Every rank along the mesh dimension holds all of it.
struct Replicate {
  bool operator==(const Replicate&) const = default;
};

// Rank i of m holds [min(n, i c), min(n, (i + 1) c)) of the n elements along `dim`; c = chunk, or ceil(n / m) where
// chunk is 0. Uneven and empty shards are normal: 10 over 4 gives 3, 3, 3, 1, and 3 over 4 gives 1, 1, 1, 0. A chunk of
// its own says that storage is padded (151,936 rows in 8 shards of 19,072) or that heads stay whole.
struct Shard {
  int dim = 0;
  int64_t chunk = 0;
  bool operator==(const Shard&) const = default;
};

// FSDP2 over tensor parallelism: the mesh dimension is the outer one, but divides what `split_factor` inner shards have
// left. The tensor's n elements are first cut in split_factor pieces (as by Shard), each piece over the m ranks of this
// mesh dimension (as by Shard): rank i holds up to split_factor boxes. [0..4] with split factor 2 over 2: [0, 1, 3, 4]
// and [2].
struct StridedShard {
  int dim = 0;
  int64_t split_factor = 1;
  bool operator==(const StridedShard&) const = default;
};

// FSDP1 and distributed optimizers: rank i holds elements [min(n, i c), min(n, (i + 1) c)) of the flattened tensor
// (row-major), c = chunk or ceil(n / m): at most 2 dims - 1 boxes. Nothing but Replicate may stand beside it.
struct Flat {
  int64_t chunk = 0;
  bool operator==(const Flat&) const = default;
};

// Explicit boxes, for what no rule describes (shared fp8 block scales, uneven expert placement): boxes[i] are those of
// rank i along the mesh dimension, in the order in which its storage holds them. Boxes of different ranks may overlap
// (replicas); those of one rank may not. Nothing but Replicate may stand beside it.
struct Ragged {
  std::vector<std::vector<Box>> boxes;
  bool operator==(const Ragged&) const = default;
};

using Placement = std::variant<Replicate, Shard, StridedShard, Flat, Ragged>;

// The boxes of a tensor of this shape that the rank at `position` of the mesh holds, in the order of its storage
// (row-major local index space: StridedShard's boxes follow one another along dim, Flat's and Ragged's flattened).
// Empty boxes are left out. Throws areal::Error naming the placement that does not fit the shape or the mesh.
std::vector<Box> local_boxes(const std::vector<int64_t>& shape, const Mesh& mesh, std::span<const Placement> placements,
                             int64_t position);

}  // namespace areal::reshard
