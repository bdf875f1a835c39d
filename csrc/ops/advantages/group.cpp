#include "ops/advantages/group.h"

#include "base/check.h"
#include "ops/advantages/group_math.h"

namespace areal::advantages {
namespace {

// Of the members order[begin, end).
template <class Real>
SetStatistics set_statistics(const GroupArgs<Real>& args, int64_t begin, int64_t end) {
  SetStatistics s;
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) add_reward(args.rewards[args.order[i]], s, sum);
  if (s.count > 0) s.mean = sum / static_cast<double>(s.count);
  for (int64_t i = begin; i < end; ++i) add_square(args.rewards[args.order[i]], s);
  return s;
}

template <class Real>
void run(const GroupArgs<Real>& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    AREAL_CHECK(args.order[i] >= 0 && args.order[i] < args.count, "group_scores: expected order in [0, ", args.count,
                "), got ", args.order[i]);
  }
  const SetStatistics batch = set_statistics(args, 0, args.count);
  for (int64_t begin = 0, end = 0; begin < args.count; begin = end) {
    while (end < args.count && args.sorted_ids[end] == args.sorted_ids[begin]) ++end;
    const SetStatistics group = set_statistics(args, begin, end);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t s = args.order[i];
      args.scores[s] = score(static_cast<double>(args.rewards[s]), group, batch, args.options);
    }
  }
}

}  // namespace

void group_scores_cpu(const GroupArgs<float>& args) { run(args); }
void group_scores_cpu(const GroupArgs<double>& args) { run(args); }

}  // namespace areal::advantages
