// Queues: all bytes that one set of holders owes, laid end to end target by target, tensor by tensor, box by box.
// Senders take consecutive shares of a queue, so that the flow's amounts become concrete boxes with at most one cut
// between two senders, and a target hears from few of them.
//
// Two kinds of queues for a set of holders: targets that share a node with some of them (one queue for each such node),
// and all other targets.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "reshard/plan_classes.h"
#include "reshard/plan_stripes.h"

namespace areal::reshard {

struct QueueTarget {
  int32_t rank;   // position in the RankTable
  int64_t begin;  // bytes before it in the queue
};

struct Share {
  int32_t sender;  // position in the RankTable
  int64_t begin;   // it ends where the next begins
};

struct Queue {
  int32_t holders;  // position in Classes::rank_sets
  int32_t node;     // of its targets; -1: targets on nodes without a reachable holder
  int64_t bytes = 0;
  std::vector<QueueTarget> targets;  // ascending by rank
  std::vector<Share> shares;         // none empty

  int64_t end_of_target(size_t i) const { return i + 1 < targets.size() ? targets[i + 1].begin : bytes; }
  int64_t end_of_share(size_t i) const { return i + 1 < shares.size() ? shares[i + 1].begin : bytes; }
  // Where the bytes for a target begin; it must be one of the targets.
  int64_t begin_of(int32_t rank) const;
};

// A tensor class of which a set of ranks holds one group of pieces.
struct HeldClass {
  int32_t tensor_class;
  int32_t source_group;
};

// What one rank needs and does not hold, whoever brings it.
struct RankNeeds {
  int64_t bytes = 0;            // all
  int64_t far_bytes = 0;        // with no reachable holder on its node
  int64_t near_bytes = 0;       // with none elsewhere
  int64_t passed_on_bytes = 0;  // of its stripes, to the others of its groups
};

struct Queues {
  std::vector<Queue> queues;                        // sorted by (holders, node)
  std::vector<std::pair<int32_t, int32_t>> ranges;  // per rank set: its queues [first, last)
  std::vector<std::vector<HeldClass>> held;         // per rank set, ascending
  std::vector<RankNeeds> needs;                     // per rank
  int64_t local_bytes = 0;                          // needed by ranks that hold them

  // The queue in which a set of holders serves targets of this node.
  int32_t find(int32_t holders, int32_t target_node) const;
};

// All queues, without shares. Throws areal::Error naming the tensor and box that no reachable rank holds, and the
// target that needs bytes and is unreachable.
Queues make_queues(const Problem& problem);

// What one set of holders owes one target: the units of each class that it holds, in wire order.
class QueueWalk {
 public:
  struct Step {
    int32_t tensor_class;
    TensorPair tensors;
    Unit unit;
    int64_t begin;  // bytes before it in the queue
  };

  QueueWalk(const Problem& problem, const Queues& queues, int32_t holders);

  // Calls fn(step) for every unit of the target that ends behind byte `first` of the queue, until fn returns false.
  // begin: QueueTarget::begin of the target.
  template <class Fn>
  void run(int32_t target, int64_t begin, int64_t first, const Fn& fn) {
    find_units(target);
    int64_t skipped = 0;
    for (size_t i = skip(first - begin, &skipped); i < tensors_.size(); ++i) {
      const HeldTensor& held = tensors_[i];
      for (const Unit& unit : units_[size_t(held.held)]) {
        const int64_t at = begin + skipped;
        skipped += unit.bytes;
        if (at + unit.bytes > first && !fn(Step{held_[size_t(held.held)].tensor_class, held.tensors, unit, at})) return;
      }
    }
  }

 private:
  static constexpr size_t kMinStride = 64;

  struct HeldTensor {
    TensorPair tensors;
    int32_t held;  // position in held_
  };

  // The last marked tensor with at most this many bytes before it, and how many there are.
  size_t skip(int64_t bytes, int64_t* skipped) const;
  void find_units(int32_t target);

  const Problem& problem_;
  const std::vector<HeldClass>& held_;
  int32_t holders_;
  std::vector<HeldTensor> tensors_;  // ascending
  // Every so many tensors: how many of each held class come before. As many numbers as tensors, or a bit more.
  size_t stride_;
  std::vector<int32_t> counts_;
  // For the target at hand, as held_:
  int32_t target_ = -1;
  std::vector<std::vector<Unit>> units_;
  std::vector<int64_t> bytes_;  // of all units of one tensor
};

}  // namespace areal::reshard
