#include "ops/packing/allocation.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "base/check.h"

namespace areal {
namespace {

// Free tokens per bin, with "the first bin that has room" in O(log n): a max segment tree over the bins.
class FirstFit {
 public:
  FirstFit(int64_t max_bins, int64_t free_tokens) {
    while (leaves_ < max_bins) leaves_ *= 2;
    free_.assign(2 * leaves_, free_tokens);
  }
  // Takes `tokens` from the first bin with room and returns its index. One bin must have room.
  int64_t place(int64_t tokens) {
    int64_t node = 1;
    while (node < leaves_) node = free_[2 * node] >= tokens ? 2 * node : 2 * node + 1;
    const int64_t bin = node - leaves_;
    free_[node] -= tokens;
    while (node /= 2) free_[node] = std::max(free_[2 * node], free_[2 * node + 1]);
    return bin;
  }

 private:
  int64_t leaves_ = 1;
  std::vector<int64_t> free_;  // heap order: children of i are 2i and 2i+1; the leaves come last
};

int64_t rounded_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void check_options(std::span<const int64_t> lengths, const AllocateOptions& options) {
  constexpr const char* op = "allocate_microbatches";
  AREAL_CHECK(options.max_tokens >= 1, op, ": expected max_tokens >= 1, got ", options.max_tokens);
  AREAL_CHECK(options.min_bins >= 1, op, ": expected min_bins >= 1, got ", options.min_bins);
  AREAL_CHECK(options.multiple_of >= 1, op, ": expected multiple_of >= 1, got ", options.multiple_of);
  for (size_t i = 0; i < lengths.size(); ++i) {
    AREAL_CHECK(lengths[i] >= 0, op, ": expected lengths >= 0, got lengths[", i, "] = ", lengths[i]);
    AREAL_CHECK(options.oversized_alone || lengths[i] <= options.max_tokens, op,
                ": expected lengths <= max_tokens = ", options.max_tokens, ", got lengths[", i, "] = ", lengths[i]);
  }
}

}  // namespace

std::vector<int64_t> longest_first(std::span<const int64_t> lengths) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  return order;
}

Bins first_fit_decreasing(std::span<const int64_t> lengths, std::span<const int64_t> order, int64_t max_tokens) {
  // Two neighbouring bins hold more than max_tokens together, so 2 * total / max_tokens + 1 bins are enough.
  double total = 0;
  for (const int64_t i : order) total += static_cast<double>(lengths[i]);
  const double bound = 2 * total / static_cast<double>(max_tokens) + 2;
  const int64_t max_bins = static_cast<int64_t>(std::min(bound, static_cast<double>(order.size())));
  FirstFit tree(std::max<int64_t>(max_bins, 1), max_tokens);
  Bins bins;
  for (const int64_t i : order) {
    const size_t bin = static_cast<size_t>(tree.place(lengths[i]));
    if (bin >= bins.size()) bins.resize(bin + 1);
    bins[bin].push_back(i);
  }
  return bins;
}

void split_fullest(Bins& result, int64_t bins) {
  using Entry = std::pair<int64_t, int64_t>;  // (number of sequences, -index): the lowest index first among equals
  std::priority_queue<Entry> fullest;
  for (size_t b = 0; b < result.size(); ++b) fullest.emplace(result[b].size(), -static_cast<int64_t>(b));
  while (static_cast<int64_t>(result.size()) < bins) {
    const size_t from = static_cast<size_t>(-fullest.top().second);
    fullest.pop();
    std::vector<int64_t> kept, moved;  // every other one, so that both halves get long and short sequences
    for (size_t i = 0; i < result[from].size(); ++i) (i % 2 == 0 ? kept : moved).push_back(result[from][i]);
    fullest.emplace(kept.size(), -static_cast<int64_t>(from));
    fullest.emplace(moved.size(), -static_cast<int64_t>(result.size()));
    result[from] = std::move(kept);
    result.push_back(std::move(moved));
  }
}

int64_t max_load(const Bins& bins, std::span<const int64_t> lengths) {
  int64_t most = 0;
  for (const auto& bin : bins) {
    int64_t tokens = 0;
    for (const int64_t i : bin) tokens += lengths[i];
    most = std::max(most, tokens);
  }
  return most;
}

Bins allocate_microbatches(std::span<const int64_t> lengths, const AllocateOptions& options) {
  check_options(lengths, options);
  const std::vector<int64_t> order = longest_first(lengths);
  size_t oversized = 0;
  while (oversized < order.size() && lengths[order[oversized]] > options.max_tokens) ++oversized;
  const auto packable = std::span(order).subspan(oversized);

  Bins packed = options.method == PackMethod::kMffd
                    ? modified_first_fit_decreasing(lengths, packable, options.max_tokens)
                    : first_fit_decreasing(lengths, packable, options.max_tokens);
  const int64_t alone = static_cast<int64_t>(oversized), found = alone + static_cast<int64_t>(packed.size());
  const int64_t wanted = rounded_up(std::max(found, options.min_bins), options.multiple_of);
  const bool nothing_to_do = lengths.empty() && options.min_bins == 1;
  if (nothing_to_do) return {};
  AREAL_CHECK(wanted <= static_cast<int64_t>(lengths.size()), "allocate_microbatches: expected at least ", wanted,
              " sequences (min_bins = ", options.min_bins, ", multiple_of = ", options.multiple_of, "), got ",
              lengths.size());

  split_fullest(packed, wanted - alone);
  if (options.method == PackMethod::kKk && !packed.empty()) {
    const std::vector<double> costs(lengths.begin(), lengths.end());
    Bins level = largest_differencing(costs, packable, static_cast<int64_t>(packed.size()), false);
    if (max_load(level, lengths) <= options.max_tokens) packed = std::move(level);
  }
  Bins bins;
  for (size_t i = 0; i < oversized; ++i) bins.push_back({order[i]});
  bins.insert(bins.end(), std::make_move_iterator(packed.begin()), std::make_move_iterator(packed.end()));
  for (auto& bin : bins) std::sort(bin.begin(), bin.end());
  return bins;
}

}  // namespace areal
