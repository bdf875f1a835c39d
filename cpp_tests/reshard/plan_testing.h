// Random small layouts, and what a plan must do with them, worked out element by element.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "reshard/plan.h"

namespace areal::reshard {

inline std::vector<int64_t> elements_of(const Box& box, const std::vector<int64_t>& shape) {
  std::vector<int64_t> flat = {0};
  for (int d = 0; d < box.dims; ++d) {
    std::vector<int64_t> next;
    for (const int64_t outer : flat) {
      for (int64_t i = 0; i < box.size[size_t(d)]; ++i)
        next.push_back(outer * shape[size_t(d)] + box.start[size_t(d)] + i);
    }
    flat = std::move(next);
  }
  return flat;
}

// Elements of every tensor that a rank holds, as sets of row-major positions.
inline std::vector<std::set<int64_t>> holdings(const Layout& layout, int32_t rank) {
  std::vector<std::set<int64_t>> result;
  for (int64_t t = 0; t < layout.count(); ++t) {
    auto& held = result.emplace_back();
    for (const Box& box : layout.boxes(t, rank)) {
      for (const int64_t e : elements_of(box, layout.tensors()[size_t(t)].spec.shape)) held.insert(e);
    }
  }
  return result;
}

class RandomLayouts {
 public:
  explicit RandomLayouts(uint32_t seed) : random_(seed) {}

  int64_t below(int64_t n) { return int64_t(random_() % uint64_t(n)); }

  std::vector<TensorSpec> specs(int64_t count) {
    std::vector<TensorSpec> specs;
    for (int64_t i = 0; i < count; ++i) {
      TensorSpec spec{std::string(1, char('a' + i)), "x", int64_t{1} << below(3), {}};
      for (int64_t dims = below(4); dims > 0; --dims) spec.shape.push_back(below(8) == 0 ? below(2) : 1 + below(9));
      specs.push_back(spec);
    }
    return specs;
  }

  Mesh mesh(int32_t ranks) {
    std::vector<int32_t> all(size_t(ranks) + 2);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(size_t(ranks));
    std::vector<int64_t> shape = {ranks};
    std::vector<std::string> names = {"a"};
    for (const int64_t factor : {2, 3}) {
      if (shape[0] % factor == 0 && below(2) == 0) {
        shape[0] /= factor;
        shape.push_back(factor);
        names.push_back(factor == 2 ? "b" : "c");
      }
    }
    return {all, shape, names};
  }

  std::vector<Placement> placements(const TensorSpec& spec, const Mesh& mesh) {
    std::vector<Placement> result(size_t(mesh.dims()), Replicate{});
    const auto dims = int64_t(spec.shape.size());
    const int64_t kind = below(6);
    const auto whole = size_t(below(mesh.dims()));
    if (kind == 0) {
      result[whole] = flat(spec, mesh.shape()[whole]);
    } else if (kind == 1 && dims > 0) {
      result[whole] = ragged(spec, mesh.shape()[whole]);
    } else if (dims > 0) {
      for (Placement& placement : result) {
        if (below(3) > 0) placement = Shard{int(below(dims))};
      }
      if (kind == 2) result[0] = StridedShard{int(below(dims)), 1 + below(3)};
    }
    return result;
  }

  Layout layout(const std::vector<TensorSpec>& specs, int32_t ranks) {
    const std::vector<Mesh> meshes = {mesh(ranks), mesh(ranks)};
    std::vector<TensorLayout> tensors;
    for (const TensorSpec& spec : specs) {
      const auto on = int32_t(below(2));
      TensorLayout tensor{spec, on, placements(spec, meshes[size_t(on)]), {}};
      for (const Placement& placement : tensor.placements) {
        if (std::holds_alternative<Flat>(placement)) tensor.storage.buffer_shape = {1000};  // the longer buffer
      }
      tensors.push_back(tensor);
    }
    return {meshes, tensors};
  }

  Topology topology() {
    Topology topology{int32_t(1 + below(4)), 1000.0 * double(1 + below(3)), 4000, {}};
    if (below(2) == 0) topology.links.push_back({int32_t(below(6)), 500});
    return topology;
  }

 private:
  // Alone, or somewhere in a longer buffer.
  Flat flat(const TensorSpec& spec, int64_t ranks) {
    int64_t elements = 1;
    for (const int64_t size : spec.shape) elements *= size;
    const int64_t offset = below(3) == 0 ? below(40) : 0;
    const int64_t least = std::max<int64_t>(1, (offset + elements + ranks - 1) / ranks);
    return {below(2) == 0 ? 0 : least + below(3), offset};
  }

