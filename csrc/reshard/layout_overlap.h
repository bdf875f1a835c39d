// Whether strided sets of buffer elements meet: what keeps two tensors of one buffer apart, exactly, in time that does
// not depend on how many elements they hold.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "reshard/box.h"

namespace areal::reshard {

// The elements first + sum_d i_d stride[d], 0 <= i_d < size[d]; dimensions of size 1 left out, contiguous ones merged,
// sorted by stride, widest first.
struct ElementSet {
  int64_t first = 0;
  int64_t last = 0;  // included
  int dims = 0;
  std::array<int64_t, kMaxDims> size{};
  std::array<int64_t, kMaxDims> stride{};
};

// sizes >= 1, strides >= 0, last within int64.
ElementSet element_set(int64_t first, std::span<const int64_t> sizes, std::span<const int64_t> strides);

// Whether each dimension steps over all that the narrower ones reach. Then no element is named twice; sets that
// interlace with themselves, as strides 2 and 3 do, are refused with those that do name one twice.
bool is_nested(const ElementSet& set);

// Whether two nested sets have an element in common. Throws areal::Error after very many steps, which no storage of
// tensors takes.
bool meet(const ElementSet& a, const ElementSet& b);

}  // namespace areal::reshard
