// Modified first fit decreasing. Source: Johnson and Garey, "A 71/60 theorem for bin packing", 1985.
#include <algorithm>
#include <numeric>

#include "ops/packing/allocation.h"

namespace areal {
namespace {

// The sequences still to place, as positions in an order from longest to shortest. Both queries are amortised nearly
// constant: taken positions are skipped by path-compressed links to the next and previous one that is left.
class Remaining {
 public:
  Remaining(std::span<const int64_t> lengths, std::span<const int64_t> order)
      : lengths_(lengths), order_(order), next_(order.size() + 1), previous_(order.size() + 1) {
    std::iota(next_.begin(), next_.end(), size_t{0});
    std::iota(previous_.begin(), previous_.end(), size_t{0});  // position p is stored at p + 1; 0: none
  }
  int64_t tokens(size_t position) const { return lengths_[order_[position]]; }
  // The first position from the one given on that is left; order.size() when none is.
  size_t at_or_after(size_t position) { return find(next_, position); }
  // One past the last position before `position` that is left; 0 when none is.
  size_t end_before(size_t position) { return find(previous_, position); }
  // The longest one left of at most `tokens`.
  size_t longest_at_most(int64_t tokens) { return at_or_after(first_at_most(tokens)); }
  size_t first_at_most(int64_t tokens) const {
    const auto longer = [&](int64_t index) { return lengths_[index] > tokens; };
    return static_cast<size_t>(std::partition_point(order_.begin(), order_.end(), longer) - order_.begin());
  }
  int64_t take(size_t position) {
    next_[position] = position + 1;
    previous_[position + 1] = position;
    return order_[position];
  }

 private:
  static size_t find(std::vector<size_t>& link, size_t at) {
    while (link[at] != at) at = link[at] = link[link[at]];
    return at;
  }
  std::span<const int64_t> lengths_, order_;
  std::vector<size_t> next_, previous_;
};

struct OpenBins {
  Bins members;
  std::vector<int64_t> free_tokens;
};

void put(Remaining& left, size_t position, OpenBins& bins, size_t bin) {
  bins.free_tokens[bin] -= left.tokens(position);
  bins.members[bin].push_back(left.take(position));
}

// Step 2: forward, the longest medium sequence that fits joins each bin.
void add_mediums(Remaining& left, size_t medium_end, OpenBins& bins) {
  for (size_t bin = 0; bin < bins.members.size(); ++bin) {
    const size_t position = left.longest_at_most(bins.free_tokens[bin]);
    if (position < medium_end) put(left, position, bins, bin);
  }
}

// Step 3: backward over the bins without a medium one, the shortest small sequence and the longest that fits beside it.
void add_small_pairs(Remaining& left, size_t small_begin, size_t small_end, OpenBins& bins) {
  for (size_t bin = bins.members.size(); bin-- > 0;) {
    if (bins.members[bin].size() > 1) continue;
    const size_t shortest_end = left.end_before(small_end);
    if (shortest_end <= small_begin) return;
    const size_t second_end = left.end_before(shortest_end - 1);
    if (second_end <= small_begin) return;
    const int64_t shortest = left.tokens(shortest_end - 1);
    if (shortest + left.tokens(second_end - 1) > bins.free_tokens[bin]) continue;
    put(left, shortest_end - 1, bins, bin);
    const size_t first = std::max(small_begin, left.first_at_most(bins.free_tokens[bin]));
    put(left, left.at_or_after(first), bins, bin);
  }
}

// Step 4: forward, every bin is filled with the longest sequences that still fit.
void fill_up(Remaining& left, size_t end, OpenBins& bins) {
  for (size_t bin = 0; bin < bins.members.size(); ++bin) {
    for (size_t at; (at = left.longest_at_most(bins.free_tokens[bin])) < end;) put(left, at, bins, bin);
  }
}

}  // namespace

Bins modified_first_fit_decreasing(std::span<const int64_t> lengths, std::span<const int64_t> order,
                                   int64_t max_tokens) {
  Remaining left(lengths, order);
  const size_t large_end = left.first_at_most(max_tokens / 2), medium_end = left.first_at_most(max_tokens / 3),
               small_end = left.first_at_most(max_tokens / 6);
  OpenBins bins;
  for (size_t position = 0; position < large_end; ++position) {  // step 1: one bin for each large sequence
    bins.members.emplace_back();
    bins.free_tokens.push_back(max_tokens);
    put(left, position, bins, position);
  }
  add_mediums(left, medium_end, bins);
  add_small_pairs(left, medium_end, small_end, bins);
  fill_up(left, order.size(), bins);

  std::vector<int64_t> rest;  // step 5: the others by first fit decreasing into new bins
  for (size_t at = left.at_or_after(0); at < order.size(); at = left.at_or_after(at + 1)) rest.push_back(order[at]);
  for (auto& bin : first_fit_decreasing(lengths, rest, max_tokens)) bins.members.push_back(std::move(bin));
  return std::move(bins.members);
}

}  // namespace areal
