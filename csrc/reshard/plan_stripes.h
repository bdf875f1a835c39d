// Which ranks get an atom together, and which part of it each is sent first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "reshard/plan_classes.h"

namespace areal::reshard {

// The needers of a set that do not hold what they need, by groups that complete each other's stripes: one by one, or in
// a multicast plan all those of a node together.
struct NeederGroups {
  RankSet members;            // ascending
  std::vector<int32_t> ends;  // of each group in members

  size_t size() const { return ends.size(); }
  std::span<const int32_t> group(size_t i) const {
    const int32_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(members).subspan(size_t(begin), size_t(ends[i] - begin));
  }
};
// holders, needers: positions in Classes::rank_sets. Reuses the memory of `groups`.
void find_needer_groups(const Problem& problem, int32_t holders, int32_t needers, NeederGroups* groups);

// The group of one needer that is no holder, and its place there.
struct Membership {
  int32_t member = 0, members = 1;
  RankSet group;  // empty where it is alone
};
Membership membership_of(const Problem& problem, int32_t holders, int32_t needers, int32_t rank);

// The part of an intersection that one member of a group is sent: all of it, or its stripe.
struct Unit {
  int32_t intersection;
  int64_t begin, end;  // elements, row-major in the intersection's box; equal where others bring all of it
  int64_t bytes;
};
Unit unit_of(const Problem& problem, int32_t tensor_class, int32_t intersection, int32_t member, int32_t members);

}  // namespace areal::reshard
