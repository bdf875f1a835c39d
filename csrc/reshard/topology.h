// Which ranks share a node, and how fast bytes leave and reach them.
#pragma once

#include <cstdint>
#include <vector>

namespace areal::reshard {

struct RankLink {
  int32_t rank;
  double bytes_per_s;  // replaces Topology::nic_bytes_per_s; 0: unreachable, nothing may be sent from it or to it

  bool operator==(const RankLink&) const = default;
};

struct Topology {
  int32_t ranks_per_node = 8;             // rank r lives on node r / ranks_per_node
  double nic_bytes_per_s = 50e9;          // each way, of one rank (a GPU's own NIC)
  double intra_node_bytes_per_s = 200e9;  // each way, of one rank, within its node
  std::vector<RankLink> links;            // exceptions: a slow NIC, a dead replica

  int32_t node_of(int32_t rank) const { return rank / ranks_per_node; }
  double nic_of(int32_t rank) const;
  bool operator==(const Topology&) const = default;
};

// The same topology with its links sorted by rank. Throws areal::Error for rates outside [1, 1e14] bytes/s (a link's
// may be 0), nodes without ranks, and ranks with two links.
Topology canonical(Topology topology);

}  // namespace areal::reshard
