#include "reshard/plan_rank.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "reshard/plan_chunks.h"

namespace areal::reshard {
namespace {

// Elements [begin, end) of an intersection of one tensor, row-major.
struct Part {
  TensorPair tensors;
  int32_t tensor_class;
  int32_t intersection;
  int64_t begin, end;
};

bool comes_before(const Part& a, const Part& b) {
  return std::pair(a.tensors.target, a.intersection) < std::pair(b.tensors.target, b.intersection);
}

// Parts by peer (position in the RankTable).
using PartsByPeer = std::vector<std::vector<Part>>;

// Another rank that needs the same intersection, and the stripe that it is sent.
struct Companion {
  int32_t rank;
  Unit unit;
};

// What this rank needs of every tensor of one class.
struct Need {
  int32_t queue;  // -1: it holds it itself
  Unit unit;
  std::vector<Companion> companions;
};

class RankPlanner {
 public:
  RankPlanner(const Problem& problem, const Queues& queues, int32_t rank)
      : problem_(problem), queues_(queues), rank_(rank), cursors_(queues.queues.size()) {
    for (PartsByPeer* parts : {&sent_, &received_, &passed_on_, &completed_})
      parts->resize(size_t(problem.ranks.size()));
  }

  void receive() {
    std::vector<std::optional<std::pair<size_t, size_t>>> ranges(problem_.classes.classes.size());
    for (size_t t = 0; t < problem_.classes.class_of.size(); ++t) {
      const int32_t c = problem_.classes.class_of[t];
      auto& range = ranges[size_t(c)];
      if (!range) {
        const size_t first = needs_.size();
        append_needs(c);
        range = {first, needs_.size()};
      }
      if (range->first == range->second) continue;
      const TensorPair tensors = problem_.tensor_class(c).tensors[size_t(problem_.classes.ordinal_of[t])];
      for (size_t i = range->first; i < range->second; ++i) receive(needs_[i], {tensors, c, 0, 0, 0});
    }
  }

  void send(const std::vector<OwnShare>& own) {
    std::optional<QueueWalk> walk;
    int32_t walk_holders = -1;
    for (const OwnShare& share : own) {
      const Queue& queue = queues_.queues[size_t(share.queue)];
      if (queue.holders != walk_holders) walk.emplace(problem_, queues_, walk_holders = queue.holders);
      const int64_t begin = queue.shares[size_t(share.share)].begin, end = queue.end_of_share(size_t(share.share));
      auto target = std::upper_bound(queue.targets.begin(), queue.targets.end(), begin,
                                     [](int64_t at, const QueueTarget& t) { return at < t.begin; });
      for (--target; target != queue.targets.end() && target->begin < end; ++target) {
        std::vector<Part>& parts = sent_[size_t(target->rank)];
        walk->run(target->rank, target->begin, begin, [&](const QueueWalk::Step& step) {
          if (step.begin >= end) return false;
          append_common(step, begin, end, &parts);
          return true;
        });
      }
    }
    for (std::vector<Part>& parts : sent_) {  // of several queues
      if (!std::is_sorted(parts.begin(), parts.end(), comes_before))
        std::sort(parts.begin(), parts.end(), comes_before);
    }
  }

  RankPlan finish() {
    RankPlan plan;
    plan.rank = problem_.ranks.rank(rank_);
    append_messages(sent_, 0, true, &plan.sends);
    append_messages(passed_on_, 1, true, &plan.sends);
    append_messages(received_, 0, false, &plan.receives);
    append_messages(completed_, 1, false, &plan.receives);
    plan.local_copies.reserve(local_.size());
    for (const Part& part : local_) append_atoms(part, part.end - part.begin, &plan.local_copies);
    return plan;
  }

 private:
  struct Cursor {
    int64_t at = -1;  // bytes of the queue before the next unit; -1: not begun
    size_t share = 0;
  };

  void append_needs(int32_t c) {
    const TensorClass& of = problem_.tensor_class(c);
    const auto position = problem_.target->meshes()[size_t(of.target_mesh)].position_of(problem_.ranks.rank(rank_));
    if (!position) return;
    wanted_.clear();
    for (const int32_t group : of.refinement->target->groups_of(int32_t(*position))) {
      for (const int32_t i : of.refinement->of_target[size_t(group)]) wanted_.push_back(i);
    }
    std::sort(wanted_.begin(), wanted_.end());
    for (const int32_t i : wanted_) {
      const Intersection& common = of.refinement->intersections[size_t(i)];
      const int32_t holders = of.holders[size_t(common.source_group)];
      const RankSet& held = problem_.rank_set(holders);
      if (std::binary_search(held.begin(), held.end(), rank_)) {
        needs_.push_back({-1, unit_of(problem_, c, i, 0, 1), {}});
        continue;
      }
      Need& need = needs_.emplace_back(Need{queues_.find(holders, problem_.ranks.node(rank_)), {}, {}});
      const Membership at = membership_of(problem_, holders, of.needers[size_t(common.target_group)], rank_);
      need.unit = unit_of(problem_, c, i, at.member, at.members);
      for (int32_t m = 0; m < int32_t(at.group.size()); ++m) {
        if (m != at.member) need.companions.push_back({at.group[size_t(m)], unit_of(problem_, c, i, m, at.members)});
      }
    }
  }

