#include "ops/advantages/group.h"

#include "base/check.h"
#include "ops/advantages/group_math.h"

namespace areal::advantages {
namespace {

// Of the members order[begin, end).
template <class Real>
GroupStatistics group_statistics(const GroupArgs<Real>& args, int64_t begin, int64_t end) {
  GroupStatistics g;
  for (int64_t i = begin; i < end; ++i) g.extent = merge(g.extent, extent_of(member_at(args, i)));
  RewardSums sums;
  const RewardGrids grids = reward_grids(g.extent);
  for (int64_t i = begin; i < end; ++i) add(member_at(args, i), grids, sums);
  g.mean = sums.plain.value() / g.extent.count;
  g.weighted_mean = sums.weighted.value() / g.extent.length;
  ExactSum squares;
  const SumGrid grid = square_grid(g.extent.min, g.extent.max, g.extent.count);
  for (int64_t i = begin; i < end; ++i) add_square(member_at(args, i).reward, g.mean, grid, squares);
  g.squares = squares.value();
  return g;
}

template <class Real>
void run(const GroupArgs<Real>& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    AREAL_CHECK(args.order[i] >= 0 && args.order[i] < args.count, "group_scores: expected order in [0, ", args.count,
                "), got ", args.order[i]);
  }
  const BatchStatistics batch = args.batch != nullptr ? *args.batch : BatchStatistics{};
  for (int64_t begin = 0, end = 0; begin < args.count; begin = end) {
    while (end < args.count && args.sorted_ids[end] == args.sorted_ids[begin]) ++end;
    const GroupStatistics group = group_statistics(args, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = args.order[i];
      const double reward = static_cast<double>(args.rewards[s]);
      args.scores[s] = score(reward, group, batch, args.options);
      if (args.has_signal != nullptr) args.has_signal[s] = has_signal(reward, group);
      if (args.mean_lengths != nullptr) args.mean_lengths[s] = mean_length(group);
    }
  }
}

}  // namespace

void group_scores_cpu(const GroupArgs<float>& args) { run(args); }
void group_scores_cpu(const GroupArgs<double>& args) { run(args); }

template <class Real>
BatchStatistics batch_statistics_cpu(const GroupArgs<Real>& args) {
  return as_batch(group_statistics(args, 0, args.count));
}
template BatchStatistics batch_statistics_cpu(const GroupArgs<float>&);
template BatchStatistics batch_statistics_cpu(const GroupArgs<double>&);

}  // namespace areal::advantages