  // Every rank gets whole slices of dim 0; some slices belong to several ranks.
  Ragged ragged(const TensorSpec& spec, int64_t ranks) {
    Ragged result;
    result.boxes.resize(size_t(ranks));
    const int64_t rows = spec.shape[0];
    for (int64_t at = 0; at < rows;) {
      const int64_t size = 1 + below(rows - at);
      Box box;
      box.dims = int(spec.shape.size());
      for (size_t d = 0; d < spec.shape.size(); ++d) box.size[d] = spec.shape[d];
      box.start[0] = at;
      box.size[0] = size;
      const int64_t owner = below(ranks);
      if (!box.empty()) result.boxes[size_t(owner)].push_back(box);
      if (const int64_t copy = below(ranks); copy != owner && below(2) == 0 && !box.empty()) {
        if (size > 1) {  // a replica that is cut elsewhere
          box.start[0] += 1;
          box.size[0] -= 1;
        }
        result.boxes[size_t(copy)].push_back(box);
      }
      at += size;
    }
    return result;
  }

  std::mt19937 random_;
};

// Who may serve each (element, target rank), summed by equal answers: the problem that the flow solves, the slow way.
struct ElementDemands {
  // (NIC senders, senders within the node) -> bytes; multicast is not covered.
  std::map<std::pair<std::vector<int32_t>, std::vector<int32_t>>, int64_t> bytes;
  int64_t wire_bytes = 0, local_bytes = 0;

  ElementDemands(const Layout& source, const Layout& target, const Topology& topology) {
    std::map<int32_t, std::vector<std::set<int64_t>>> held;
    for (const int32_t rank : source.ranks()) held[rank] = holdings(source, rank);
    for (const int32_t rank : target.ranks()) {
      const auto needed = holdings(target, rank);
      for (int64_t t = 0; t < target.count(); ++t) {
        const TensorSpec& spec = target.tensors()[size_t(t)].spec;
        const int64_t s = *source.find(spec.name);
        for (const int64_t element : needed[size_t(t)]) {
          std::vector<int32_t> nic, node;
          bool local = false;
          for (const auto& [holder, elements] : held) {
            if (!elements[size_t(s)].contains(element)) continue;
            local = local || holder == rank;
            if (topology.nic_of(holder) > 0)
              (topology.node_of(holder) == topology.node_of(rank) ? node : nic).push_back(holder);
          }
          (local ? local_bytes : wire_bytes) += spec.item_bytes;
          if (!local) bytes[{nic, node}] += spec.item_bytes;
        }
      }
    }
  }

