#include "reshard/plan.h"

#include <bit>
#include <utility>
#include <vector>

#include "base/check.h"
#include "reshard/plan_queues.h"
#include "reshard/plan_rank.h"
#include "reshard/plan_shares.h"
#include "reshard/plan_stats.h"
#include "reshard/xxh3.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMinChunkBytes = 64;  // any element fits
constexpr int64_t kMaxChunkBytes = int64_t{1} << 30;

uint64_t digest_of(const Problem& problem, const Queues& queues) {
  const Topology& topology = problem.topology;
  std::vector<int64_t> words = {static_cast<int64_t>(problem.source->digest()),
                                static_cast<int64_t>(problem.target->digest()),
                                topology.ranks_per_node,
                                std::bit_cast<int64_t>(topology.nic_bytes_per_s),
                                std::bit_cast<int64_t>(topology.intra_node_bytes_per_s),
                                problem.options.chunk_bytes,
                                int64_t{problem.options.multicast}};
  for (const RankLink& link : topology.links) {
    words.insert(words.end(), {link.rank, std::bit_cast<int64_t>(link.bytes_per_s)});
  }
  for (const Queue& queue : queues.queues) {
    words.insert(words.end(), {queue.node, queue.bytes, static_cast<int64_t>(queue.shares.size())});
    for (const Share& share : queue.shares) {
      words.insert(words.end(), {problem.ranks.rank(share.sender), share.begin});
    }
  }
  return xxh3_64(words.data(), words.size() * sizeof(int64_t));
}

class QueuePlan : public Plan {
 public:
  explicit QueuePlan(Problem problem) : problem_(std::move(problem)), queues_(make_queues(problem_)) {
    const Balance balance = assign_shares(problem_, &queues_);
    bound_ = make_lower_bound(problem_, queues_, balance);
    stats_ = make_stats(problem_, queues_, balance);
    digest_ = digest_of(problem_, queues_);
    shares_of_.resize(size_t(problem_.ranks.size()));
    for (size_t q = 0; q < queues_.queues.size(); ++q) {
      const std::vector<Share>& shares = queues_.queues[q].shares;
      for (size_t s = 0; s < shares.size(); ++s) {
        shares_of_[size_t(shares[s].sender)].push_back({int32_t(q), int32_t(s)});
      }
    }
  }

  const Layout& source() const override { return *problem_.source; }
  const Layout& target() const override { return *problem_.target; }
  const Topology& topology() const override { return problem_.topology; }
  const PlanOptions& options() const override { return problem_.options; }
  const PlanStats& stats() const override { return stats_; }
  const LowerBound& lower_bound() const override { return bound_; }
  uint64_t digest() const override { return digest_; }

  RankPlan rank(int32_t rank) const override {
    const int32_t position = problem_.ranks.position_of(rank);
    return make_rank_plan(problem_, queues_, shares_of_[size_t(position)], position);
  }

 private:
  Problem problem_;
  Queues queues_;
  LowerBound bound_;
  PlanStats stats_;
  uint64_t digest_ = 0;
  std::vector<std::vector<OwnShare>> shares_of_;  // per rank
};

}  // namespace

std::shared_ptr<const Plan> Plan::make(std::shared_ptr<const Layout> source, std::shared_ptr<const Layout> target,
                                       const Topology& topology, const PlanOptions& options) {
  AREAL_CHECK(source != nullptr && target != nullptr, "plan: expected two layouts, got none");
  AREAL_CHECK(options.chunk_bytes >= kMinChunkBytes && options.chunk_bytes <= kMaxChunkBytes,
              "plan: expected chunk_bytes in [", kMinChunkBytes, ", ", kMaxChunkBytes, "], got ", options.chunk_bytes);
  Topology checked = canonical(topology);
  RankTable ranks(*source, *target, checked);
  Classes classes = classify(*source, *target, ranks);
  return std::make_shared<QueuePlan>(
      Problem{std::move(source), std::move(target), std::move(checked), options, std::move(ranks), std::move(classes)});
}

}  // namespace areal::reshard
