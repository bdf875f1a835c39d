// What the planner plans for: not tensors on ranks, but classes of tensors on sets of ranks. DeepSeek-V3 has 45,395
// tensors, 512 classes and a few hundred distinct sets of ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "reshard/layout.h"
#include "reshard/plan.h"
#include "reshard/refine.h"
#include "reshard/topology.h"

namespace areal::reshard {

// All ranks of both layouts, ascending, with what the topology says of them. The planner speaks of positions in this
// table, which keep the order of the ranks.
class RankTable {
 public:
  RankTable(const Layout& source, const Layout& target, const Topology& topology);

  int32_t size() const { return int32_t(ranks_.size()); }
  int32_t rank(int32_t i) const { return ranks_[size_t(i)]; }
  int32_t node(int32_t i) const { return nodes_[size_t(i)]; }
  int64_t nic_rate(int32_t i) const { return nic_rates_[size_t(i)]; }
  int64_t node_rate() const { return node_rate_; }
  bool reachable(int32_t i) const { return nic_rates_[size_t(i)] > 0; }
  // Throws areal::Error for a rank of neither layout.
  int32_t position_of(int32_t rank) const;

 private:
  std::vector<int32_t> ranks_, nodes_;
  std::vector<int64_t> nic_rates_;  // bytes/s; 0: unreachable
  int64_t node_rate_;
};

// Positions in a RankTable, ascending.
using RankSet = std::vector<int32_t>;

struct TensorPair {
  int32_t source, target;  // positions in the two layouts
};

// Tensors of equal shape, element size, meshes and placements on both sides.
struct TensorClass {
  const Refinement* refinement;
  int32_t target_mesh;
  int64_t item_bytes;
  std::vector<TensorPair> tensors;  // ascending
  std::vector<int32_t> holders;     // per source group of the refinement: position in Classes::rank_sets
  std::vector<int32_t> needers;     // per target group
};

struct Classes {
  std::vector<std::unique_ptr<const Refinement>> refinements;
  std::vector<TensorClass> classes;
  std::vector<int32_t> class_of;    // per target tensor
  std::vector<int32_t> ordinal_of;  // per target tensor: its position in the class
  std::vector<RankSet> rank_sets;   // distinct
  int64_t unused_source_tensors = 0;
};

// Throws areal::Error naming the tensor that only the target has, or that differs in dtype, element size or shape.
Classes classify(const Layout& source, const Layout& target, const RankTable& ranks);

// All that choices are made from.
struct Problem {
  std::shared_ptr<const Layout> source, target;
  Topology topology;  // canonical
  PlanOptions options;
  RankTable ranks;
  Classes classes;

  const RankSet& rank_set(int32_t i) const { return classes.rank_sets[size_t(i)]; }
  const TensorClass& tensor_class(int32_t i) const { return classes.classes[size_t(i)]; }
};

}  // namespace areal::reshard
