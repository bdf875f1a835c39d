// How one dimension of a mesh divides a tensor. Placements apply outer to inner: that of mesh dimension 0 divides the
// tensor, that of dimension 1 what this left, and so on, as in torch.distributed.tensor.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
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
// mesh dimension (as by Shard, chunk included): rank i holds up to split_factor boxes.
//
// Where pieces are uneven, readings differ. [0..4] with split factor 2 over 2 is [0, 1, 3] and [2, 4] here, as in torch
// 2.13 and in the shards that fully_shard makes of tensor-parallel parameters; with chunk = 2, the reading of padded
// pieces, it is [0, 1, 3, 4] and [2] (https://github.com/pytorch/pytorch/issues/168134).
struct StridedShard {
  int dim = 0;
  int64_t split_factor = 1;  // at most kMaxSplitFactor
  int64_t chunk = 0;
  bool operator==(const StridedShard&) const = default;
};
inline constexpr int64_t kMaxSplitFactor = 65536;

// FSDP1 and distributed optimizers: the tensor is flattened (row-major) and lies at `offset` of a longer flat buffer,
// of which rank i holds [i c, (i + 1) c), c = chunk or ceil((offset + n) / m): an interval of the flattened tensor, at
// most 2 dims - 1 boxes. Nothing but Replicate may stand beside it.
struct Flat {
  int64_t chunk = 0;
  int64_t offset = 0;
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

// A box and where it lies in its rank's local index space: by Replicate, Shard and StridedShard the rank holds a tensor
// of as many dimensions, boxes side by side; by Flat and Ragged a flat one, boxes one behind the other, each row-major.
struct LocalBox {
  Box box;                                      // canonical, not empty
  std::array<int64_t, kMaxDims> local_start{};  // of its first element; flat: [0] alone (Flat: from the rank's i c)
};

// What one rank holds of one tensor. Assigned again and again, it reuses its memory.
class LocalPart {
 public:
  // position: in the mesh's row-major order. The placements must have passed check_placements().
  void assign(std::span<const int64_t> shape, const Mesh& mesh, std::span<const Placement> placements,
              int64_t position);

  // In the order of storage: row-major over the local index space.
  const std::vector<LocalBox>& boxes() const { return boxes_; }
  // Whether the local index space is flat (Flat and Ragged).
  bool flat() const { return flat_; }
  // Of the local index space; flat: one size, the number of elements.
  std::span<const int64_t> shape() const { return {shape_.data(), flat_ ? 1 : static_cast<size_t>(dims_)}; }
  int64_t elements() const;

 private:
  struct Interval {
    int64_t start, size;
    int64_t local = 0;  // elements of the intervals before it
  };
  using Intervals = std::vector<Interval>;

  void assign_flat(std::span<const int64_t> shape, const Flat& flat, int64_t parts, int64_t index);
  void assign_ragged(const std::vector<Box>& boxes);
  void append_flat_box(const Box& box, int64_t local_start);
  void shard(Intervals& intervals, int64_t chunk, int64_t parts, int64_t index);
  void strided_shard(Intervals& intervals, const StridedShard& strided, int64_t parts, int64_t index);
  void select(Intervals& intervals);
  void combine_intervals();

  bool flat_ = false;
  int dims_ = 0;
  std::array<int64_t, kMaxDims> shape_{};
  std::vector<LocalBox> boxes_;
  std::array<Intervals, kMaxDims> intervals_;  // per dimension, side by side
  Intervals scratch_;                          // positions within such a list
  Intervals selected_;                         // what select() makes of them
};

// Throws areal::Error naming the tensor and the placement that does not fit the shape or the mesh: a missing dimension,
// chunks that leave elements to nobody, Flat or Ragged beside a shard, ragged boxes outside the tensor or overlapping;
// or a shape of negative sizes, or of more than 2^62 elements.
void check_placements(std::string_view tensor, std::span<const int64_t> shape, const Mesh& mesh,
                      std::span<const Placement> placements);

// The boxes of a tensor of this shape that the rank at `position` of the mesh holds, in the order of its storage. Empty
// boxes are left out. Checks its arguments, as check_placements() does.
std::vector<Box> local_boxes(const std::vector<int64_t>& shape, const Mesh& mesh, std::span<const Placement> placements,
                             int64_t position);

}  // namespace areal::reshard
