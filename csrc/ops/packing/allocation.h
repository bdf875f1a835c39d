// Assigning sequences to micro-batches. Two questions: the fewest bins under a strict token cap (allocate_microbatches)
// and the most even load over a given number of bins (partition_balanced). Both are deterministic: they depend on the
// lengths alone, equal lengths keep the order of their indices.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace areal {

// Indices of sequences, by bin. Every index occurs once; indices ascend within a bin. No bin is empty, unless
// AllocateOptions::allow_empty says that some may be: those come last.
using Bins = std::vector<std::vector<int64_t>>;

enum class PackMethod : int32_t {
  kFfd = 0,   // first fit decreasing: at most 11/9 OPT + 6/9 bins, O(n log n)
  kMffd = 1,  // modified first fit decreasing (Johnson and Garey 1985): at most 71/60 OPT + 1 bins, O(n log n)
  kKk = 2,    // as many bins as kFfd, loads levelled by largest differencing where that keeps the cap
};

struct AllocateOptions {
  int64_t max_tokens = 0;
  int64_t min_bins = 1;
  int64_t multiple_of = 1;  // the number of bins is a multiple of this
  PackMethod method = PackMethod::kFfd;
  bool oversized_alone = false;  // a sequence longer than max_tokens: alone in a bin, or else an error
  bool allow_empty = false;      // fewer sequences than bins asked for: empty bins, or else an error
};

// Throws areal::Error on a negative length, an oversized sequence (naming index and length), and when there are too
// few sequences to fill the number of bins asked for. No sequences give no bins, unless min_bins is above 1.
Bins allocate_microbatches(std::span<const int64_t> lengths, const AllocateOptions& options);

struct PartitionOptions {
  int64_t bins = 1;
  double linear_cost = 1.0;  // the cost of a sequence of L tokens is linear_cost L + quadratic_cost L^2
  double quadratic_cost = 0.0;
  bool equal_size = false;  // numbers of sequences differ by at most one
  std::optional<int64_t> max_tokens;
};

// Karmarkar-Karp largest differencing over options.bins bins, O(n k log k), levelled further by swaps. Throws
// areal::Error when the cap can't be kept (by differencing, nor by first fit decreasing if sizes may differ), and with
// fewer sequences than bins.
Bins partition_balanced(std::span<const int64_t> lengths, const PartitionOptions& options);

// The steps, shared between the files. Lengths are >= 0; `order` lists the sequences to place, longest first.
std::vector<int64_t> longest_first(std::span<const int64_t> lengths);
Bins first_fit_decreasing(std::span<const int64_t> lengths, std::span<const int64_t> order, int64_t max_tokens);
Bins modified_first_fit_decreasing(std::span<const int64_t> lengths, std::span<const int64_t> order,
                                   int64_t max_tokens);
// Splits the bins of most sequences in half until there are `bins`; needs at least that many sequences.
void split_fullest(Bins& result, int64_t bins);
// Sorts the indices of each bin; the bins hold every index of [0, sequences) once.
void sort_within(Bins& bins, size_t sequences);
// Levels the sums of `costs` over `bins` bins; `order` sorts costs from the largest.
Bins largest_differencing(std::span<const double> costs, std::span<const int64_t> order, int64_t bins, bool equal_size);
// Swaps sequences between the fullest and the emptiest bin while that brings their costs closer together; sizes stay.
void level_by_swaps(Bins& bins, std::span<const double> costs);
int64_t max_load(const Bins& bins, std::span<const int64_t> lengths);

}  // namespace areal
