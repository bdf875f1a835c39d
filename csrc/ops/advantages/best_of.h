// Scores for the best of k samples (pass@k): how a sequence changes the expected best reward of k drawn from its group.
//
//   score_j = (E[max over k-subsets with j] - E[max over k-subsets]) / scale
//   scale     1, or the standard deviation of the max over all k-subsets
//
// In closed form over the sorted rewards, without drawing subsets. A NaN reward is a failed sample: left out, its score
// NaN. Groups of fewer than k, and those whose k-subsets all have the same best, give exactly 0.
//
// Source: arXiv:2508.10751, eq. 10 to 15, whose rewards are 0 or 1; any rewards: arXiv:2505.15201.
#pragma once

#include <cstdint>

namespace areal::advantages {

struct BestOfOptions {
  int64_t k;  // >= 1
  bool divide_by_std;
  double eps;
  bool eps_in_root;    // sqrt(var + eps) instead of sqrt(var) + eps
  bool singleton_raw;  // a group of one gives its reward instead of 0
};

// Groups are runs of sorted_ids; order[i] is the sequence at sorted position i. Within a group rewards do not decrease,
// NaN last.
template <class Real>
struct BestOfArgs {
  BestOfOptions options;
  int64_t count;
  const Real* rewards;        // [count]
  const int64_t* sorted_ids;  // [count], non-decreasing
  const int64_t* order;       // [count], a permutation
  double* scores;             // [count]
};

template <class Real>
void best_of_scores_cpu(const BestOfArgs<Real>& args);

}  // namespace areal::advantages

namespace areal::cuda {
// stream is a cudaStream_t; no synchronisation.
template <class Real>
void best_of_scores(const advantages::BestOfArgs<Real>& args, void* stream);
}  // namespace areal::cuda
