#include "reshard/plan_stats.h"

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_set>
#include <vector>

namespace areal::reshard {
namespace {

struct Traffic {
  int64_t nic_out = 0, nic_in = 0, node_out = 0, node_in = 0;  // bytes in phase 0
};

// Calls fn(queue, sender, target, bytes) wherever a share meets a target.
template <class Fn>
void for_each_transfer(const Queues& queues, const Fn& fn) {
  for (const Queue& queue : queues.queues) {
    size_t share = 0;
    for (size_t t = 0; t < queue.targets.size(); ++t) {
      const int64_t end = queue.end_of_target(t);
      for (int64_t at = queue.targets[t].begin; at < end;) {
        while (queue.end_of_share(share) <= at) ++share;
        const int64_t until = std::min(end, queue.end_of_share(share));
        fn(queue, queue.shares[share].sender, queue.targets[t].rank, until - at);
        at = until;
      }
    }
  }
}

std::vector<Traffic> measure_traffic(const Problem& problem, const Queues& queues) {
  std::vector<Traffic> traffic(size_t(problem.ranks.size()));
  for_each_transfer(queues, [&](const Queue&, int32_t sender, int32_t target, int64_t bytes) {
    Traffic &from = traffic[size_t(sender)], &to = traffic[size_t(target)];
    const bool within = problem.ranks.node(sender) == problem.ranks.node(target);
    (within ? from.node_out : from.nic_out) += bytes;
    (within ? to.node_in : to.nic_in) += bytes;
  });
  return traffic;
}

// Pairs of ranks with something to say, both phases.
int64_t count_messages(const Problem& problem, const Queues& queues) {
  const auto ranks = size_t(problem.ranks.size());
  std::vector<bool> sends(ranks * ranks);
  for_each_transfer(queues, [&](const Queue&, int32_t sender, int32_t target, int64_t) {
    sends[size_t(sender) * ranks + size_t(target)] = true;
  });
  int64_t count = std::count(sends.begin(), sends.end(), true);
  if (!problem.options.multicast) return count;
  // Phase 1: who got a stripe of anything passes it on to the others of the group.
  std::fill(sends.begin(), sends.end(), false);
  NeederGroups groups;
  for (int32_t c = 0; c < int32_t(problem.classes.classes.size()); ++c) {
    const TensorClass& of = problem.tensor_class(c);
    for (const GroupPair& pair : of.refinement->pairs) {
      find_needer_groups(problem, of.holders[size_t(pair.source_group)], of.needers[size_t(pair.target_group)],
                         &groups);
      for (size_t g = 0; g < groups.size(); ++g) {
        const std::span<const int32_t> group = groups.group(g);
        for (size_t m = 0; m < group.size(); ++m) {
          bool gets_any = false;
          for (int32_t i = pair.first; i < pair.first + pair.count && !gets_any; ++i) {
            const int32_t intersection = of.refinement->by_pair[size_t(i)];
            gets_any = unit_of(problem, c, intersection, int32_t(m), int32_t(group.size())).bytes > 0;
          }
          for (size_t other = 0; gets_any && other < group.size(); ++other) {
            if (other != m) sends[size_t(group[m]) * ranks + size_t(group[other])] = true;
          }
        }
      }
    }
  }
  return count + std::count(sends.begin(), sends.end(), true);
}

// The most seconds of a rank over the mean of those it shares its holdings with; 1 where nothing is sent.
double worst_imbalance(const std::vector<int32_t>& groups, const std::function<int64_t(size_t)>& bytes_of,
                       const std::function<int64_t(size_t)>& rate_of) {
  struct Group {
    double most = 0, bytes = 0, rate = 0;
  };
  std::map<int32_t, Group> by_id;
  for (size_t rank = 0; rank < groups.size(); ++rank) {
    if (groups[rank] < 0) continue;
    Group& group = by_id[groups[rank]];
    const auto bytes = double(bytes_of(rank)), rate = double(rate_of(rank));
    group.most = std::max(group.most, bytes / rate);
    group.bytes += bytes;
    group.rate += rate;
  }
  double worst = 1;
  for (const auto& [id, group] : by_id) {
    if (group.bytes > 0) worst = std::max(worst, group.most / (group.bytes / group.rate));
  }
  return worst;
}

double seconds_of(int64_t bytes, int64_t rate) { return bytes == 0 ? 0 : double(bytes) / double(rate); }

}  // namespace

LowerBound make_lower_bound(const Problem& problem, const Queues& queues, const Balance& balance) {
  LowerBound bound;
  const RankTable& ranks = problem.ranks;
  for (int32_t i = 0; i < ranks.size(); ++i) {
    const RankNeeds& needs = queues.needs[size_t(i)];
    bound.wire_bytes += needs.bytes;
    // In a multicast plan bytes from afar may have crossed another rank's NIC.
    const double over_nic = problem.options.multicast ? 0 : seconds_of(needs.far_bytes, ranks.nic_rate(i));
    bound.ingress_seconds = std::max({bound.ingress_seconds, over_nic, seconds_of(needs.near_bytes, ranks.node_rate()),
                                      seconds_of(needs.bytes, ranks.nic_rate(i) + ranks.node_rate())});
  }
  std::map<int32_t, int64_t> rate_of_node, bytes_of_node;
  for (int32_t i = 0; i < ranks.size(); ++i) rate_of_node[ranks.node(i)] += ranks.nic_rate(i);
  for (const Queue& queue : queues.queues) {
    if (queue.node >= 0) continue;
    bound.nic_bytes += queue.bytes;
    for (size_t t = 0; t < queue.targets.size(); ++t) {
      bytes_of_node[ranks.node(queue.targets[t].rank)] += queue.end_of_target(t) - queue.targets[t].begin;
    }
  }
  for (const auto& [node, bytes] : bytes_of_node) {
    bound.node_seconds = std::max(bound.node_seconds, seconds_of(bytes, rate_of_node[node]));
  }
  bound.egress_seconds = balance.egress.seconds();
  bound.seconds = std::max({bound.ingress_seconds, bound.node_seconds, bound.egress_seconds});
  return bound;
}

PlanStats make_stats(const Problem& problem, const Queues& queues, const Balance& balance) {
  PlanStats stats;
  const RankTable& ranks = problem.ranks;
  const std::vector<Traffic> traffic = measure_traffic(problem, queues);
  std::vector<bool> can_send(traffic.size());
  for (const Queue& queue : queues.queues) {
    for (const int32_t holder : problem.rank_set(queue.holders)) can_send[size_t(holder)] = ranks.reachable(holder);
  }
  double first_phase = 0, second_phase = 0;
  for (int32_t i = 0; i < ranks.size(); ++i) {
    const Traffic& of = traffic[size_t(i)];
    const RankNeeds& needs = queues.needs[size_t(i)];
    const int64_t completed = needs.bytes - of.nic_in - of.node_in;
    stats.wire_bytes += of.nic_out + of.node_out + needs.passed_on_bytes;
    stats.nic_bytes += of.nic_out;
    stats.max_received_bytes = std::max(stats.max_received_bytes, needs.bytes);
    if (can_send[size_t(i)]) stats.senders.push_back({ranks.rank(i), of.nic_out + of.node_out, of.nic_out});
    first_phase = std::max({first_phase, seconds_of(std::max(of.nic_out, of.nic_in), ranks.nic_rate(i)),
                            seconds_of(std::max(of.node_out, of.node_in), ranks.node_rate())});
    second_phase = std::max(second_phase, seconds_of(std::max(needs.passed_on_bytes, completed), ranks.node_rate()));
  }
  stats.seconds = first_phase + second_phase;
  stats.local_bytes = queues.local_bytes;
  stats.messages = count_messages(problem, queues);
  stats.unused_source_tensors = problem.classes.unused_source_tensors;
  const auto nic_out = [&](size_t i) { return traffic[i].nic_out; };
  const auto node_out = [&](size_t i) { return traffic[i].node_out; };
  stats.sender_max_over_mean =
      std::max(worst_imbalance(balance.nic_group, nic_out, [&](size_t i) { return ranks.nic_rate(int32_t(i)); }),
               worst_imbalance(balance.node_group, node_out, [&](size_t) { return ranks.node_rate(); }));
  return stats;
}

}  // namespace areal::reshard
