// Weights whose every element is the version number, so that a mixture of versions shows wherever it is.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "reshard/version_store.h"

namespace areal::reshard {

// 11 tensors of int32, from scalars and empty ones to some that span several of the 4 KiB chunks the tests use.
inline constexpr int64_t kTestChunkBytes = 4096;
inline ArenaLayout test_layout() {
  std::vector<TensorSpec> specs;
  for (const int64_t size : {0, 1, 2, 17, 31, 251, 1021, 1024, 2053, 4093, 5000}) {
    specs.push_back({"layers." + std::to_string(size) + ".weight", "int32", 4, {size}});
  }
  return ArenaLayout(std::move(specs));
}

class Weights {
 public:
  explicit Weights(const ArenaLayout& layout, int64_t version) {
    for (const TensorSpec& spec : layout.tensors()) {
      tensors_.emplace_back(static_cast<size_t>(spec.bytes() / 4), static_cast<int32_t>(version));
      pointers_.push_back(reinterpret_cast<const std::byte*>(tensors_.back().data()));
    }
  }
  std::span<const std::byte* const> pointers() const { return pointers_; }

 private:
  std::vector<std::vector<int32_t>> tensors_;
  std::vector<const std::byte*> pointers_;
};

inline ChunkRange all_chunks(const VersionStore& store) {
  return {0, static_cast<int64_t>(store.plan().chunks.size())};
}

inline void publish(const VersionStore& store, int64_t version, const Deadline& deadline = Deadline(30.0)) {
  Publication publication = store.begin(version, VersionOrder::kIncreasing, deadline);
  publication.write(Weights(store.layout(), version).pointers(), all_chunks(store));
  publication.commit(Verify::kNo);
}

// How many elements of the pinned version are not its number.
inline int64_t count_foreign_elements(const VersionStore& store, const Pin& pin) {
  int64_t foreign = 0;
  for (int64_t tensor = 0; tensor < store.layout().count(); ++tensor) {
    const auto* data = reinterpret_cast<const int32_t*>(pin.arena() + store.layout().offset_bytes(tensor));
    const int64_t count = store.layout().tensors()[static_cast<size_t>(tensor)].bytes() / 4;
    for (int64_t i = 0; i < count; ++i) foreign += data[i] != pin.version();
  }
  return foreign;
}

// The store serves exactly this version, undamaged, and nobody pins or holds anything.
inline void expect_serves(const VersionStore& store, int64_t version) {
  Pin pin = store.pin(Deadline(30.0));
  EXPECT_EQ(pin.version(), version);
  EXPECT_EQ(count_foreign_elements(store, pin), 0);
  EXPECT_NO_THROW(pin.verify());
}

}  // namespace areal::reshard
