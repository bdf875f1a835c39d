#include "reshard/layout_overlap.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMaxSteps = int64_t{1} << 22;

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && a < 0); }
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

// The inner dimensions of a set, from `dim` on, their first element at 0.
struct Inner {
  const ElementSet& set;
  int dim;

  int64_t stride() const { return dim < set.dims ? set.stride[static_cast<size_t>(dim)] : 0; }
  int64_t count() const { return dim < set.dims ? set.size[static_cast<size_t>(dim)] : 1; }
  int64_t span() const {
    int64_t total = 0;
    for (auto d = static_cast<size_t>(dim); d < static_cast<size_t>(set.dims); ++d) {
      total += (set.size[d] - 1) * set.stride[d];
    }
    return total;
  }
};

// Takes the widest stride off both sets: b shifted by `shift` meets a exactly when, for some number k of such steps by
// which their elements differ, what remains of b, shifted by shift + k stride, meets what remains of a. Only few k
// bring the remainders within reach of each other.
bool inner_meet(Inner a, Inner b, int64_t shift, int64_t& steps) {
  AREAL_CHECK(--steps >= 0, "reshard: expected strides whose overlap can be told, got ones that interlace too finely");
  const int64_t stride = std::max(a.stride(), b.stride());
  if (stride == 0) return shift == 0;
  int64_t low = 0, high = 0;
  if (a.stride() == stride) {
    low = -(a.count() - 1);
    ++a.dim;
  }
  if (b.stride() == stride) {
    high = b.count() - 1;
    ++b.dim;
  }
  low = std::max(low, ceil_div(-b.span() - shift, stride));
  high = std::min(high, floor_div(a.span() - shift, stride));
  for (int64_t k = low; k <= high; ++k) {
    if (inner_meet(a, b, shift + k * stride, steps)) return true;
  }
  return false;
}

}  // namespace

ElementSet element_set(int64_t first, std::span<const int64_t> sizes, std::span<const int64_t> strides) {
  std::array<std::pair<int64_t, int64_t>, kMaxDims> dims{};  // stride, size; widest stride first
  size_t count = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 1) continue;
    size_t at = count++;
    for (; at > 0 && dims[at - 1].first < strides[d]; --at) dims[at] = dims[at - 1];
    dims[at] = {strides[d], sizes[d]};
  }
  ElementSet set{first, first, 0, {}, {}};
  for (size_t d = 0; d < count; ++d) {
    const auto [stride, size] = dims[d];
    set.last += (size - 1) * stride;
    const auto outer = static_cast<size_t>(set.dims) - 1;
    if (set.dims > 0 && set.stride[outer] == stride * size) {
      set.stride[outer] = stride;
      set.size[outer] *= size;
    } else {
      set.stride[outer + 1] = stride;
      set.size[outer + 1] = size;
      ++set.dims;
    }
  }
  return set;
}

bool is_nested(const ElementSet& set) {
  int64_t span = 0;
  for (auto d = static_cast<size_t>(set.dims); d-- > 0;) {
    if (set.stride[d] <= span) return false;
    span += (set.size[d] - 1) * set.stride[d];
  }
  return true;
}

bool meet(const ElementSet& a, const ElementSet& b) {
  if (a.last < b.first || b.last < a.first) return false;
  int64_t steps = kMaxSteps;
  return inner_meet({a, 0}, {b, 0}, b.first - a.first, steps);
}

}  // namespace areal::reshard
