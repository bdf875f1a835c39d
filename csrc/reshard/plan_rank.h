// One rank's part of a plan, made from the queues.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/plan.h"
#include "reshard/plan_queues.h"

namespace areal::reshard {

// A share of a queue, found from its sender.
struct OwnShare {
  int32_t queue;
  int32_t share;
};

// rank: position in the RankTable. own: its shares, ascending.
RankPlan make_rank_plan(const Problem& problem, const Queues& queues, const std::vector<OwnShare>& own, int32_t rank);

}  // namespace areal::reshard
