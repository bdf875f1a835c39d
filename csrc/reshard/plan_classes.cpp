#include "reshard/plan_classes.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr double kMaxRates = 9e18;

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

// How one side divides a tensor, whatever its ranks are called.
struct Division {
  const std::vector<int64_t>* shape;
  const Mesh* mesh;
  const std::vector<Placement>* placements;

  bool operator==(const Division& other) const {
    return *shape == *other.shape && mesh->shape() == other.mesh->shape() && *placements == *other.placements;
  }
};

struct DivisionHash {
  size_t operator()(const Division& d) const {
    return Hash().add(*d.shape).add(d.mesh->shape()).add(*d.placements).value();
  }
};

// What decides the class of a pair of tensors.
struct ClassKey {
  int32_t source, target;  // numbers of (division, mesh) of each side
  int64_t item_bytes;

  bool operator==(const ClassKey&) const = default;
};

struct ClassKeyHash {
  size_t operator()(const ClassKey& k) const { return Hash().add(k.source).add(k.target).add(k.item_bytes).value(); }
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

// The divisions of one layout on its meshes. Each is cut into pieces once, and its groups named once for each mesh.
class Side {
 public:
  struct Divided {
    std::shared_ptr<const Pieces> pieces;
    std::vector<int32_t> sets;  // per group of pieces: its rank set
  };

  Side(const Layout& layout, RankSets* sets) : layout_(layout), sets_(*sets), by_mesh_(layout.meshes().size()) {}

  // Of a tensor: a number that is equal for equal divisions on the same mesh.
  int32_t number_of(const TensorLayout& tensor) {
    const Mesh& mesh = layout_.meshes()[size_t(tensor.mesh)];
    const Division division{&tensor.spec.shape, &mesh, &tensor.placements};
    const auto [entry, is_new] = by_mesh_[size_t(tensor.mesh)].try_emplace(division, int32_t(divided_.size()));
    if (!is_new) return entry->second;
    std::shared_ptr<const Pieces>& pieces = pieces_[division];
    if (pieces == nullptr) pieces = std::make_shared<const Pieces>(pieces_of(tensor, mesh));
    Divided divided{pieces, {}};
    for (const std::vector<int32_t>& group : pieces->groups) divided.sets.push_back(sets_.of(group, mesh));
    divided_.push_back(std::move(divided));
    return entry->second;
  }
  const Divided& divided(int32_t number) const { return divided_[size_t(number)]; }

 private:
  const Layout& layout_;
  RankSets& sets_;
  std::vector<std::unordered_map<Division, int32_t, DivisionHash>> by_mesh_;
  std::unordered_map<Division, std::shared_ptr<const Pieces>, DivisionHash> pieces_;
  std::vector<Divided> divided_;
};

// Makes the class of a pair of tensors, or finds it.
class ClassMaker {
 public:
  ClassMaker(const Layout& source, const Layout& target, RankSets* sets, Classes* classes)
      : source_(source, sets), target_(target, sets), classes_(*classes) {}

  int32_t class_of(const TensorLayout& source, const TensorLayout& target) {
    const ClassKey key{source_.number_of(source), target_.number_of(target), target.spec.item_bytes};
    const auto [entry, is_new] = ids_.try_emplace(key, int32_t(classes_.classes.size()));
    if (!is_new) return entry->second;
    const Side::Divided &from = source_.divided(key.source), &to = target_.divided(key.target);
    const Refinement*& refinement = refinements_[{from.pieces.get(), to.pieces.get()}];
    if (refinement == nullptr) {
      classes_.refinements.push_back(
          std::make_unique<const Refinement>(refine(from.pieces, to.pieces, target.spec.name)));
      refinement = classes_.refinements.back().get();
    }
    classes_.classes.push_back({refinement, target.mesh, target.spec.item_bytes, {}, from.sets, to.sets});
    return entry->second;
  }

 private:
  Side source_, target_;
  Classes& classes_;
  std::map<std::pair<const Pieces*, const Pieces*>, const Refinement*> refinements_;
  std::unordered_map<ClassKey, int32_t, ClassKeyHash> ids_;
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
  // The flow multiplies sums of rates by sums of bytes, both within int64.
  double all_rates = double(node_rate_) * double(ranks_.size());
  for (const int64_t rate : nic_rates_) all_rates += double(rate);
  AREAL_CHECK(all_rates <= kMaxRates, "plan: expected links of at most ", kMaxRates, " bytes/s in all, got ",
              all_rates);
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
  ClassMaker maker(source, target, &sets, &result);
  size_t s = 0;
  for (size_t t = 0; t < target.tensors().size(); ++t) {  // both are sorted by name
    const TensorLayout& wanted = target.tensors()[t];
    for (; s < source.tensors().size() && source.tensors()[s].spec.name < wanted.spec.name; ++s) {
      ++result.unused_source_tensors;
    }
    AREAL_CHECK(s < source.tensors().size() && source.tensors()[s].spec.name == wanted.spec.name, "plan: tensor '",
                wanted.spec.name, "': expected in the source, got only in the target");
    const TensorLayout& held = source.tensors()[s];
    check_same_tensor(held.spec, wanted.spec);
    const int32_t id = maker.class_of(held, wanted);
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
