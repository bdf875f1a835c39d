// Levelling by swaps. It takes the last tokens of difference from what largest differencing found; where that works
// under equal sizes it takes nearly all, as differencing then starts from whole rounds of one sequence a bin, which
// leaves it too few choices: 4,096 log-normal lengths over 64 bins end 7,898 tokens apart, and 6 after these swaps.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/packing/allocation.h"

namespace areal {
namespace {

struct Swap {
  size_t from_fullest = 0, from_emptiest = 0;  // positions in the two bins
  double moved = 0;                            // cost that leaves the fullest bin; 0: no swap helps
};

class Levels {
 public:
  Levels(Bins& bins, std::span<const double> costs) : bins_(bins), costs_(costs) {
    for (auto& bin : bins_) {
      std::stable_sort(bin.begin(), bin.end(), [&](int64_t a, int64_t b) { return costs_[a] < costs_[b]; });
      loads_.push_back(
          std::accumulate(bin.begin(), bin.end(), 0.0, [&](double sum, int64_t i) { return sum + costs_[i]; }));
    }
  }

  // One swap between the bins that are furthest apart; false when none brings them closer.
  bool improve() {
    const auto [low, high] = std::minmax_element(loads_.begin(), loads_.end());
    auto &full = bins_[high - loads_.begin()], &empty = bins_[low - loads_.begin()];
    const Swap best = best_swap(full, empty, *high - *low);
    if (best.moved == 0) return false;
    std::swap(full[best.from_fullest], empty[best.from_emptiest]);
    *high -= best.moved;
    *low += best.moved;
    restore_order(full, best.from_fullest);
    restore_order(empty, best.from_emptiest);
    return true;
  }

 private:
  // The pair whose difference is closest to half the gap: both bins would then be alike. Any difference between 0 and
  // the gap brings them closer, so the sum of squares of all loads falls and the swaps come to an end.
  Swap best_swap(const std::vector<int64_t>& full, const std::vector<int64_t>& empty, double gap) const {
    Swap best;
    double least = std::numeric_limits<double>::infinity();
    size_t j = 0;
    for (size_t i = 0; i < full.size(); ++i) {
      // The last one in `empty` that is at least half a gap cheaper, and its neighbour: the closest on either side.
      while (j < empty.size() && costs_[full[i]] - costs_[empty[j]] >= gap / 2) ++j;
      for (const size_t candidate : {j - 1, j}) {
        if (candidate >= empty.size()) continue;  // j - 1 of 0 too
        const double moved = costs_[full[i]] - costs_[empty[candidate]], off = std::abs(moved - gap / 2);
        if (moved > 0 && moved < gap && off < least) {
          least = off;
          best = {i, candidate, moved};
        }
      }
    }
    return best;
  }

  void restore_order(std::vector<int64_t>& bin, size_t at) const {
    for (; at > 0 && costs_[bin[at]] < costs_[bin[at - 1]]; --at) std::swap(bin[at], bin[at - 1]);
    for (; at + 1 < bin.size() && costs_[bin[at + 1]] < costs_[bin[at]]; ++at) std::swap(bin[at], bin[at + 1]);
  }

  Bins& bins_;
  std::span<const double> costs_;
  std::vector<double> loads_;
};

}  // namespace

void level_by_swaps(Bins& bins, std::span<const double> costs) {
  if (bins.size() < 2) return;
  // Rounding of huge costs could let two swaps undo each other: a bound that no list of lengths comes near.
  const size_t most = 64 * (bins.size() + 16);
  Levels levels(bins, costs);
  for (size_t done = 0; done < most && levels.improve(); ++done) {
  }
  sort_within(bins, costs.size());
}

}  // namespace areal
