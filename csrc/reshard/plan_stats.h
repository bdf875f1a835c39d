// What a plan costs, and what no plan can beat.
#pragma once

#include "reshard/plan.h"
#include "reshard/plan_queues.h"
#include "reshard/plan_shares.h"

namespace areal::reshard {

LowerBound make_lower_bound(const Problem& problem, const Queues& queues, const Balance& balance);
PlanStats make_stats(const Problem& problem, const Queues& queues, const Balance& balance);

}  // namespace areal::reshard