  // part: its tensors and class.
  void receive(const Need& need, Part part) {
    part.intersection = need.unit.intersection;
    part.begin = need.unit.begin;
    part.end = need.unit.end;
    if (need.queue < 0) {
      local_.push_back(part);
      return;
    }
    if (need.unit.bytes > 0) take(need.queue, need.unit, part);
    for (const Companion& companion : need.companions) {
      if (need.unit.bytes > 0) passed_on_[size_t(companion.rank)].push_back(part);
      if (companion.unit.bytes == 0) continue;
      Part completing = part;
      completing.begin = companion.unit.begin;
      completing.end = companion.unit.end;
      completed_[size_t(companion.rank)].push_back(completing);
    }
  }

  // The next unit of a queue, from the senders whose shares it lies in.
  void take(int32_t q, const Unit& unit, Part part) {
    const Queue& queue = queues_.queues[size_t(q)];
    Cursor& cursor = cursors_[size_t(q)];
    if (cursor.at < 0) {
      cursor.at = queue.begin_of(rank_);
      while (queue.end_of_share(cursor.share) <= cursor.at) ++cursor.share;
    }
    const int64_t item_bytes = problem_.tensor_class(part.tensor_class).item_bytes;
    const int64_t end = cursor.at + unit.bytes;
    while (cursor.at < end) {
      const int64_t share_end = queue.end_of_share(cursor.share), until = std::min(end, share_end);
      part.end = part.begin + (until - cursor.at) / item_bytes;
      received_[size_t(queue.shares[cursor.share].sender)].push_back(part);
      part.begin = part.end;
      cursor.at = until;
      if (until == share_end) ++cursor.share;
    }
  }

  // What of a step lies in bytes [begin, end) of its queue.
  void append_common(const QueueWalk::Step& step, int64_t begin, int64_t end, std::vector<Part>* parts) const {
    const int64_t item_bytes = problem_.tensor_class(step.tensor_class).item_bytes;
    const int64_t from = std::max(begin, step.begin) - step.begin;
    const int64_t to = std::min(end, step.begin + step.unit.bytes) - step.begin;
    if (to <= from) return;
    parts->push_back({step.tensors, step.tensor_class, step.unit.intersection, step.unit.begin + from / item_bytes,
                      step.unit.begin + to / item_bytes});
  }

  void append_atoms(const Part& part, int64_t max_elements, std::vector<Atom>* atoms) {
    const Box& box = problem_.tensor_class(part.tensor_class).refinement->intersections[size_t(part.intersection)].box;
    const int64_t elements = part.end - part.begin;
    if (part.begin == 0 && elements <= max_elements && elements == box.elements()) {  // as most are
      atoms->push_back({part.tensors.source, part.tensors.target, box});
      return;
    }
    rows_.clear();
    pieces_.clear();
    append_interval(box, part.begin, part.end, &rows_);
    for (const Box& row : rows_) append_fitting(row, max_elements, &pieces_);
    for (const Box& piece : pieces_) atoms->push_back({part.tensors.source, part.tensors.target, piece});
  }

  void append_messages(const PartsByPeer& parts_of, int32_t phase, bool sends, std::vector<Message>* messages) {
    const int32_t self = problem_.ranks.rank(rank_);
    std::vector<int64_t> atom_bytes;
    for (int32_t peer = 0; peer < problem_.ranks.size(); ++peer) {
      const std::vector<Part>& parts = parts_of[size_t(peer)];
      if (parts.empty()) continue;
      const int32_t other = problem_.ranks.rank(peer);
      Message& message = messages->emplace_back(Message{sends ? self : other, sends ? other : self, phase, 0, {}, {}});
      message.atoms.reserve(parts.size());
      atom_bytes.clear();
      for (const Part& part : parts) {
        const int64_t item_bytes = problem_.tensor_class(part.tensor_class).item_bytes;
        append_atoms(part, std::max<int64_t>(1, problem_.options.chunk_bytes / item_bytes), &message.atoms);
        for (size_t i = atom_bytes.size(); i < message.atoms.size(); ++i) {
          atom_bytes.push_back(message.atoms[i].box.elements() * item_bytes);
        }
      }
      pack_chunks(atom_bytes, problem_.options.chunk_bytes, &message);
    }
  }

  const Problem& problem_;
  const Queues& queues_;
  int32_t rank_;
  std::vector<Cursor> cursors_;  // per queue
  std::vector<Need> needs_;      // of the classes seen, one behind the other
  std::vector<int32_t> wanted_;  // scratch of append_needs
  PartsByPeer sent_, received_, passed_on_, completed_;
  std::vector<Part> local_;
  std::vector<Box> rows_, pieces_;  // scratch of append_atoms
};

}  // namespace

RankPlan make_rank_plan(const Problem& problem, const Queues& queues, const std::vector<OwnShare>& own, int32_t rank) {
  RankPlanner planner(problem, queues, rank);
  planner.receive();
  planner.send(own);
  return planner.finish();
}

}  // namespace areal::reshard
