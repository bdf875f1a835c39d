// Who sends how much, in exact integers: demands that any of several links may serve, and the way to serve them that
// loads the most loaded link least.
//
// A set A of demands can be served in T seconds only if bytes(A) <= T rate(links of A). The largest such ratio over all
// sets is the least T (max-flow, min-cut). It is found as Dinkelbach does: the minimum cut at a T that is too small
// names a set of larger ratio, until the flow fits. The cut is the proof that no plan beats T.
// Source: W. Dinkelbach, On nonlinear fractional programming (1967); Megiddo, Optimal flows in networks with multiple
// sources and sinks (1974), for the lexicographic order.
#pragma once

#include <cstdint>
#include <vector>

namespace areal::reshard {

struct Demand {
  int64_t bytes;               // >= 0
  std::vector<int32_t> links;  // positions of the links that can serve it: ascending; one at least if bytes > 0
};

// Seconds as a ratio of integers.
struct Tightness {
  int64_t bytes = 0;  // of the demands of the tightest set
  int64_t rate = 1;   // of all links that can serve any of them, bytes/s

  double seconds() const { return double(bytes) / double(rate); }
};
bool operator<(const Tightness& a, const Tightness& b);

// The least time in which all demands can be served. rates: bytes/s of each link, >= 1, their sum within int64.
Tightness tightest_set(const std::vector<Demand>& demands, const std::vector<int64_t>& rates);

struct Service {
  std::vector<std::vector<int64_t>> bytes;  // of demand k over its i-th link; each demand's sum to its bytes
  // Links of equal group (>= 0) serve the same tightest set, each for the same time; -1: the link has nothing to do.
  std::vector<int32_t> group_of_link;
};

// Serves all demands so that link loads (bytes / rate), sorted from the largest, are lexicographically least: the
// tightest set first, then what is left. Rounding moves less than one byte per demand and link.
Service serve(const std::vector<Demand>& demands, const std::vector<int64_t>& rates);

// Of each demand, bytes that links from first_preferred on can take when no link may be loaded longer than `limit` (at
// least tightest_set's), as many in all as possible. Rounded up.
std::vector<int64_t> serve_preferred(const std::vector<Demand>& demands, int32_t first_preferred,
                                     const std::vector<int64_t>& rates, const Tightness& limit);

}  // namespace areal::reshard
