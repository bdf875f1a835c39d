#include "reshard/plan_queues.h"

#include <algorithm>
#include <span>
#include <string>
#include <unordered_map>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr double kMaxBytes = 4e18;  // needed by all ranks together: every sum of bytes stays within int64

// What one set of holders owes each member of a group, by the size of the group.
struct Owed {
  int32_t holders;
  int32_t needers;
  int64_t total = 0;                        // what each needer needs
  std::vector<std::vector<int64_t>> bytes;  // [members][member]: its stripes; empty where no group has this size

  // all_bytes: what all ranks need, so far.
  void add(const Problem& problem, int32_t tensor_class, const GroupPair& pair, double* all_bytes) {
    const TensorClass& of = problem.tensor_class(tensor_class);
    const auto tensors = int64_t(of.tensors.size());
    int64_t sum = 0;
    for (int32_t i = pair.first; i < pair.first + pair.count; ++i) {
      sum += of.refinement->intersections[size_t(of.refinement->by_pair[size_t(i)])].elements * of.item_bytes;
    }
    *all_bytes += double(sum) * double(tensors) * double(problem.rank_set(needers).size());
    AREAL_CHECK(*all_bytes <= kMaxBytes, "plan: expected at most ", kMaxBytes, " bytes for all ranks, got more");
    total += sum * tensors;
    for (size_t members = 1; members < bytes.size(); ++members) {
      for (size_t member = 0; member < bytes[members].size(); ++member) {
        sum = 0;
        for (int32_t i = pair.first; i < pair.first + pair.count; ++i) {
          const int32_t intersection = of.refinement->by_pair[size_t(i)];
          sum += unit_of(problem, tensor_class, intersection, int32_t(member), int32_t(members)).bytes;
        }
        bytes[members][member] += sum * tensors;
      }
    }
  }
};

// Bytes owed between each two sets of ranks, sorted by holders, then by needers. Few: sets are few.
std::vector<Owed> sum_owed(const Problem& problem) {
  std::vector<Owed> result;
  std::unordered_map<int64_t, size_t> found;
  NeederGroups groups;
  double all_bytes = 0;
  for (size_t c = 0; c < problem.classes.classes.size(); ++c) {
    const TensorClass& of = problem.classes.classes[c];
    for (const GroupPair& pair : of.refinement->pairs) {
      const int32_t holders = of.holders[size_t(pair.source_group)], needers = of.needers[size_t(pair.target_group)];
      const auto [entry, is_new] = found.try_emplace((int64_t{holders} << 32) | needers, result.size());
      if (is_new) {
        result.push_back({holders, needers, 0, {}});
        find_needer_groups(problem, holders, needers, &groups);
        for (size_t g = 0; g < groups.size(); ++g) {
          const size_t members = groups.group(g).size();
          auto& bytes = result.back().bytes;
          if (bytes.size() <= members) bytes.resize(members + 1);
          bytes[members].resize(members);
        }
      }
      result[entry->second].add(problem, int32_t(c), pair, &all_bytes);
    }
  }
  std::sort(result.begin(), result.end(), [](const Owed& a, const Owed& b) {
    return std::pair(a.holders, a.needers) < std::pair(b.holders, b.needers);
  });
  return result;
}

// The first tensor of which these holders owe something.
std::string describe_owed(const Problem& problem, int32_t holders) {
  NeederGroups groups;
  for (const TensorClass& of : problem.classes.classes) {
    for (const GroupPair& pair : of.refinement->pairs) {
      if (of.holders[size_t(pair.source_group)] != holders) continue;
      find_needer_groups(problem, holders, of.needers[size_t(pair.target_group)], &groups);
      if (groups.size() == 0) continue;
      const int32_t first = of.refinement->by_pair[size_t(pair.first)];
      return "tensor '" + problem.target->tensors()[size_t(of.tensors[0].target)].spec.name + "' " +
             box_text(of.refinement->intersections[size_t(first)].box);
    }
  }
  return "nothing";
}

