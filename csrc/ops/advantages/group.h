// One score per sequence from the rewards of its group: (r - baseline) / scale, whose parts are chosen independently.
//
//   baseline   none, or the mean of the group or of the batch, with or without the sequence itself
//   scale      1, or the standard deviation of the group or of the batch, or the mean
//
// A NaN reward is a failed sample: left out of every statistic, score 0. A set of equal rewards gives exactly 0.
// Statistics are in fp64, two passes, in the order of the members: no cancellation, no dependence on threads.
//
// Source: GRPO, arXiv:2402.03300, sec. 4.1.2; Dr.GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740, eq. 7.
#pragma once

#include <cstdint>

namespace areal::advantages {

enum class Level : int32_t { kNone = 0, kGroup = 1, kBatch = 2 };
enum class Singleton : int32_t { kZero = 0, kRaw = 1 };

struct GroupOptions {
  Level mean;
  Level std;
  bool leave_one_out;   // the baseline is the mean of the others
  bool divide_by_mean;  // scale = mean + eps
  int32_t ddof;         // 0 or 1: var = sum of squares / (n - ddof)
  double eps;
  bool eps_in_root;     // scale = sqrt(var + eps) instead of sqrt(var) + eps
  Singleton singleton;  // what a set of one reward gives: 0, or the reward itself
};

// Groups are runs of sorted_ids; order[i] is the sequence at sorted position i.
template <class Real>
struct GroupArgs {
  GroupOptions options;
  int64_t count;
  const Real* rewards;        // [count]
  const int64_t* sorted_ids;  // [count], non-decreasing
  const int64_t* order;       // [count], a permutation
  double* scores;             // [count]
};

void group_scores_cpu(const GroupArgs<float>& args);
void group_scores_cpu(const GroupArgs<double>& args);

}  // namespace areal::advantages

namespace areal::cuda {
// batch_scratch: kBatchScratchBytes of device memory, used when a level is kBatch. stream is a cudaStream_t; no
// synchronisation.
inline constexpr int64_t kBatchScratchBytes = 64;
void group_scores(const advantages::GroupArgs<float>& args, void* batch_scratch, void* stream);
void group_scores(const advantages::GroupArgs<double>& args, void* batch_scratch, void* stream);
}  // namespace areal::cuda
