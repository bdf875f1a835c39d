#include "reshard/plan_classes.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/check.h"

namespace areal::reshard {
namespace {

// Mixes words into a hash. Only equality decides what belongs together: a field that is forgotten here costs time.
class Hash {
 public:
  Hash& add(int64_t word) {
    value_ = (value_ ^ uint64_t(word)) * 0x9E3779B97F4A7C15u;
    value_ ^= value_ >> 29;
    return *this;
  }
  Hash& add(const std::vector<int64_t>& words) {
    for (const int64_t word : words) add(word);
    return add(int64_t(words.size()));
  }
  Hash& add(const std::vector<Placement>& placements) {
    for (const Placement& placement : placements) {
      add(int64_t(placement.index()));
      if (const auto* shard = std::get_if<Shard>(&placement)) add(shard->dim).add(shard->chunk);
      if (const auto* shard = std::get_if<StridedShard>(&placement))
        add(shard->dim).add(shard->split_factor).add(shard->chunk);
      if (const auto* flat = std::get_if<Flat>(&placement)) add(flat->chunk).add(flat->offset);
    }
    return *this;
  }
  size_t value() const { return size_t(value_); }

 private:
  uint64_t value_ = 0;
};

// Two tensors whose refinement is looked for; `meshes` decides whether tensors on other meshes of the same shape count
// as equal (for the refinement they do, for the class they don't).
struct Pairing {
  const TensorLayout* source;
  const TensorLayout* target;
  const Mesh* source_mesh;
  const Mesh* target_mesh;
};

struct PairingHash {
  size_t operator()(const Pairing& p) const {
    return Hash()
        .add(p.source->spec.shape)
        .add(p.source_mesh->shape())
        .add(p.target_mesh->shape())
        .add(p.source->placements)
        .add(p.target->placements)
        .value();
  }
};

struct SameRefinement {
  bool operator()(const Pairing& a, const Pairing& b) const {
    return a.source->spec.shape == b.source->spec.shape && a.source_mesh->shape() == b.source_mesh->shape() &&
           a.target_mesh->shape() == b.target_mesh->shape() && a.source->placements == b.source->placements &&
           a.target->placements == b.target->placements;
  }
};

struct ClassHash {
  size_t operator()(const Pairing& p) const {
    return Hash()
        .add(p.source->mesh)
        .add(p.target->mesh)
        .add(p.source->spec.item_bytes)
        .add(p.source->spec.shape)
        .add(p.source->placements)
        .add(p.target->placements)
        .value();
  }
};

struct SameClass {
  bool operator()(const Pairing& a, const Pairing& b) const {
    return a.source->mesh == b.source->mesh && a.target->mesh == b.target->mesh &&
           a.source->spec.item_bytes == b.source->spec.item_bytes && a.source->spec.shape == b.source->spec.shape &&
           a.source->placements == b.source->placements && a.target->placements == b.target->placements;
  }
};

void check_same_tensor(const TensorSpec& source, const TensorSpec& target) {
  AREAL_CHECK(source.shape == target.shape, "plan: tensor '", target.name, "': expected the target's shape ",
              shape_text(target.shape), ", got ", shape_text(source.shape), " in the source");
  AREAL_CHECK(source.dtype == target.dtype && source.item_bytes == target.item_bytes, "plan: tensor '", target.name,
              "': expected the target's dtype ", target.dtype, " of ", target.item_bytes, " bytes, got ", source.dtype,
              " of ", source.item_bytes, " in the source");
}

class RankSets {
 public:
  explicit RankSets(const RankTable& table) : table_(table) {}

  // The set of what a group of mesh positions stands for.
  int32_t of(const std::vector<int32_t>& group, const Mesh& mesh) {
    RankSet set;
    for (const int32_t position : group) set.push_back(table_.position_of(mesh.ranks()[size_t(position)]));
    std::sort(set.begin(), set.end());
    const auto [entry, is_new] = ids_.try_emplace(std::move(set), int32_t(ids_.size()));
    if (is_new) sets_.push_back(entry->first);
    return entry->second;
  }
  std::vector<RankSet> take() { return std::move(sets_); }

