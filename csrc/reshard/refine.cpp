#include "reshard/refine.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>
#include <variant>

#include "base/check.h"

namespace areal::reshard {
namespace {

bool starts_before(const Box& a, const Box& b) { return std::tie(a.start, a.size) < std::tie(b.start, b.size); }

struct Piece {
  Box box;
  std::vector<int32_t> holders;  // ascending
};

// Calls fn(i, j) for boxes a[i] and b[j] that may share something, each pair once. Sweeps the dimension along which the
// boxes start at the most places.
template <class Fn>
void for_each_meeting(std::span<const Box> a, std::span<const Box> b, const Fn& fn) {
  if (a.empty() || b.empty()) return;
  int along = 0;
  size_t most = 0;
  for (int d = 0; d < a[0].dims; ++d) {
    std::vector<int64_t> starts;
    for (const Box& box : a) starts.push_back(box.start[size_t(d)]);
    for (const Box& box : b) starts.push_back(box.start[size_t(d)]);
    std::sort(starts.begin(), starts.end());
    const auto distinct = size_t(std::unique(starts.begin(), starts.end()) - starts.begin());
    if (distinct > most) std::tie(most, along) = std::tuple(distinct, d);
  }
  const auto begin_of = [&](const Box& box) { return box.dims == 0 ? 0 : box.start[size_t(along)]; };
  const auto end_of = [&](const Box& box) { return box.dims == 0 ? 1 : begin_of(box) + box.size[size_t(along)]; };
  const auto ordered = [&](std::span<const Box> boxes) {
    std::vector<int32_t> order(boxes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t x, int32_t y) { return begin_of(boxes[size_t(x)]) < begin_of(boxes[size_t(y)]); });
    return order;
  };
  const std::vector<int32_t> order_a = ordered(a), order_b = ordered(b);
  std::vector<int32_t> open;  // of b: begun, and not known to have ended
  size_t next = 0;
  for (const int32_t i : order_a) {
    const Box& box = a[size_t(i)];
    for (; next < order_b.size() && begin_of(b[size_t(order_b[next])]) < end_of(box); ++next) {
      open.push_back(order_b[next]);
    }
    std::erase_if(open, [&](int32_t j) { return end_of(b[size_t(j)]) <= begin_of(box); });
    for (const int32_t j : open) {
      if (begin_of(b[size_t(j)]) < end_of(box)) fn(i, j);
    }
  }
}

// Appends what is left of `box` without `hole`, which lies in it.
void subtract(Box box, const Box& hole, std::vector<Box>* rest) {
  for (int d = 0; d < box.dims; ++d) {
    const auto i = size_t(d);
    const int64_t end = box.start[i] + box.size[i], hole_end = hole.start[i] + hole.size[i];
    if (box.start[i] < hole.start[i]) {
      rest->push_back(box);
      rest->back().size[i] = hole.start[i] - box.start[i];
    }
    if (hole_end < end) {
      rest->push_back(box);
      rest->back().start[i] = hole_end;
      rest->back().size[i] = end - hole_end;
    }
    box.start[i] = hole.start[i];
    box.size[i] = hole.size[i];
  }
}

// The coordinates that a Flat placement gives anything of a tensor to: of a flat buffer of thousands of tensors each
// lies on a few ranks.
class FlatRange {
 public:
  FlatRange(const TensorLayout& tensor, const Mesh& mesh) : mesh_(mesh) {
    const std::vector<int64_t>& shape = tensor.spec.shape;
    if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
    const int64_t elements = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    for (size_t d = 0; d < tensor.placements.size(); ++d) {
      const auto* flat = std::get_if<Flat>(&tensor.placements[d]);
      if (flat == nullptr) continue;
      const int64_t parts = mesh.shape()[d];
      const int64_t chunk = flat->chunk > 0 ? flat->chunk : (flat->offset + elements + parts - 1) / parts;
      dim_ = int(d);
      first_ = flat->offset / chunk;
      last_ = (flat->offset + elements - 1) / chunk;
    }
  }