  // The least seconds of the most loaded sender: for every set of links, what only they can carry over what they can.
  double best_seconds(const Topology& topology) const {
    std::vector<std::pair<int32_t, bool>> links;  // (rank, within its node)
    for (const auto& [key, amount] : bytes) {
      for (const int32_t rank : key.first) links.emplace_back(rank, false);
      for (const int32_t rank : key.second) links.emplace_back(rank, true);
    }
    std::sort(links.begin(), links.end());
    links.erase(std::unique(links.begin(), links.end()), links.end());
    const auto bit = [&](int32_t rank, bool within) {
      return uint32_t{1} << (std::find(links.begin(), links.end(), std::pair(rank, within)) - links.begin());
    };
    std::vector<std::pair<uint32_t, int64_t>> demands;
    for (const auto& [key, amount] : bytes) {
      uint32_t mask = 0;
      for (const int32_t rank : key.first) mask |= bit(rank, false);
      for (const int32_t rank : key.second) mask |= bit(rank, true);
      demands.emplace_back(mask, amount);
    }
    double worst = 0;
    for (uint32_t set = 1; set < uint32_t{1} << links.size(); ++set) {
      double only = 0, rate = 0;
      for (const auto& [mask, amount] : demands) only += (mask & ~set) == 0 ? double(amount) : 0;
      for (size_t i = 0; i < links.size(); ++i) {
        if (set >> i & 1) rate += links[i].second ? topology.intra_node_bytes_per_s : topology.nic_of(links[i].first);
      }
      worst = std::max(worst, only / rate);
    }
    return worst;
  }
};

// Sends and receives agree, every chunk is whole, senders hold what they send, and every needed element of every target
// rank arrives exactly once.
inline void check_plan(const Plan& plan) {
  const Layout &source = plan.source(), &target = plan.target();
  std::map<int32_t, RankPlan> plans;
  for (const Layout* side : {&source, &target}) {
    for (const int32_t rank : side->ranks()) plans.try_emplace(rank, plan.rank(rank));
  }
  int64_t wire_bytes = 0, messages = 0, local_bytes = 0;
  std::map<std::pair<int32_t, int64_t>, std::map<int64_t, int>> arrived;  // (rank, target tensor) -> element -> times
  std::map<std::pair<int32_t, int64_t>, std::set<int64_t>> first_phase;
  const auto arrive = [&](int32_t rank, const Atom& atom, bool first) {
    const TensorSpec& spec = target.tensors()[size_t(atom.target_tensor)].spec;
    ASSERT_EQ(source.tensors()[size_t(atom.source_tensor)].spec.name, spec.name);
    for (const int64_t e : elements_of(atom.box, spec.shape)) {
      ++arrived[{rank, atom.target_tensor}][e];
      if (first) first_phase[{rank, atom.target_tensor}].insert(e);
    }
  };
  for (const auto& [rank, part] : plans) {
    ASSERT_EQ(part.rank, rank);
    for (size_t i = 1; i < part.receives.size(); ++i) {
      const Message &a = part.receives[i - 1], &b = part.receives[i];
      ASSERT_LT(std::pair(a.phase, a.source), std::pair(b.phase, b.source));
    }
    for (const Message& message : part.receives) {
      ASSERT_EQ(message.target, rank);
      ASSERT_NE(message.source, rank);
      const std::vector<Message>& sends = plans.at(message.source).sends;
      const auto sent = std::find_if(sends.begin(), sends.end(),
                                     [&](const Message& m) { return m.target == rank && m.phase == message.phase; });
      ASSERT_NE(sent, sends.end());
      ASSERT_EQ(sent->bytes, message.bytes);
      ASSERT_EQ(sent->atoms.size(), message.atoms.size());
      ASSERT_EQ(sent->chunks.size(), message.chunks.size());
      ASSERT_GT(message.bytes, 0);
      for (size_t i = 0; i < message.atoms.size(); ++i) {
        const Atom &a = sent->atoms[i], &b = message.atoms[i];
        ASSERT_TRUE(a.box == b.box && a.source_tensor == b.source_tensor && a.target_tensor == b.target_tensor);
        arrive(rank, b, message.phase == 0);
      }
      int64_t atom = 0, bytes = 0;
      for (size_t i = 0; i < message.chunks.size(); ++i) {
        const Chunk &a = sent->chunks[i], &b = message.chunks[i];
        ASSERT_TRUE(a.id == b.id && a.bytes == b.bytes && a.first_atom == b.first_atom && a.atom_count == b.atom_count);
        ASSERT_EQ(b.id, int32_t(i));
        ASSERT_EQ(b.first_atom, atom);
        ASSERT_GT(b.atom_count, 0);
        ASSERT_LE(b.bytes, plan.options().chunk_bytes);
        int64_t sum = 0;
        for (int64_t end = atom + b.atom_count; atom < end; ++atom) {
          const Atom& of = message.atoms[size_t(atom)];
          sum += of.box.elements() * target.tensors()[size_t(of.target_tensor)].spec.item_bytes;
        }
        ASSERT_EQ(sum, b.bytes);
        bytes += sum;
      }
      ASSERT_EQ(atom, int64_t(message.atoms.size()));
      ASSERT_EQ(bytes, message.bytes);
      wire_bytes += bytes;
      ++messages;
    }
    for (const Atom& atom : part.local_copies) {
      arrive(rank, atom, false);
      local_bytes += atom.box.elements() * target.tensors()[size_t(atom.target_tensor)].spec.item_bytes;
    }
  }
  int64_t sends = 0;
  for (const auto& [rank, part] : plans) {
    const auto held = std::count(source.ranks().begin(), source.ranks().end(), rank)
                          ? holdings(source, rank)
                          : std::vector<std::set<int64_t>>(size_t(source.count()));
    sends += int64_t(part.sends.size());
    const auto expect_held = [&](const Atom& atom, bool first) {
      const TensorSpec& spec = source.tensors()[size_t(atom.source_tensor)].spec;
      for (const int64_t e : elements_of(atom.box, spec.shape)) {
        ASSERT_TRUE(first ? held[size_t(atom.source_tensor)].contains(e)
                          : first_phase[std::pair(rank, int64_t(atom.target_tensor))].contains(e))
            << spec.name << " element " << e << " of rank " << rank;
      }
    };
    for (const Message& message : part.sends) {
      for (const Atom& atom : message.atoms) expect_held(atom, message.phase == 0);
    }
    for (const Atom& atom : part.local_copies) expect_held(atom, true);
  }
  EXPECT_GE(plan.stats().seconds, plan.lower_bound().seconds * (1 - 1e-12));
  EXPECT_EQ(sends, messages);
  EXPECT_EQ(messages, plan.stats().messages);
  EXPECT_EQ(wire_bytes, plan.stats().wire_bytes);
  EXPECT_EQ(wire_bytes, plan.lower_bound().wire_bytes);
  EXPECT_EQ(local_bytes, plan.stats().local_bytes);
  for (const int32_t rank : target.ranks()) {
    const auto needed = holdings(target, rank);
    for (int64_t t = 0; t < target.count(); ++t) {
      std::set<int64_t> got;
      for (const auto& [element, times] : arrived[{rank, t}]) {
        EXPECT_EQ(times, 1);
        got.insert(element);
      }
      EXPECT_EQ(got, needed[size_t(t)]);
    }
  }
}

inline std::shared_ptr<const Layout> share(Layout layout) { return std::make_shared<const Layout>(std::move(layout)); }

}  // namespace areal::reshard
