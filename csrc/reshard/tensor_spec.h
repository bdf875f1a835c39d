// A tensor as the engine sees it: a name, an element size, a shape.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace areal::reshard {

// The engine moves bytes: a dtype is a label that both sides compare, and the size of one element.
struct TensorSpec {
  std::string name;
  std::string dtype;  // torch's name: "bfloat16", "float8_e4m3fn", ...
  int64_t item_bytes = 0;
  std::vector<int64_t> shape;  // empty: a scalar

  // Elements times item_bytes. Throws areal::Error when that leaves int64.
  int64_t bytes() const;
  bool operator==(const TensorSpec&) const = default;
};

// Throws areal::Error naming the tensor for an empty name, a negative or overlong shape, or an element size outside
// [1, 64].
void check_spec(const TensorSpec& spec);

// "[3, 4]", for the text of errors.
std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace areal::reshard