 private:
  const RankTable& table_;
  std::map<RankSet, int32_t> ids_;
  std::vector<RankSet> sets_;
};

}  // namespace

RankTable::RankTable(const Layout& source, const Layout& target, const Topology& topology)
    : node_rate_(std::llround(topology.intra_node_bytes_per_s)) {
  std::set_union(source.ranks().begin(), source.ranks().end(), target.ranks().begin(), target.ranks().end(),
                 std::back_inserter(ranks_));
  nic_rates_.assign(ranks_.size(), std::llround(topology.nic_bytes_per_s));
  for (const int32_t rank : ranks_) nodes_.push_back(topology.node_of(rank));
  for (const RankLink& link : topology.links) {
    const auto found = std::lower_bound(ranks_.begin(), ranks_.end(), link.rank);
    if (found == ranks_.end() || *found != link.rank) continue;  // a topology may know more ranks than take part
    nic_rates_[size_t(found - ranks_.begin())] = std::llround(link.bytes_per_s);
  }
}

int32_t RankTable::position_of(int32_t rank) const {
  const auto found = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
  AREAL_CHECK(found != ranks_.end() && *found == rank,
              "plan: expected a rank of the source's or the target's layout, got ", rank);
  return int32_t(found - ranks_.begin());
}

Classes classify(const Layout& source, const Layout& target, const RankTable& ranks) {
  Classes result;
  RankSets sets(ranks);
  std::unordered_map<Pairing, const Refinement*, PairingHash, SameRefinement> refinements;
  std::unordered_map<Pairing, int32_t, ClassHash, SameClass> classes;
  const auto find_class = [&](const Pairing& pairing) {
    const auto [entry, is_new] = classes.try_emplace(pairing, int32_t(result.classes.size()));
    if (!is_new) return entry->second;
    const Refinement*& refinement = refinements[pairing];
    if (refinement == nullptr) {
      result.refinements.push_back(std::make_unique<const Refinement>(
          refine(*pairing.source, *pairing.source_mesh, *pairing.target, *pairing.target_mesh)));
      refinement = result.refinements.back().get();
    }
    TensorClass made{refinement, pairing.target->mesh, pairing.target->spec.item_bytes, {}, {}, {}};
    for (const auto& group : refinement->source.groups) made.holders.push_back(sets.of(group, *pairing.source_mesh));
    for (const auto& group : refinement->target.groups) made.needers.push_back(sets.of(group, *pairing.target_mesh));
    result.classes.push_back(std::move(made));
    return entry->second;
  };
  // Both layouts are sorted by name.
  size_t s = 0;
  for (size_t t = 0; t < target.tensors().size(); ++t) {
    const TensorLayout& wanted = target.tensors()[t];
    for (; s < source.tensors().size() && source.tensors()[s].spec.name < wanted.spec.name; ++s) {
      ++result.unused_source_tensors;
    }
    AREAL_CHECK(s < source.tensors().size() && source.tensors()[s].spec.name == wanted.spec.name, "plan: tensor '",
                wanted.spec.name, "': expected in the source, got only in the target");
    const TensorLayout& held = source.tensors()[s];
    check_same_tensor(held.spec, wanted.spec);
    const int32_t id =
        find_class({&held, &wanted, &source.meshes()[size_t(held.mesh)], &target.meshes()[size_t(wanted.mesh)]});
    std::vector<TensorPair>& members = result.classes[size_t(id)].tensors;
    result.class_of.push_back(id);
    result.ordinal_of.push_back(int32_t(members.size()));
    members.push_back({int32_t(s), int32_t(t)});
    ++s;
  }
  result.unused_source_tensors += int64_t(source.tensors().size() - s);
  result.rank_sets = sets.take();
  return result;
}

}  // namespace areal::reshard
