// Largest differencing. Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982.
#include <algorithm>
#include <queue>

#include "base/check.h"
#include "ops/packing/allocation.h"

namespace areal {
namespace {

// The sequences of one bin, as a chain through Chains::next.
struct Subset {
  double cost = 0;
  int64_t count = 0, first = -1, last = -1;
};

// Costly first; an empty subset sorts after every other, so that merging fills empty bins before it doubles up.
bool costlier(const Subset& a, const Subset& b) {
  if (a.cost != b.cost) return a.cost > b.cost;
  return a.count > b.count;
}

// A partial solution: its non-empty subsets, costly first. The other of the k bins are empty.
using Partial = std::vector<Subset>;

class Differencing {
 public:
  Differencing(std::span<const double> costs, int64_t bins) : costs_(costs), bins_(bins), next_(costs.size(), -1) {}

  // A new partial solution of one sequence a bin.
  void add(std::span<const int64_t> members) {
    Partial partial;
    for (const int64_t i : members) partial.push_back({costs_[i], 1, i, i});
    push(std::move(partial));
  }

  // Merges the two partial solutions of largest spread until one is left.
  Partial solve() {
    while (queue_.size() > 1) {
      const size_t a = pop(), b = pop();
      Partial merged = merge(std::move(partials_[a]), partials_[b]);
      partials_[a] = {}, partials_[b] = {};
      push(std::move(merged));
    }
    return queue_.empty() ? Partial{} : std::move(partials_[pop()]);
  }

  std::vector<int64_t> members(const Subset& subset) const {
    std::vector<int64_t> out;
    for (int64_t i = subset.first; i >= 0; i = next_[i]) out.push_back(i);
    return out;
  }

 private:
  void push(Partial partial) {
    const double least = static_cast<int64_t>(partial.size()) < bins_ ? 0.0 : partial.back().cost;
    queue_.emplace(partial.front().cost - least, -static_cast<int64_t>(partials_.size()));
    partials_.push_back(std::move(partial));
  }
  size_t pop() {
    const size_t index = static_cast<size_t>(-queue_.top().second);
    queue_.pop();
    return index;
  }
  // The costliest of one joins the cheapest of the other. Most merges add a single sequence to a partial solution that
  // has room for it, which leaves it sorted: in place they cost next to nothing.
  Partial merge(Partial a, const Partial& b) {
    a.resize(static_cast<size_t>(std::min<int64_t>(bins_, a.size() + b.size())));
    for (size_t i = 0; i < b.size(); ++i) join(a[a.size() - 1 - i], b[i]);
    const auto changed = a.end() - static_cast<std::ptrdiff_t>(b.size());
    const auto unchanged_neighbour = changed == a.begin() ? changed : changed - 1;
    if (!std::is_sorted(unchanged_neighbour, a.end(), costlier)) std::stable_sort(a.begin(), a.end(), costlier);
    return a;
  }
  void join(Subset& into, const Subset& from) {
    if (into.count == 0) {
      into = from;
      return;
    }
    next_[into.last] = from.first;
    into = {into.cost + from.cost, into.count + from.count, into.first, from.last};
  }

  std::span<const double> costs_;
  int64_t bins_;
  std::vector<int64_t> next_;  // the sequence after this one in its subset; -1: none
  std::vector<Partial> partials_;
  std::priority_queue<std::pair<double, int64_t>> queue_;  // (spread, -index): the oldest first among equals
};

std::vector<double> sequence_costs(std::span<const int64_t> lengths, const PartitionOptions& options) {
  std::vector<double> costs;
  costs.reserve(lengths.size());
  for (const int64_t length : lengths) {
    const double tokens = static_cast<double>(length);
    costs.push_back(options.linear_cost * tokens + options.quadratic_cost * tokens * tokens);
  }
  return costs;
}

void check_options(std::span<const int64_t> lengths, const PartitionOptions& options) {
  constexpr const char* op = "partition_balanced";
  AREAL_CHECK(options.bins >= 1, op, ": expected k >= 1, got ", options.bins);
  AREAL_CHECK(options.bins <= static_cast<int64_t>(lengths.size()), op, ": expected at least k = ", options.bins,
              " sequences, got ", lengths.size());
  AREAL_CHECK(options.linear_cost >= 0 && options.quadratic_cost >= 0, op, ": expected cost factors >= 0, got (",
              options.linear_cost, ", ", options.quadratic_cost, ")");
  for (size_t i = 0; i < lengths.size(); ++i) {
    AREAL_CHECK(lengths[i] >= 0, op, ": expected lengths >= 0, got lengths[", i, "] = ", lengths[i]);
    AREAL_CHECK(!options.max_tokens || lengths[i] <= *options.max_tokens, op,
                ": expected lengths <= max_tokens = ", *options.max_tokens, ", got lengths[", i, "] = ", lengths[i]);
  }
}

}  // namespace

Bins largest_differencing(std::span<const double> costs, std::span<const int64_t> order, int64_t bins,
                          bool equal_size) {
  Differencing differencing(costs, bins);
  // Equal sizes: start from solutions that already hold one sequence in every bin (the last may lack some).
  const size_t step = equal_size ? static_cast<size_t>(bins) : 1;
  for (size_t i = 0; i < order.size(); i += step) differencing.add(order.subspan(i, std::min(step, order.size() - i)));
  Bins result;
  for (const Subset& subset : differencing.solve()) {
    result.push_back(differencing.members(subset));
    std::sort(result.back().begin(), result.back().end());
  }
  return result;
}

Bins partition_balanced(std::span<const int64_t> lengths, const PartitionOptions& options) {
  check_options(lengths, options);
  const std::vector<double> costs = sequence_costs(lengths, options);
  const std::vector<int64_t> order = longest_first(lengths);
  Bins bins = largest_differencing(costs, order, options.bins, options.equal_size);
  level_by_swaps(bins, costs);
  if (!options.max_tokens || max_load(bins, lengths) <= *options.max_tokens) return bins;

  const int64_t most = max_load(bins, lengths);
  AREAL_CHECK(!options.equal_size, "partition_balanced: expected max_tokens >= ", most,
              " (the fullest of the k = ", options.bins, " equal-sized bins found), got ", *options.max_tokens);
  Bins packed = first_fit_decreasing(lengths, order, *options.max_tokens);
  AREAL_CHECK(static_cast<int64_t>(packed.size()) <= options.bins, "partition_balanced: expected k >= ", packed.size(),
              " (the fewest bins found under max_tokens = ", *options.max_tokens, "), got ", options.bins);
  split_fullest(packed, options.bins);
  sort_within(packed, lengths.size());
  return packed;
}

}  // namespace areal
