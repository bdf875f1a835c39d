// One score per sequence from the rewards of its group: (r - baseline) / scale, whose parts are chosen independently.
//
//   baseline   none, or the mean of the group or of the batch, with or without the sequence itself, or the mean of the
//              group weighted by length
//   scale      1, or the standard deviation of the group or of the batch, or that of the others, or the mean
//
// A NaN reward is a failed sample: left out of every statistic, its score NaN. No other score is NaN: an infinite
// reward gives its group infinite scores. A set of equal rewards gives exactly 0. Statistics are in fp64, in two passes
// and by sums that no order of the members changes (exact_sum.h).
//
// Source: GRPO, arXiv:2402.03300, sec. 4.1.2; Dr.GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740, eq. 7; OPO,
// arXiv:2505.23585, eq. 8.
#pragma once

#include <cstdint>

namespace areal::advantages {

enum class Level : int32_t { kNone = 0, kGroup = 1, kBatch = 2 };
enum class Singleton : int32_t { kZero = 0, kRaw = 1 };

struct GroupOptions {
  Level mean;
  Level std;
  bool leave_one_out;      // the baseline is the mean of the others
  bool leave_one_out_std;  // with std = kGroup: that of the others; where they are equal, scale = 1
  bool length_weighted;    // with mean = kGroup
  bool divide_by_mean;     // scale = mean + eps
  int32_t ddof;            // 0 or 1: var = sum of squares / (n - ddof)
  double eps;
  bool eps_in_root;     // scale = sqrt(var + eps) instead of sqrt(var) + eps
  Singleton singleton;  // what a set of one reward gives: 0, or the reward itself
};

// Of the rewards of the whole batch that are not NaN.
struct BatchStatistics {
  double count, mean, squares, min, max;  // squares: sum of (r - mean)^2
};

// Groups are runs of sorted_ids; order[i] is the sequence at sorted position i.
template <class Real>
struct GroupArgs {
  GroupOptions options;
  int64_t count;
  const Real* rewards;           // [count]
  const double* lengths;         // [count], live tokens; may be nullptr when they are not needed
  const int64_t* sorted_ids;     // [count], non-decreasing
  const int64_t* order;          // [count], a permutation
  const BatchStatistics* batch;  // may be nullptr when no level is kBatch
  double* scores;                // [count]
  double* mean_lengths;          // [count], of the group; 1 where nobody has a token. nullptr: not wanted
  bool* has_signal;              // [count], whether the rewards of the group differ; false for failed samples. nullptr:
                                 // not wanted
};

void group_scores_cpu(const GroupArgs<float>& args);
void group_scores_cpu(const GroupArgs<double>& args);

// Of args.rewards, for callers whose batch is in one place (a batch that ranks share: see moments.h).
template <class Real>
BatchStatistics batch_statistics_cpu(const GroupArgs<Real>& args);

}  // namespace areal::advantages

namespace areal::cuda {
// stream is a cudaStream_t; no synchronisation.
void group_scores(const advantages::GroupArgs<float>& args, void* stream);
void group_scores(const advantages::GroupArgs<double>& args, void* stream);
template <class Real>
void batch_statistics(const advantages::GroupArgs<Real>& args, advantages::BatchStatistics* out, void* stream);
}  // namespace areal::cuda