// Builds the queues of one set of holders at a time.
class QueueMaker {
 public:
  explicit QueueMaker(const Problem& problem)
      : problem_(problem),
        bytes_(size_t(problem.ranks.size())),
        needed_(bytes_.size()),
        passed_on_(bytes_.size()),
        seen_(bytes_.size()) {}

  void add(const Owed& owed, int64_t* local_bytes) {
    find_needer_groups(problem_, owed.holders, owed.needers, &groups_);
    *local_bytes += int64_t(problem_.rank_set(owed.needers).size() - groups_.members.size()) * owed.total;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const std::span<const int32_t> group = groups_.group(g);
      for (size_t i = 0; i < group.size(); ++i) {
        if (!seen_[size_t(group[i])]) targets_.push_back(group[i]);
        seen_[size_t(group[i])] = true;
        const int64_t bytes = owed.bytes[group.size()][i];
        bytes_[size_t(group[i])] += bytes;
        needed_[size_t(group[i])] += owed.total;
        passed_on_[size_t(group[i])] += bytes * int64_t(group.size() - 1);
      }
    }
  }

  // Appends the queues for what has been added.
  void finish(int32_t holders, std::vector<Queue>* queues, std::vector<RankNeeds>* needs) {
    std::vector<int32_t> nodes;
    for (const int32_t holder : problem_.rank_set(holders)) {
      if (problem_.ranks.reachable(holder)) nodes.push_back(problem_.ranks.node(holder));
    }
    std::sort(targets_.begin(), targets_.end());
    Queue elsewhere{holders, -1, 0, {}, {}};
    std::vector<Queue> within;
    for (const int32_t target : targets_) {
      const int64_t bytes = std::exchange(bytes_[size_t(target)], 0);
      const int64_t needed = std::exchange(needed_[size_t(target)], 0);
      seen_[size_t(target)] = false;
      AREAL_CHECK(!nodes.empty(), "plan: expected a reachable holder of ", describe_owed(problem_, holders),
                  ", got none");
      const int32_t node = problem_.ranks.node(target);
      AREAL_CHECK(problem_.ranks.reachable(target), "plan: expected a link of rank ", problem_.ranks.rank(target),
                  ", which needs what others hold, got 0 bytes/s");
      const bool near = std::binary_search(nodes.begin(), nodes.end(), node);
      if (near && (within.empty() || within.back().node != node)) within.push_back({holders, node, 0, {}, {}});
      RankNeeds& of = (*needs)[size_t(target)];
      of.bytes += needed;
      if (!near) of.far_bytes += needed;
      if (near && nodes.front() == nodes.back()) of.near_bytes += needed;
      of.passed_on_bytes += std::exchange(passed_on_[size_t(target)], 0);
      Queue& queue = near ? within.back() : elsewhere;
      if (bytes == 0) continue;  // others of its group bring it all
      queue.targets.push_back({target, queue.bytes});
      queue.bytes += bytes;
    }
    targets_.clear();
    if (elsewhere.bytes > 0) queues->push_back(std::move(elsewhere));
    for (Queue& queue : within) {
      if (queue.bytes > 0) queues->push_back(std::move(queue));
    }
  }

 private:
  const Problem& problem_;
  std::vector<int64_t> bytes_, needed_, passed_on_;  // per rank
  std::vector<bool> seen_;
  std::vector<int32_t> targets_;
  NeederGroups groups_;
};

}  // namespace

int64_t Queue::begin_of(int32_t rank) const {
  const auto target = std::lower_bound(targets.begin(), targets.end(), rank,
                                       [](const QueueTarget& a, int32_t wanted) { return a.rank < wanted; });
  AREAL_CHECK(target != targets.end() && target->rank == rank, "plan: expected a target of the queue, got ", rank);
  return target->begin;
}

int32_t Queues::find(int32_t holders, int32_t target_node) const {
  const auto [first, last] = ranges[size_t(holders)];
  int32_t elsewhere = -1;
  for (int32_t q = first; q < last; ++q) {
    if (queues[size_t(q)].node == target_node) return q;
    if (queues[size_t(q)].node == -1) elsewhere = q;
  }
  return elsewhere;
}

