#include "reshard/box.h"

#include <algorithm>

namespace areal::reshard {

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common{a.dims, {}, {}};
  for (size_t d = 0; d < static_cast<size_t>(a.dims); ++d) {
    common.start[d] = std::max(a.start[d], b.start[d]);
    common.size[d] = std::min(a.start[d] + a.size[d], b.start[d] + b.size[d]) - common.start[d];
    if (common.size[d] <= 0) return std::nullopt;
  }
  return common;
}

std::string box_text(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < static_cast<size_t>(box.dims); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(box.start[d]) + ":" + std::to_string(box.start[d] + box.size[d]);
  }
  return text + "]";
}

}  // namespace areal::reshard
