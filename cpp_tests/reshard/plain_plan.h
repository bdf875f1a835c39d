// A plan made the plain way, with no search and no balance: what executors and transports are tested on.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reshard/plan.h"

namespace areal::reshard::testing {

// Atoms from the first holder of each box (the rank itself before others), cut to fit chunks. Boxes of different
// sources must be equal or disjoint, as those of meshes are.
class PlainPlan final : public Plan {
 public:
  PlainPlan(std::shared_ptr<const Layout> source, std::shared_ptr<const Layout> target, int64_t chunk_bytes,
            uint64_t digest = 0x1234)
      : source_(std::move(source)), target_(std::move(target)), digest_(digest) {
    options_.chunk_bytes = chunk_bytes;
    for (const int32_t rank : target_->ranks()) {
      for (int32_t t = 0; t < target_->count(); ++t) add_tensor(rank, t);
    }
    for (auto& [pair, message] : messages_) cut(message);
  }

  const Layout& source() const override { return *source_; }
  const Layout& target() const override { return *target_; }
  const Topology& topology() const override { return topology_; }
  const PlanOptions& options() const override { return options_; }
  const PlanStats& stats() const override { return stats_; }
  const LowerBound& lower_bound() const override { return bound_; }
  uint64_t digest() const override { return digest_; }
  RankPlan rank(int32_t rank) const override {
    RankPlan mine{rank, {}, {}, {}};
    for (const auto& [pair, message] : messages_) {
      if (pair.first == rank && pair.second == rank) {
        mine.local_copies = message.atoms;
      } else if (pair.first == rank) {
        mine.sends.push_back(message);
      } else if (pair.second == rank) {
        mine.receives.push_back(message);
      }
    }
    return mine;
  }

  // The target `through` passes on to `last` all that it received itself: a multicast of two hops.
  void pass_on(int32_t through, int32_t last) {
    for (auto it = messages_.begin(); it != messages_.end();) {
      it = it->first.second == last ? messages_.erase(it) : std::next(it);
    }
    Message& onward = messages_[{through, last}];
    onward = {through, last, 1, 0, {}, {}};
    for (const auto& [pair, message] : messages_) {
      if (pair.second != through) continue;
      onward.atoms.insert(onward.atoms.end(), message.atoms.begin(), message.atoms.end());
    }
    cut(onward);
  }

 private:
  void add_tensor(int32_t rank, int32_t target_tensor) {
    const std::string& name = target_->tensors()[static_cast<size_t>(target_tensor)].spec.name;
    const auto source_tensor = static_cast<int32_t>(*source_->find(name));
    std::vector<int32_t> holders{rank};
    for (const int32_t other : source_->ranks()) holders.push_back(other);
    for (const Box& wanted : target_->boxes(target_tensor, rank)) {
      std::vector<Box> seen;
      for (const int32_t holder : holders) {
        if (std::ranges::count(source_->ranks(), holder) == 0) continue;
        for (const Box& held : source_->boxes(source_tensor, holder)) {
          if (std::ranges::count(seen, held) > 0) continue;
          const auto common = intersect(wanted, held);
          if (!common) continue;
          seen.push_back(held);
          messages_[{holder, rank}].atoms.push_back({source_tensor, target_tensor, *common});
        }
      }
    }
    for (auto& [pair, message] : messages_) {
      message.source = pair.first;
      message.target = pair.second;
    }
  }

  int64_t bytes_of(const Atom& atom) const {
    return atom.box.elements() * target_->tensors()[static_cast<size_t>(atom.target_tensor)].spec.item_bytes;
  }

  void cut(Message& message) const {
    std::vector<Atom> atoms;
    for (const Atom& atom : message.atoms) halve(atom, atoms);
    message.atoms = atoms;
    message.bytes = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(atoms.size()); ++i) {
      const int64_t bytes = bytes_of(atoms[static_cast<size_t>(i)]);
      message.bytes += bytes;
      if (message.chunks.empty() || message.chunks.back().bytes + bytes > options_.chunk_bytes) {
        message.chunks.push_back({static_cast<int32_t>(message.chunks.size()), 0, i, 0});
      }
      message.chunks.back().bytes += bytes;
      ++message.chunks.back().atom_count;
    }
  }

  void halve(const Atom& atom, std::vector<Atom>& atoms) const {
    int d = 0;
    while (d < atom.box.dims && atom.box.size[static_cast<size_t>(d)] == 1) ++d;
    if (bytes_of(atom) <= options_.chunk_bytes || d == atom.box.dims) return atoms.push_back(atom);
    const auto i = static_cast<size_t>(d);
    Atom first = atom, second = atom;
    first.box.size[i] = atom.box.size[i] / 2;
    second.box.start[i] += first.box.size[i];
    second.box.size[i] -= first.box.size[i];
    halve(first, atoms);
    halve(second, atoms);
  }

  std::shared_ptr<const Layout> source_, target_;
  uint64_t digest_;
  Topology topology_;
  PlanOptions options_;
  PlanStats stats_;
  LowerBound bound_;
  std::map<std::pair<int32_t, int32_t>, Message> messages_;
};

}  // namespace areal::reshard::testing