Queues make_queues(const Problem& problem) {
  Queues result;
  const size_t sets = problem.classes.rank_sets.size();
  result.ranges.resize(sets);
  result.held.resize(sets);
  result.needs.resize(size_t(problem.ranks.size()));
  for (size_t c = 0; c < problem.classes.classes.size(); ++c) {
    const TensorClass& of = problem.classes.classes[c];
    for (size_t group = 0; group < of.holders.size(); ++group) {
      result.held[size_t(of.holders[group])].push_back({int32_t(c), int32_t(group)});
    }
  }
  const std::vector<Owed> owed = sum_owed(problem);
  QueueMaker maker(problem);
  for (size_t i = 0; i < owed.size(); ++i) {
    maker.add(owed[i], &result.local_bytes);
    const int32_t holders = owed[i].holders;
    if (i + 1 < owed.size() && owed[i + 1].holders == holders) continue;
    const auto first = int32_t(result.queues.size());
    maker.finish(holders, &result.queues, &result.needs);
    result.ranges[size_t(holders)] = {first, int32_t(result.queues.size())};
  }
  return result;
}

QueueWalk::QueueWalk(const Problem& problem, const Queues& queues, int32_t holders)
    : problem_(problem),
      held_(queues.held[size_t(holders)]),
      holders_(holders),
      stride_(std::max(kMinStride, held_.size())),
      units_(held_.size()),
      bytes_(held_.size()) {
  for (size_t h = 0; h < held_.size(); ++h) {
    for (const TensorPair& tensors : problem.tensor_class(held_[h].tensor_class).tensors) {
      tensors_.push_back({tensors, int32_t(h)});
    }
  }
  std::sort(tensors_.begin(), tensors_.end(),
            [](const HeldTensor& a, const HeldTensor& b) { return a.tensors.target < b.tensors.target; });
  std::vector<int32_t> counts(held_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (i % stride_ == 0) counts_.insert(counts_.end(), counts.begin(), counts.end());
    ++counts[size_t(tensors_[i].held)];
  }
}

size_t QueueWalk::skip(int64_t bytes, int64_t* skipped) const {
  const auto bytes_before = [&](size_t mark) {
    int64_t sum = 0;
    for (size_t h = 0; h < held_.size(); ++h) sum += counts_[mark * held_.size() + h] * bytes_[h];
    return sum;
  };
  size_t mark = 0, end = (tensors_.size() + stride_ - 1) / stride_;
  while (end - mark > 1) {
    const size_t middle = (mark + end) / 2;
    (bytes_before(middle) <= bytes ? mark : end) = middle;
  }
  *skipped = bytes_before(mark);
  return mark * stride_;
}

void QueueWalk::find_units(int32_t target) {
  if (target == target_) return;
  target_ = target;
  const int32_t rank = problem_.ranks.rank(target);
  for (size_t h = 0; h < held_.size(); ++h) {
    std::vector<Unit>& units = units_[h];
    units.clear();
    bytes_[h] = 0;
    const int32_t c = held_[h].tensor_class;
    const TensorClass& of = problem_.tensor_class(c);
    const auto position = problem_.target->meshes()[size_t(of.target_mesh)].position_of(rank);
    if (!position) continue;
    for (const int32_t group : of.refinement->target->groups_of(int32_t(*position))) {
      const std::span<const int32_t> common = of.refinement->intersections_of(held_[h].source_group, group);
      if (common.empty()) continue;
      const Membership at = membership_of(problem_, holders_, of.needers[size_t(group)], target);
      for (const int32_t i : common) {
        const Unit unit = unit_of(problem_, c, i, at.member, at.members);
        if (unit.bytes > 0) units.push_back(unit);
        bytes_[h] += unit.bytes;
      }
    }
    std::sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.intersection < b.intersection; });
  }
}

}  // namespace areal::reshard