  bool leaves_out(int64_t position) const {
    if (dim_ < 0) return false;
    const int64_t coordinate = mesh_.coordinate_along(dim_, position);
    return coordinate < first_ || coordinate > last_;
  }
  // Positions outside [first_position, end_position) are left out in any case.
  int64_t first_position() const { return dim_ >= 0 && mesh_.dims() == 1 ? first_ : 0; }
  int64_t end_position() const {
    return dim_ >= 0 && mesh_.dims() == 1 ? std::min(last_ + 1, mesh_.size()) : mesh_.size();
  }

 private:
  const Mesh& mesh_;
  int dim_ = -1;  // of the mesh, with a Flat placement; -1: none
  int64_t first_ = 0, last_ = 0;
};

bool any_overlap(const std::vector<Piece>& pieces) {
  std::vector<Box> boxes;
  for (const Piece& piece : pieces) boxes.push_back(piece.box);
  bool found = false;
  for_each_meeting(boxes, boxes, [&](int32_t i, int32_t j) {
    found = found || (i < j && intersect(boxes[size_t(i)], boxes[size_t(j)]).has_value());
  });
  return found;
}

// Cuts pieces where they overlap. Quadratic: only Ragged boxes come here, and they are few.
std::vector<Piece> cut_overlaps(const std::vector<Piece>& pieces) {
  std::vector<Piece> disjoint;
  for (const Piece& piece : pieces) {
    std::vector<Piece> next;
    std::vector<Box> remaining = {piece.box};
    for (const Piece& old : disjoint) {
      std::vector<Box> old_rest = {old.box}, still;
      for (const Box& box : remaining) {
        const std::optional<Box> common = intersect(box, old.box);
        if (!common) {
          still.push_back(box);
          continue;
        }
        subtract(box, *common, &still);
        next.push_back({*common, {}});
        std::set_union(old.holders.begin(), old.holders.end(), piece.holders.begin(), piece.holders.end(),
                       std::back_inserter(next.back().holders));
        std::vector<Box> cut;
        for (const Box& rest : old_rest) {
          const std::optional<Box> hole = intersect(rest, *common);
          if (hole) {
            subtract(rest, *hole, &cut);
          } else {
            cut.push_back(rest);
          }
        }
        old_rest = std::move(cut);
      }
      for (const Box& rest : old_rest) next.push_back({rest, old.holders});
      remaining = std::move(still);
    }
    for (const Box& box : remaining) next.push_back({box, piece.holders});
    disjoint = std::move(next);
  }
  return disjoint;
}

}  // namespace

Pieces disjoint_pieces(std::span<const Box> boxes, std::span<const int32_t> holders) {
  std::vector<int32_t> order(boxes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const Box &x = boxes[size_t(a)], &y = boxes[size_t(b)];
    return x == y ? holders[size_t(a)] < holders[size_t(b)] : starts_before(x, y);
  });
  std::vector<Piece> pieces;
  for (const int32_t i : order) {
    if (pieces.empty() || pieces.back().box != boxes[size_t(i)]) pieces.push_back({boxes[size_t(i)], {}});
    pieces.back().holders.push_back(holders[size_t(i)]);
  }
  if (any_overlap(pieces)) {
    pieces = cut_overlaps(pieces);
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return starts_before(a.box, b.box); });
  }
  Pieces result;
  std::map<std::vector<int32_t>, int32_t> group_of;
  for (Piece& piece : pieces) {
    const auto [entry, is_new] = group_of.try_emplace(piece.holders, int32_t(group_of.size()));
    if (is_new) result.groups.push_back(std::move(piece.holders));
    result.boxes.push_back(piece.box);
    result.group_of.push_back(entry->second);
  }
  return result;
}

std::span<const GroupPair> Refinement::pairs_of(int32_t source_group) const {
  const auto [first, last] =
      std::equal_range(pairs.begin(), pairs.end(), GroupPair{source_group, 0, 0, 0},
                       [](const GroupPair& a, const GroupPair& b) { return a.source_group < b.source_group; });
  return {first, last};
}

