#include "ops/advantages/best_of.h"

#include "base/check.h"
#include "ops/advantages/best_of_math.h"

namespace areal::advantages {

template <class Real>
void best_of_scores_cpu(const BestOfArgs<Real>& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    AREAL_CHECK(args.order[i] >= 0 && args.order[i] < args.count, "best_of_scores: expected order in [0, ", args.count,
                "), got ", args.order[i]);
  }
  for (int64_t begin = 0, end = 0; begin < args.count; begin = end) {
    while (end < args.count && args.sorted_ids[end] == args.sorted_ids[begin]) ++end;
    score_group(args, begin, end);
  }
}

template void best_of_scores_cpu(const BestOfArgs<float>&);
template void best_of_scores_cpu(const BestOfArgs<double>&);

}  // namespace areal::advantages
