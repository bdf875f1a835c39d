#include "reshard/plan_shares.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "reshard/max_flow.h"

namespace areal::reshard {
namespace {

// A share ends at most this part of itself away from what the flow gave it, so that cuts fall on whole rows or tensors.
constexpr int64_t kTolerance = 128;

// Per queue: the holders that are in the node of its targets, and the others. Unreachable ones are left out.
struct Senders {
  std::vector<int32_t> within, over_nic;
};

std::vector<Senders> senders_of(const Problem& problem, const Queues& queues) {
  std::vector<Senders> result;
  for (const Queue& queue : queues.queues) {
    Senders& senders = result.emplace_back();
    for (const int32_t holder : problem.rank_set(queue.holders)) {
      if (!problem.ranks.reachable(holder)) continue;
      (problem.ranks.node(holder) == queue.node ? senders.within : senders.over_nic).push_back(holder);
    }
  }
  return result;
}

// Hands out what each of several senders is to send, in their order.
class Quotas {
 public:
  Quotas(const std::vector<int32_t>& senders, const std::vector<int64_t>& bytes) : senders_(senders), left_(bytes) {}

  // Appends shares for the next bytes of the queue, which begin at *at.
  void append(int64_t bytes, int64_t* at, std::vector<Share>* shares) {
    for (; bytes > 0; next_ += left_[next_] == 0) {
      const int64_t taken = std::min(bytes, left_[next_]);
      if (taken > 0 && (shares->empty() || shares->back().sender != senders_[next_])) {
        shares->push_back({senders_[next_], *at});
      }
      left_[next_] -= taken;
      bytes -= taken;
      *at += taken;
    }
  }

 private:
  const std::vector<int32_t>& senders_;
  std::vector<int64_t> left_;
  size_t next_ = 0;
};

// Where a queue needs both kinds of links, every target gets its part over both, or some would hear from NICs alone.
void append_shares(Quotas within, int64_t within_bytes, Quotas over_nic, Queue* queue) {
  int64_t given = 0, at = 0;  // of within_bytes; of the queue
  for (size_t t = 0; t < queue->targets.size(); ++t) {
    const int64_t end = queue->end_of_target(t);
    const auto until = int64_t(Wide{within_bytes} * end / queue->bytes);
    within.append(until - given, &at, &queue->shares);
    over_nic.append(end - at, &at, &queue->shares);
    given = until;
  }
}

// The byte nearest to `wanted` at which the step's unit may be cut; its own ends are the best places.
int64_t cut_near(const Problem& problem, const QueueWalk::Step& step, int64_t wanted, int64_t tolerance) {
  const int64_t end = step.begin + step.unit.bytes;
  if (wanted - step.begin <= tolerance) return step.begin;
  if (end - wanted <= tolerance) return end;
  const TensorClass& of = problem.tensor_class(step.tensor_class);
  const Box& box = of.refinement->intersections[size_t(step.unit.intersection)].box;
  int64_t rows = box.elements();  // elements of the largest slices that are within the tolerance
  for (int d = 0; d < box.dims && rows * of.item_bytes > tolerance; ++d) rows /= box.size[size_t(d)];
  const int64_t element = step.unit.begin + (wanted - step.begin) / of.item_bytes;
  const int64_t nearest = std::clamp((element + rows / 2) / rows * rows, step.unit.begin, step.unit.end);
  return step.begin + (nearest - step.unit.begin) * of.item_bytes;
}

void move_ends_to_cuts(const Problem& problem, QueueWalk* walk, Queue* queue) {
  int64_t before = 0;  // where the previous share began
  std::vector<Share> moved = queue->shares;
  for (size_t s = 1; s < moved.size(); ++s) {
    const int64_t wanted = queue->shares[s].begin;
    const int64_t tolerance = std::min(wanted - before, queue->end_of_share(s) - wanted) / kTolerance;
    const auto next = std::upper_bound(queue->targets.begin(), queue->targets.end(), wanted,
                                       [](int64_t at, const QueueTarget& target) { return at < target.begin; });
    const QueueTarget& target = *std::prev(next);
    walk->run(target.rank, target.begin, wanted, [&](const QueueWalk::Step& step) {
      moved[s].begin = cut_near(problem, step, wanted, tolerance);
      return false;
    });
    AREAL_CHECK(moved[s].begin >= moved[s - 1].begin, "plan: expected shares in order");  // cuts move less than a share
    before = wanted;
  }
  queue->shares.clear();
  for (size_t s = 0; s < moved.size(); ++s) {
    const int64_t end = s + 1 < moved.size() ? moved[s + 1].begin : queue->bytes;
    if (end > moved[s].begin) queue->shares.push_back(moved[s]);
  }
}

}  // namespace

Balance assign_shares(const Problem& problem, Queues* queues) {
  const int32_t ranks = problem.ranks.size();
  std::vector<int64_t> nic_rates, node_rates(size_t(ranks), problem.ranks.node_rate());
  for (int32_t i = 0; i < ranks; ++i) nic_rates.push_back(std::max<int64_t>(1, problem.ranks.nic_rate(i)));
  const std::vector<Senders> senders = senders_of(problem, *queues);

  // Both kinds of links together: links [0, ranks) are NICs, the others lead within nodes.
  std::vector<int64_t> rates = nic_rates;
  rates.insert(rates.end(), node_rates.begin(), node_rates.end());
  std::vector<Demand> demands;
  for (size_t q = 0; q < senders.size(); ++q) {
    demands.push_back({queues->queues[q].bytes, senders[q].over_nic});
    for (const int32_t sender : senders[q].within) demands.back().links.push_back(ranks + sender);
  }
  Balance balance;
  balance.egress = tightest_set(demands, rates);
  const std::vector<int64_t> within = serve_preferred(demands, ranks, rates, balance.egress);

  std::vector<Demand> over_nic, within_node;
  for (size_t q = 0; q < senders.size(); ++q) {
    over_nic.push_back({queues->queues[q].bytes - within[q], senders[q].over_nic});
    within_node.push_back({within[q], senders[q].within});
  }
  Service nic = serve(over_nic, nic_rates), node = serve(within_node, node_rates);
  balance.nic_group = std::move(nic.group_of_link);
  balance.node_group = std::move(node.group_of_link);

  std::optional<QueueWalk> walk;
  for (size_t q = 0; q < senders.size(); ++q) {
    Queue& queue = queues->queues[q];
    append_shares(Quotas(senders[q].within, node.bytes[q]), within[q], Quotas(senders[q].over_nic, nic.bytes[q]),
                  &queue);
    if (q == 0 || queues->queues[q - 1].holders != queue.holders) walk.reset();
    if (queue.shares.size() < 2) continue;
    if (!walk) walk.emplace(problem, *queues, queue.holders);
    move_ends_to_cuts(problem, &*walk, &queue);
  }
  return balance;
}

}  // namespace areal::reshard