std::span<const int32_t> Refinement::intersections_of(int32_t source_group, int32_t target_group) const {
  const std::span<const GroupPair> candidates = pairs_of(source_group);
  const auto pair = std::lower_bound(candidates.begin(), candidates.end(), target_group,
                                     [](const GroupPair& a, int32_t group) { return a.target_group < group; });
  if (pair == candidates.end() || pair->target_group != target_group) return {};
  return std::span(by_pair).subspan(size_t(pair->first), size_t(pair->count));
}

std::vector<int32_t> Pieces::groups_of(int32_t position) const {
  std::vector<int32_t> result;
  for (size_t group = 0; group < groups.size(); ++group) {
    if (std::binary_search(groups[group].begin(), groups[group].end(), position)) result.push_back(int32_t(group));
  }
  return result;
}

Pieces pieces_of(const TensorLayout& tensor, const Mesh& mesh) {
  const FlatRange flat(tensor, mesh);
  std::vector<Box> boxes;
  std::vector<int32_t> holders;
  LocalPart part;
  for (int64_t position = flat.first_position(); position < flat.end_position(); ++position) {
    if (flat.leaves_out(position)) continue;
    part.assign(tensor.spec.shape, mesh, tensor.placements, position);
    for (const LocalBox& held : part.boxes()) {
      boxes.push_back(held.box);
      holders.push_back(int32_t(position));
    }
  }
  return disjoint_pieces(boxes, holders);
}

namespace {

// The first part of a target piece that no source piece covers.
void check_covered(std::string_view tensor, const Refinement& refinement) {
  int64_t needed = 0, found = 0;
  for (const Box& box : refinement.target->boxes) needed += box.elements();
  for (const Intersection& common : refinement.intersections) found += common.elements;
  if (needed == found) return;
  for (const Box& box : refinement.target->boxes) {
    std::vector<Box> missing = {box};
    for (const Intersection& common : refinement.intersections) {
      std::vector<Box> rest;
      for (const Box& part : missing) {
        const std::optional<Box> hole = intersect(part, common.box);
        if (hole) {
          subtract(part, *hole, &rest);
        } else {
          rest.push_back(part);
        }
      }
      missing = std::move(rest);
    }
    AREAL_CHECK(missing.empty(), "plan: tensor '", tensor, "': expected a holder of ", box_text(missing[0]),
                " in the source, got none");
  }
}

void index_pairs(Refinement* refinement) {
  std::vector<Intersection>& all = refinement->intersections;
  refinement->by_pair.resize(all.size());
  std::iota(refinement->by_pair.begin(), refinement->by_pair.end(), 0);
  const auto pair_of = [&](int32_t i) { return std::pair(all[size_t(i)].source_group, all[size_t(i)].target_group); };
  std::stable_sort(refinement->by_pair.begin(), refinement->by_pair.end(),
                   [&](int32_t a, int32_t b) { return pair_of(a) < pair_of(b); });
  for (int32_t i = 0; i < int32_t(all.size()); ++i) {
    const auto [source, target] = pair_of(refinement->by_pair[size_t(i)]);
    std::vector<GroupPair>& pairs = refinement->pairs;
    if (pairs.empty() || pairs.back().source_group != source || pairs.back().target_group != target) {
      pairs.push_back({source, target, i, 0});
    }
    ++pairs.back().count;
  }
}

}  // namespace

Refinement refine(std::shared_ptr<const Pieces> source, std::shared_ptr<const Pieces> target, std::string_view tensor) {
  std::vector<std::pair<int32_t, int32_t>> meetings;
  for_each_meeting(target->boxes, source->boxes, [&](int32_t i, int32_t j) { meetings.emplace_back(i, j); });
  std::sort(meetings.begin(), meetings.end());
  Refinement result;
  result.of_target.resize(target->groups.size());
  for (const auto& [i, j] : meetings) {
    const std::optional<Box> common = intersect(target->boxes[size_t(i)], source->boxes[size_t(j)]);
    if (!common) continue;
    const int32_t group = target->group_of[size_t(i)];
    result.of_target[size_t(group)].push_back(int32_t(result.intersections.size()));
    result.intersections.push_back({*common, common->elements(), source->group_of[size_t(j)], group});
  }
  result.source = std::move(source);
  result.target = std::move(target);
  check_covered(tensor, result);
  index_pairs(&result);
  return result;
}

}  // namespace areal::reshard
