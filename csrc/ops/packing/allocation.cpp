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
    while (node /= 2) {
      const int64_t most = std::max(free_[2 * node], free_[2 * node + 1]);
      if (free_[node] == most) break;  // nothing changes further up either
      free_[node] = most;
    }
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
  // A radix sort, stable by construction: 0.03 ms for 4,096 lengths and 1.0 ms for 100,000, where std::stable_sort
  // takes 0.24 ms and 13 ms (one AVX-512 Xeon core, 2026).
  constexpr int kDigitBits = 11;
  constexpr size_t kDigits = size_t{1} << kDigitBits;
  std::vector<int64_t> order(lengths.size()), sorted(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  const int64_t longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  for (int shift = 0; shift < 63 && longest >> shift > 0; shift += kDigitBits) {
    const auto digit = [&](int64_t i) { return kDigits - 1 - (static_cast<size_t>(lengths[i] >> shift) % kDigits); };
    std::vector<size_t> begin(kDigits + 1);
    for (const int64_t i : order) ++begin[digit(i) + 1];
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
    for (const int64_t i : order) sorted[begin[digit(i)]++] = i;
    order.swap(sorted);
  }
  return order;
}

Bins first_fit_decreasing(std::span<const int64_t> lengths, std::span<const int64_t> order, int64_t max_tokens) {
  // Two neighbouring bins hold more than max_tokens together, so 2 * total / max_tokens + 1 bins are enough.
  double total = 0;
  for (const int64_t i : order) total += static_cast<double>(lengths[i]);
  const double bound = 2 * total / static_cast<double>(max_tokens) + 2;
  const int64_t max_bins = static_cast<int64_t>(std::min(bound, static_cast<double>(order.size())));
  FirstFit tree(std::max<int64_t>(max_bins, 1), max_tokens);
  std::vector<size_t> bin_of(order.size()), sizes;
  for (size_t position = 0; position < order.size(); ++position) {
    const size_t bin = bin_of[position] = static_cast<size_t>(tree.place(lengths[order[position]]));
    if (bin >= sizes.size()) sizes.resize(bin + 1);
    ++sizes[bin];
  }
  Bins bins(sizes.size());
  for (size_t bin = 0; bin < bins.size(); ++bin) bins[bin].reserve(sizes[bin]);
  for (size_t position = 0; position < order.size(); ++position) bins[bin_of[position]].push_back(order[position]);
  return bins;
}

void sort_within(Bins& bins, size_t sequences) {
  std::vector<size_t> bin_of(sequences);
  for (size_t bin = 0; bin < bins.size(); ++bin) {
    for (const int64_t i : bins[bin]) bin_of[static_cast<size_t>(i)] = bin;
    bins[bin].clear();
  }
  for (size_t i = 0; i < sequences; ++i) bins[bin_of[i]].push_back(static_cast<int64_t>(i));
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
  const int64_t filled = std::min<int64_t>(wanted, static_cast<int64_t>(lengths.size()));
  AREAL_CHECK(options.allow_empty || filled == wanted, "allocate_microbatches: expected at least ", wanted,
              " sequences (min_bins = ", options.min_bins, ", multiple_of = ", options.multiple_of, "), got ",
              lengths.size());

  split_fullest(packed, filled - alone);
  if (options.method == PackMethod::kKk && !packed.empty()) {
    const std::vector<double> costs(lengths.begin(), lengths.end());
    Bins level = largest_differencing(costs, packable, static_cast<int64_t>(packed.size()), false);
    if (max_load(level, lengths) <= options.max_tokens) packed = std::move(level);
  }
  Bins bins;
  for (size_t i = 0; i < oversized; ++i) bins.push_back({order[i]});
  bins.insert(bins.end(), std::make_move_iterator(packed.begin()), std::make_move_iterator(packed.end()));
  sort_within(bins, lengths.size());
  bins.resize(static_cast<size_t>(wanted));
  return bins;
}

}  // namespace areal
