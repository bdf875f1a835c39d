#include "reshard/tensor_spec.h"

#include <algorithm>

#include "base/check.h"

namespace areal::reshard {
namespace {

constexpr int64_t kMaxItemBytes = 64;
constexpr size_t kMaxDims = 64;

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void check_spec(const TensorSpec& spec) {
  AREAL_CHECK(!spec.name.empty(), "reshard: expected tensors with a name, got an empty one");
  AREAL_CHECK(spec.item_bytes >= 1 && spec.item_bytes <= kMaxItemBytes, "reshard: tensor '", spec.name,
              "': expected an element size of 1 to ", kMaxItemBytes, " bytes, got ", spec.item_bytes);
  AREAL_CHECK(spec.shape.size() <= kMaxDims, "reshard: tensor '", spec.name, "': expected at most ", kMaxDims,
              " dimensions, got ", spec.shape.size());
  for (const int64_t size : spec.shape) {
    AREAL_CHECK(size >= 0, "reshard: tensor '", spec.name, "': expected sizes >= 0, got ", shape_text(spec.shape));
  }
}

int64_t TensorSpec::bytes() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t total = item_bytes;
  for (const int64_t size : shape) {
    AREAL_CHECK(!__builtin_mul_overflow(total, size, &total), "reshard: tensor '", name,
                "': expected fewer than 2^63 bytes, got shape ", shape_text(shape));
  }
  return total;
}

}  // namespace areal::reshard
