// Which holder sends how much of each queue.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/flow.h"
#include "reshard/plan_queues.h"

namespace areal::reshard {

// What the flow found out.
struct Balance {
  Tightness egress;  // the least time in which any plan can get the bytes out of their holders
  // Per rank: ranks of equal group (>= 0) send the same tightest set of bytes, over their NICs or within their nodes.
  std::vector<int32_t> nic_group, node_group;
};

// Fills the shares of all queues: the most loaded sender as light as possible, then bytes within nodes before bytes
// over NICs, then the other senders as even as their holdings allow. Shares end where a box can be cut.
Balance assign_shares(const Problem& problem, Queues* queues);

}  // namespace areal::reshard
