// The staging buffers of one direction to or from one peer: made when first used, kept, grown when a chunk is larger.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

#include "base/check.h"
#include "reshard/transport.h"

namespace areal::reshard {

class Staging {
 public:
  std::span<std::byte> slot(uint32_t index, int64_t bytes) {
    AREAL_CHECK(index < slots_.size() && bytes >= 0, "Staging: expected one of ", slots_.size(), " slots, got ", index);
    Slot& slot = slots_[index];
    const auto size = static_cast<size_t>(bytes);
    if (slot.bytes < size || slot.data == nullptr) {
      slot.data.reset();
      slot.data.reset(
          static_cast<std::byte*>(::operator new(std::max(size, kAlignment), std::align_val_t{kAlignment})));
      slot.bytes = size;
    }
    return {slot.data.get(), size};
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const Slot& slot : slots_) sum += static_cast<int64_t>(slot.bytes);
    return sum;
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t{kAlignment}); }
  };
  struct Slot {
    std::unique_ptr<std::byte, Free> data;
    size_t bytes = 0;
  };
  std::array<Slot, kChunksInFlight> slots_;
};

}  // namespace areal::reshard
