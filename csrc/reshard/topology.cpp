#include "reshard/topology.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr double kMaxRate = 1e14;  // bytes/s: sums of rates and bytes times rates stay exact

void check_rate(const char* what, double rate) {
  AREAL_CHECK(std::isfinite(rate) && rate >= 1 && rate <= kMaxRate, "topology: expected ", what, " in [1, ", kMaxRate,
              "], got ", rate);
}

}  // namespace

double Topology::nic_of(int32_t rank) const {
  for (const RankLink& link : links) {
    if (link.rank == rank) return link.bytes_per_s;
  }
  return nic_bytes_per_s;
}

Topology canonical(Topology topology) {
  AREAL_CHECK(topology.ranks_per_node >= 1, "topology: expected ranks_per_node >= 1, got ", topology.ranks_per_node);
  check_rate("nic_bytes_per_s", topology.nic_bytes_per_s);
  check_rate("intra_node_bytes_per_s", topology.intra_node_bytes_per_s);
  std::sort(topology.links.begin(), topology.links.end(),
            [](const RankLink& a, const RankLink& b) { return a.rank < b.rank; });
  for (size_t i = 0; i < topology.links.size(); ++i) {
    const RankLink& link = topology.links[i];
    AREAL_CHECK(link.rank >= 0, "topology: expected links of ranks >= 0, got rank ", link.rank);
    AREAL_CHECK(i == 0 || topology.links[i - 1].rank != link.rank,
                "topology: expected one link a rank, got two of rank ", link.rank);
    if (link.bytes_per_s != 0) check_rate("bytes_per_s of a link", link.bytes_per_s);
  }
  return topology;
}

}  // namespace areal::reshard
