// Where whole tensors lie in an arena: one behind the other, sorted by name. A pure value: the same tensors give the
// same offsets and the same digest in every process, whatever order they came in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/tensor_spec.h"

namespace areal::reshard {

class ArenaLayout {
 public:
  // Every tensor starts on a cache line, so that non-temporal stores never share one.
  static constexpr int64_t kAlignmentBytes = 64;

  // Sorts by name and packs the tensors one behind the other. Throws areal::Error for an empty or repeated name, a
  // negative dimension, an element size outside [1, 64], or a total that leaves int64.
  explicit ArenaLayout(std::vector<TensorSpec> tensors);

  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  int64_t offset_bytes(int64_t tensor) const { return offsets_[static_cast<size_t>(tensor)]; }
  // Position of a name in tensors().
  std::optional<int64_t> find(std::string_view name) const;

  int64_t arena_bytes() const { return arena_bytes_; }      // a multiple of kAlignmentBytes, at least one
  int64_t payload_bytes() const { return payload_bytes_; }  // without the padding between tensors
  // Covers names, dtypes, element sizes, shapes and offsets.
  uint64_t digest() const { return digest_; }

  // A byte string that parse() turns back into an equal ArenaLayout. parse() trusts nothing: it throws areal::Error for
  // anything that serialize() cannot have written.
  std::string serialize() const;
  static ArenaLayout parse(std::string_view text);

 private:
  std::vector<TensorSpec> tensors_;
  std::vector<int64_t> offsets_;
  int64_t arena_bytes_ = 0;
  int64_t payload_bytes_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace areal::reshard
