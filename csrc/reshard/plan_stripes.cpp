#include "reshard/plan_stripes.h"

#include <algorithm>
#include <iterator>

namespace areal::reshard {
namespace {

constexpr int64_t kMinStripeBytes = int64_t{64} << 10;  // smaller ones cost more in messages than they save in bytes

// The unit in which an intersection is cut into stripes: whole rows where there are enough of them, so that a stripe is
// one box.
int64_t stripe_step(const Box& box, int32_t stripes) {
  int64_t rows = 1, step = box.elements();
  for (int d = 0; d < box.dims && rows < stripes; ++d) {
    rows *= box.size[size_t(d)];
    step /= box.size[size_t(d)];
  }
  return step;
}

}  // namespace

void find_needer_groups(const Problem& problem, int32_t holders, int32_t needers, NeederGroups* groups) {
  const RankSet &held = problem.rank_set(holders), &needed = problem.rank_set(needers);
  groups->members.clear();
  groups->ends.clear();
  if (holders != needers) {
    std::set_difference(needed.begin(), needed.end(), held.begin(), held.end(), std::back_inserter(groups->members));
  }
  const RankSet& members = groups->members;
  for (size_t i = 0; i < members.size(); ++i) {
    const bool joins =
        problem.options.multicast && i > 0 && problem.ranks.node(members[i]) == problem.ranks.node(members[i - 1]);
    if (joins) {
      ++groups->ends.back();
    } else {
      groups->ends.push_back(int32_t(i + 1));
    }
  }
}

Membership membership_of(const Problem& problem, int32_t holders, int32_t needers, int32_t rank) {
  Membership result;
  if (!problem.options.multicast) return result;
  const RankSet &held = problem.rank_set(holders), &needed = problem.rank_set(needers);
  for (const int32_t needer : needed) {
    if (problem.ranks.node(needer) != problem.ranks.node(rank)) continue;
    if (std::binary_search(held.begin(), held.end(), needer)) continue;
    if (needer == rank) result.member = int32_t(result.group.size());
    result.group.push_back(needer);
  }
  result.members = int32_t(result.group.size());
  return result;
}

Unit unit_of(const Problem& problem, int32_t tensor_class, int32_t intersection, int32_t member, int32_t members) {
  const TensorClass& of = problem.tensor_class(tensor_class);
  const Intersection& common = of.refinement->intersections[size_t(intersection)];
  const int64_t bytes = common.elements * of.item_bytes;
  if (members == 1) return {intersection, 0, common.elements, bytes};
  // Few bytes go to some members only, by turns.
  const auto stripes = int32_t(std::clamp<int64_t>(bytes / kMinStripeBytes, 1, members));
  const int32_t stripe = (member + tensor_class + intersection) % members;
  if (stripe >= stripes) return {intersection, 0, 0, 0};
  const int64_t step = stripe_step(common.box, stripes), steps = common.elements / step;
  const int64_t begin = steps * stripe / stripes * step, end = steps * (stripe + 1) / stripes * step;
  return {intersection, begin, end, (end - begin) * of.item_bytes};
}

}  // namespace areal::reshard
