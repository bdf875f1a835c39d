// Axis-aligned boxes of elements: the vocabulary in which layouts say who holds what.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace areal::reshard {

// Dimensions of a tensor that is moved. Weights have one to three (stacked experts).
inline constexpr int kMaxDims = 6;

// A half-open box [start, start + size) of a tensor's index space, in elements. A scalar has dims = 0 and one element.
struct Box {
  int dims = 0;
  std::array<int64_t, kMaxDims> start{};  // entries from dims on are 0
  std::array<int64_t, kMaxDims> size{};   // entries from dims on are 0

  int64_t elements() const {
    int64_t product = 1;
    for (int d = 0; d < dims; ++d) product *= size[size_t(d)];
    return product;
  }
  bool empty() const { return elements() == 0; }
  bool operator==(const Box&) const = default;
};

// What both boxes hold (of equal dims); nullopt when that is nothing. Two scalars share their one element.
std::optional<Box> intersect(const Box& a, const Box& b);

// "[3:5, 0:896]", for the text of errors.
std::string box_text(const Box& box);

}  // namespace areal::reshard
